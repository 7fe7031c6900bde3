"""Checks that a dispatcher runs on the machine and with the expert parallelism of a job."""

from __future__ import annotations

from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InputError
from moesim.simulator.layout.parallel import Layout, tokens_per_gpu
from moesim.simulator.model.dispatchers import KEY, Dispatcher, dispatcher, dispatchers
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario import Scenario


def check_dispatcher(scenario: Scenario, cluster: Cluster, layout: Layout) -> None:
    """Raise InputError, with the nearest choice that runs, for a dispatcher that does not run on the job."""
    plan, communication = scenario.parallel, scenario.communication
    kind = dispatcher(communication.kernels)
    if communication.fused_permutation and kind.transport != "domain":
        raise InputError(
            f"communication.fused_permutation: {communication.kernels} does not permute rows inside its "
            "kernels; use communication.kernels=hybridep, or leave the key out",
            key="communication.fused_permutation",
            nearest=(False,),
        )
    if communication.permutation_stream == "communication" and not kind.permutes_in_call:
        raise InputError(
            f"communication.permutation_stream=communication: {communication.kernels} leaves permutation to "
            "the expert layers on the compute stream; use compute, or communication.kernels=hybridep",
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
    kind = dispatcher(name)
    if ep == 1 or shape.moe is None:
        return
    problem = None
    if kind.row_widths and shape.routed_width not in kind.row_widths:
        widths = ", ".join(f"{width:,}" for width in kind.row_widths)
        problem = f"its kernels are compiled for rows of {widths} elements, not {shape.routed_width:,}"
    elif kind.most_choices is not None and shape.moe.top_k > kind.most_choices.n:
        problem = f"a token may choose {kind.most_choices.n} experts, not {shape.moe.top_k}"
    elif kind.fills_the_gpu and paired:
        problem = f"its kernels fill the GPU, and schedule={schedule} computes beside transfers"
    if problem is not None:
        others = [other for other, one in dispatchers().items() if one.curves == "deepep"]
        raise InputError(f"{KEY}={name}: {problem}; use {KEY}={others[0]}", key=KEY, nearest=others)


def check_group(kernels: str, cluster: Cluster, layout: Layout, sequence: int) -> None:
    """Raise InputError for expert-parallel groups that a dispatcher cannot serve.

    `sequence`: tokens of one sequence.
    """
    plan = layout.plan
    if plan.ep == 1 or cluster.accelerator.communication_engine is not None:
        return
    kind, nodes = dispatcher(kernels), layout.nodes_spanned(layout.ep_group(0))
    group = plan.ep * plan.expert_tp  # the ranks that split an expert exchange tokens too
    problem = _problem(kind, cluster, group, nodes)
    if problem is not None:
        runs = [
            name for name, other in dispatchers().items() if _problem(other, cluster, group, nodes) is None
        ]
        raise InputError(f"{KEY}={kernels}: {problem}; use {KEY}={runs[0]}", key=KEY, nearest=runs)
    _check_tokens(kernels, kind, layout, sequence, nodes)


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


def _problem(kind: Dispatcher, cluster: Cluster, group: int, nodes: int) -> str | None:
    """Why a dispatcher does not run with groups of `group` ranks over `nodes` domains; None if it does."""
    local, elsewhere = group // nodes, kind.refuses(cluster.accelerator)
    if elsewhere is not None:
        return elsewhere
    if kind.domain_ranks is not None and local > kind.domain_ranks.n:
        return f"it has at most {kind.domain_ranks.n} ranks in one NVLink domain, and the group has {local}"
    if kind.whole_domains and kind.domain_ranks is not None and nodes > 1 and local < kind.domain_ranks.n:
        most = kind.domain_ranks.n
        return f"across domains it needs {most} ranks of the group in each NVLink domain, not {local}"
    if kind.domains is not None and nodes > kind.domains.n:
        return f"it has at most {kind.domains.n} NVLink domains in a group, and the group has {nodes}"
    return None


def _check_tokens(kernels: str, kind: Dispatcher, layout: Layout, sequence: int, nodes: int) -> None:
    plan = layout.plan
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
