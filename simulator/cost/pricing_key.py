"""Keys of what prices depend on, so that scenarios which differ elsewhere share their prices.

The keys name every part of a job that pricing reads; a test records those reads.
"""

from __future__ import annotations

from collections.abc import Hashable

from moesim.hwmodels.host import load_host
from moesim.simulator.common.bounded_cache import Same, model_key
from moesim.simulator.layout.job import ResolvedJob


def operators_key(job: ResolvedJob) -> Hashable:
    """All that the operators of a job and their prices alone on all SMs depend on."""
    s, cluster = job.scenario, job.cluster
    return (
        Same(job.shape),
        Same(job.profile),
        model_key(cluster.accelerator),
        cluster.n_gpus,
        cluster.node.n_gpus,
        s.parallel,
        s.batch.sequence_length,
        s.recipe,
        s.recompute,
        s.software,
        (s.routing.gate, s.routing.groups_per_token, s.routing.eplb, s.routing.redundant_experts),
        s.communication.model_copy(update={"sms": 0}),
    )


def prices_key(job: ResolvedJob) -> Hashable:
    """All that the cost table of a job depends on, besides its schedule and stages."""
    s, host = job.scenario, job.scenario.software.host
    return (
        operators_key(job),
        (model_key(job.cluster.node), model_key(job.cluster.network), job.cluster.nodes),
        s.communication.sms,
        s.schedule,
        s.batch.sequences,  # whether gradients add up over micro-batches (`GradientSync`)
        (s.variation.power_clock, s.variation.jitter_cv.value),
        None if host is None else model_key(load_host(s.path(host))),
    )
