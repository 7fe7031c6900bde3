"""Lists the GPUs in each group of a pipeline rank, and counts its sends that share a torus link (pure)."""

from __future__ import annotations

import numpy as np

from moesim.hwmodels.arrays import IntArray
from moesim.hwmodels.topologies.description import SWITCHED, ScaleUpShares
from moesim.simulator.layout.gradient_sync import GradientSync
from moesim.simulator.layout.parallel import Layout

MOST_MEMBERS = 256
"""Most GPUs that one program simulates where there is no expert-parallel group to set the number."""


def members_per_program(layout: Layout) -> int:
    """GPUs that a program simulates for each pipeline rank: one expert-parallel group, or replicas."""
    return layout.plan.ep if layout.plan.ep > 1 else min(layout.dp, MOST_MEMBERS)


def gpus_in_step(layout: Layout, sync: GradientSync) -> int:
    """GPUs that one member of a program represents, because they meet inside every layer (eq. E1a).

    Tensor and context parallelism make a member's GPUs wait for each other in every layer. Without expert
    parallelism a member is a replica, which has all of them; where collectives inside the step join all
    replicas (ZeRO-3, sharded gradients), the simulated ones represent all. With it a member is a GPU of the
    group, and represents more only where tensor and context parallelism span several groups.
    """
    plan = layout.plan
    together = plan.tp * plan.cp
    if plan.ep > 1:
        return max(together, plan.ep * plan.expert_tp) // plan.ep
    return together * (-(-layout.dp // MOST_MEMBERS) if sync.inside_step else 1)


def independent_groups(layout: Layout, sync: GradientSync) -> int:
    """Groups of a pipeline rank that meet only at the end of the step; folded resolution simulates one.

    Without expert parallelism every member is a replica of its own, and one program holds them all.
    """
    if layout.plan.ep == 1:
        return 1
    return max(1, layout.gpus_per_pipeline_rank // (layout.plan.ep * gpus_in_step(layout, sync)))


def grouped_gpus(layout: Layout, wiring: ScaleUpShares = SWITCHED) -> IntArray:
    """Global GPU numbers [pipeline rank, group, member] of expert-parallel groups, or of consecutive GPUs.

    On a torus a group is the block of chips for which its exchange is priced (docs/model.md, eq. H3).
    """
    plan, inner = layout.plan, layout.gpus_per_pipeline_rank
    numbers = np.arange(layout.n_gpus, dtype=np.int64).reshape(plan.pp, inner)
    if 1 < plan.ep <= layout.gpus_per_node:
        blocks = wiring.groups(plan.ep, layout.n_gpus)
        if blocks is not None:
            return blocks.reshape(plan.pp, -1, plan.ep)
    if plan.ep > 1:
        folded = numbers.reshape(plan.pp, layout.expert_dp, plan.ep, plan.expert_tp)
        return folded.transpose(0, 1, 3, 2).reshape(plan.pp, -1, plan.ep)
    members = max(m for m in range(1, min(inner, MOST_MEMBERS) + 1) if inner % m == 0)
    return numbers.reshape(plan.pp, -1, members)


def sends_on_a_link(layout: Layout, wiring: ScaleUpShares) -> int:
    """Number of sends on the busiest link when all GPUs of a pipeline rank send to the next rank at once.

    It is 1 where every GPU has a link of its own; on a torus the next rank is several chips away (eq. X4).
    """
    if not wiring.links_are_shared:
        return 1
    gpus = grouped_gpus(layout, wiring).reshape(layout.plan.pp, -1)
    pairs = [(gpus[rank], gpus[rank + 1]) for rank in range(layout.plan.pp - 1)]
    return max((wiring.busiest_link(*way) for a, b in pairs for way in ((a, b), (b, a))), default=1)
