"""Checks that a dispatcher runs on the machine and with the expert parallelism of a job."""

from __future__ import annotations

from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InputError
from moesim.simulator.dispatchers.registry import DISPATCHERS, KEY, check_runs, dispatcher
from moesim.simulator.layout.parallel import Layout, tokens_per_gpu
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario import Scenario


def check_dispatcher(scenario: Scenario, cluster: Cluster, layout: Layout) -> None:
    """Raise InputError, with the nearest choice that runs, for a dispatcher that does not run on the job."""
    plan, communication = scenario.parallel, scenario.communication
    kind = dispatcher(communication.kernels)
    if communication.fused_permutation and not kind.fuses_permutation:
        able = next(name for name, one in DISPATCHERS.items() if one.fuses_permutation)
        raise InputError(
            f"communication.fused_permutation: {communication.kernels} does not permute rows inside its "
            f"kernels; use {KEY}={able}, or leave the key out",
            key="communication.fused_permutation",
            nearest=(False,),
        )
    if communication.permutation_stream == "communication" and not kind.permutes_in_call:
        able = next(name for name, one in DISPATCHERS.items() if one.permutes_in_call)
        raise InputError(
            f"communication.permutation_stream=communication: {communication.kernels} leaves permutation to "
            f"the expert layers on the compute stream; use compute, or {KEY}={able}",
            key="communication.permutation_stream",
            nearest=("compute",),
        )
    if plan.ep == 1 or cluster.accelerator.communication_engine is not None:
        return
    check_domains(plan.ep, plan.expert_tp, layout.n_gpus, layout.gpus_per_node)
    check_group(communication.kernels, cluster, layout, scenario.batch.sequence_length)


def check_kernels(name: str, ep: int, shape: ModelShape, schedule: str, paired: bool) -> None:
    """Raise InputError for a model or schedule that a dispatcher's kernels are not written for.

    `name` is the dispatcher's, `ep` the ranks of a group. `paired`: the schedule overlaps transfers with the
    compute of another micro-batch.
    """
    if ep > 1:
        check_runs(name, lambda kind: kind.refuses_model(shape, schedule, paired))


def check_group(kernels: str, cluster: Cluster, layout: Layout, sequence: int) -> None:
    """Raise InputError for expert-parallel groups that a dispatcher cannot serve.

    `sequence`: tokens of one sequence.
    """
    plan = layout.plan
    if plan.ep == 1 or cluster.accelerator.communication_engine is not None:
        return
    kind, nodes = dispatcher(kernels), layout.nodes_spanned(layout.ep_group(0))
    group = plan.ep * plan.expert_tp  # the ranks that split an expert exchange tokens too
    adapter = cluster.node.adapter or ""
    check_runs(kernels, lambda one: one.refuses_group(cluster.accelerator, group, nodes, adapter))
    tokens = tokens_per_gpu(plan, sequence)
    if kind.tokens_across is None or nodes == 1 or tokens <= kind.tokens_across.n:
        return
    fits = int(plan.microbatch * kind.tokens_across.n / tokens)
    remedy = f"parallel.microbatch={fits}" if fits else f"a larger parallel.cp or {KEY}=nccl"
    raise InputError(
        f"{KEY}={kernels}: a rank sends {tokens:,.0f} tokens, and across {nodes} NVLink domains its queues "
        f"hold {kind.tokens_across.n:,}; use {remedy}",
        key="parallel.microbatch",
        nearest=(fits,) if fits else (),
    )


def check_domains(ep: int, expert_tp: int, n_gpus: int, domain: int) -> None:
    """Raise InputError for groups that lie unevenly over NVLink domains of `domain` GPUs.

    A group stays inside one domain if its size divides the domain, and fills several if it is a multiple.
    """
    group = ep * expert_tp
    if n_gpus <= domain or group == 1 or domain % group == 0 or group % domain == 0:
        return
    sizes = [d for d in range(1, domain + 1) if domain % d == 0]
    sizes += [domain * n for n in range(2, n_gpus // domain + 1) if n_gpus % (domain * n) == 0]
    legal = [size // expert_tp for size in sizes if size % expert_tp == 0]
    below, above = [s for s in legal if s < ep], [s for s in legal if s > ep]
    near = sorted({max(below, default=1), min(above, default=1)} - {1})
    what = f"parallel.ep={ep}" + (f" with expert_tp={expert_tp}" if expert_tp > 1 else "")
    raise InputError(
        f"{what} does not divide an NVLink domain of {domain} GPUs and is no multiple of it, so some groups "
        f"would cross domains and others not; nearest: {', '.join(map(str, near)) or 'parallel.ep=1'}",
        key="parallel.ep",
        nearest=near or (1,),
    )
