"""Prices the end of the step: gradient reduction, norm, optimizer and parameter gather on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, fsum, log2

from moesim.simulator.cost.communication import notify_seconds
from moesim.simulator.cost.data_parallel import data_parallel, slow_down_by_compute
from moesim.simulator.cost.library_collectives import RingOperation, ring_price
from moesim.simulator.cost.overlap import OverlapSlowDown, exposed_behind_window
from moesim.simulator.cost.price_evidence import NO_EVIDENCE, PricedSeconds, combined
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.cost.profile_use import collective_residual, link_share_evidence
from moesim.simulator.cost.table import SyncCost
from moesim.simulator.layout.in_flight import block_kinds_by_rank
from moesim.simulator.layout.stages import StageAssignment
from moesim.simulator.model.block import EMBEDDING, HEAD
from moesim.simulator.model.framework_kernels import with_step_kernels
from moesim.simulator.model.operator import BlockKind
from moesim.simulator.model.optimizer import optimizer_operators
from moesim.simulator.model.precision import BYTES_PER_ELEMENT
from moesim.simulator.schedules import Schedule


def step_end(pricer: Pricer, schedule: Schedule, stages: StageAssignment) -> tuple[SyncCost, ...]:
    """End of the step on every pipeline rank (docs/model.md, section "End of the step")."""
    by_rank = block_kinds_by_rank(schedule, stages)
    same = {kinds: rank_step_end(pricer, kinds, schedule) for kinds in dict.fromkeys(by_rank)}
    return tuple(same[kinds] for kinds in by_rank)


def rank_step_end(pricer: Pricer, kinds: tuple[BlockKind, ...], schedule: Schedule) -> SyncCost:
    """End of the step on a pipeline rank that holds these blocks (docs/model.md, eq. E5)."""
    plan, recipe, layout = pricer.scenario.parallel, pricer.scenario.recipe, pricer.layout
    copies = len(schedule.routes)
    parameters = [pricer.block_parameters(kind) for kind in kinds]
    dense, expert = fsum(d for d, _ in parameters), fsum(e for _, e in parameters)
    reduction, gather = _collectives(pricer, kinds, schedule, dense, expert)
    shards = (layout.dp * plan.cp * copies, layout.expert_dp * copies) if plan.zero_stage else (1, 1)
    owned = dense / shards[0] + expert / shards[1]
    local = dense + expert if recipe.linear == "fp8" else 0.0
    operators = with_step_kernels(
        optimizer_operators(owned, recipe, local),
        pricer.scenario.software.step_kernels,
        owned,
        owned if plan.zero_stage == 3 else dense + expert,
        recipe,
    )
    update = pricer.compute(operators, "alone")
    tied = _tied_tables(pricer, kinds, schedule)
    reduce_s, gather_s = reduction.seconds + tied.seconds, gather.seconds
    nodes = max(2, pricer.cluster.nodes)
    links = pricer.links
    norm_s = 2 * ceil(log2(nodes)) * links.nic_latency_s + notify_seconds(links, 1)
    total = reduce_s + norm_s + update.fixed_s + gather_s
    worst = (
        (reduce_s + gather_s) * (1.0 + collective_residual(pricer.profile, links.curves))
        + norm_s
        + update.worst_s
    )
    shares = link_share_evidence(pricer.job) if pricer.cluster.n_gpus > 1 else NO_EVIDENCE
    stands_on = (reduction.evidence, tied.evidence, gather.evidence, update.evidence, shares)
    evidence = combined((part, 1.0) for part in stands_on)
    return SyncCost(reduce_s, norm_s, update.fixed_s, gather_s, update.best_s, max(worst, total), evidence)


def _collectives(
    pricer: Pricer, kinds: Sequence[BlockKind], schedule: Schedule, dense: float, expert: float
) -> tuple[PricedSeconds, PricedSeconds]:
    """Exposed gradient reduction and parameter gather of a rank with (dense, expert) parameters.

    Both are 0 with ZeRO-3, which runs them block by block inside the step.
    """
    plan, copies = pricer.scenario.parallel, len(schedule.routes)
    if plan.zero_stage == 3:
        return PricedSeconds(), PricedSeconds()
    reduced, gathered = _element_bytes(pricer)
    gather = PricedSeconds()
    if plan.zero_stage == 0:  # an all-reduce, which also gathers the gradients before the optimizer
        reduction = data_parallel(pricer, "all_reduce", dense * reduced, expert * reduced, copies)
    else:
        whole = pricer.scenario.software.gradients_all_reduced
        name: RingOperation = "all_reduce" if whole else "reduce_scatter"
        reduction = data_parallel(pricer, name, dense * reduced, expert * reduced, copies)
        gather = data_parallel(pricer, "all_gather", dense * gathered, expert * gathered, copies)
    if pricer.scenario.software.overlap_data_parallel:
        return exposed_behind_compute(pricer, kinds, schedule, reduction, gather)
    return reduction, gather


def _tied_tables(pricer: Pricer, kinds: Sequence[BlockKind], schedule: Schedule) -> PricedSeconds:
    """All-reduce of a shared table's gradient between its two pipeline ranks (docs/model.md, eq. E30).

    It is exposed, because it follows the reduction of the last gradients. 0 for other ranks, for tables that
    are not shared, and where one rank holds embedding and head.
    """
    shape, plan = pricer.shape, pricer.scenario.parallel
    both = EMBEDDING in kinds and HEAD in kinds
    if not pricer.scenario.software.tied_tables_reduced or not shape.tied_embeddings:
        return PricedSeconds()
    if schedule.pp == 1 or both or not (EMBEDDING in kinds or HEAD in kinds):
        return PricedSeconds()
    table = shape.vocab * shape.hidden / plan.tp * BYTES_PER_ELEMENT[pricer.scenario.recipe.gradients]
    # Pipeline ranks lie as far apart as the layout places them: a node holds both ends or one of them.
    inside = pricer.cluster.n_gpus <= pricer.links.gpus_per_node
    return ring_price("all_reduce", table, 2, 2 if inside else 1, pricer.links, pricer.profile)


def exposed_behind_compute(
    pricer: Pricer,
    kinds: Sequence[BlockKind],
    schedule: Schedule,
    reduction: PricedSeconds,
    gather: PricedSeconds,
) -> tuple[PricedSeconds, PricedSeconds]:
    """Exposed parts of a rank's reduction behind its last backward and gather behind its first forward.

    `kinds`: blocks of the rank. `reduction` and `gather`: their prices alone (docs/model.md, eq. O4).
    """
    plan = pricer.scenario.parallel
    copies, lost = len(schedule.routes), pricer.profile.lost_beside_nccl.value
    seconds = {kind: pass_seconds(pricer, kind) for kind in sorted(set(kinds))}
    passes = min(schedule.pp, schedule.microbatches) if plan.vpp > 1 else 1
    forward_s, backward_s = (passes * fsum(seconds[kind][i] for kind in kinds) for i in (0, 1))
    # Without ZeRO the reduction is an all-reduce, which runs both rings over the gradients.
    reductions: tuple[RingOperation, ...] = ("reduce_scatter",)
    if plan.zero_stage == 0:
        reductions = ("reduce_scatter", "all_gather")
    gathers: tuple[RingOperation, ...] = ("all_gather",)
    left = []
    for collective, window_s, names, element_bytes in zip(
        (reduction, gather),
        (backward_s, forward_s),
        (reductions, gathers),
        _element_bytes(pricer),
        strict=True,
    ):
        factor, evidence = slow_down_by_compute(pricer, names, kinds, element_bytes, copies)
        exposed_s = exposed_behind_window(
            collective.seconds, window_s, len(kinds), OverlapSlowDown(lost, factor)
        )
        left.append(PricedSeconds(exposed_s, collective.evidence | evidence))
    return left[0], left[1]


def _element_bytes(pricer: Pricer) -> tuple[float, float]:
    """Bytes of a reduced gradient and of a gathered parameter."""
    recipe = pricer.scenario.recipe
    return BYTES_PER_ELEMENT[recipe.gradient_reduce], BYTES_PER_ELEMENT[recipe.parameter_gather]


def pass_seconds(pricer: Pricer, kind: BlockKind) -> tuple[float, float]:
    """(forward, backward) compute seconds of one block and micro-batch, alone on all SMs."""
    priced = {phase: pricer.phase(kind, phase, "alone") for phase in pricer.operators(kind)}
    forward = fsum(c.fixed_s + c.row_s for p, c in priced.items() if p.endswith(" F"))
    return forward, fsum(c.fixed_s + c.row_s for c in priced.values()) - forward
