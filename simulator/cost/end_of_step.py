"""Prices the end of the step: gradient reduction, norm, optimizer and parameter gather on every rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from math import ceil, fsum
from typing import Any, NamedTuple, TypeAlias, TypeVar

from msgspec.structs import replace

from moesim.simulator.cost.collectives.ring import busiest_bytes
from moesim.simulator.cost.compute import OperatorCost
from moesim.simulator.cost.data_parallel import (
    WHOLE,
    ChunkPlace,
    ChunkTimes,
    Pieces,
    Ring,
    data_parallel,
    exposed_gathers,
    exposed_reductions,
    group_rings,
    pieces_of,
    rings,
    shard_rings,
    slow_down_by_compute,
)
from moesim.simulator.cost.evidence import (
    GATHER,
    NO_EVIDENCE,
    NORM,
    REDUCTION,
    TIED,
    CostedSeconds,
    Moved,
    combined,
    summed,
)
from moesim.simulator.cost.library_collectives import (
    RingOperation,
    collective_residual,
    link_share_evidence,
    ring_price,
    small_all_reduce_s,
)
from moesim.simulator.cost.overlap import OverlapSlowDown, exposed_behind_window
from moesim.simulator.cost.pricing import Pricer, phase_cost
from moesim.simulator.cost.table import PhaseCost, SyncCost
from moesim.simulator.cost.transfers import block_transfers
from moesim.simulator.frameworks.kernel_lists import with_step_kernels
from moesim.simulator.layout.stages import StageAssignment
from moesim.simulator.memory.gpu import RankChunks, chunks_by_rank
from moesim.simulator.model.block import EMBEDDING, HEAD
from moesim.simulator.model.operator import BlockKind, Operator
from moesim.simulator.model.operators import optimizer_operators
from moesim.simulator.model.precision import BYTES_PER_ELEMENT
from moesim.simulator.schedules import Schedule

T = TypeVar("T")

NORM_BYTES = 4.0
"""The sum of squares of a rank's gradients, in FP32."""


def step_end(pricer: Pricer, schedule: Schedule, stages: StageAssignment) -> tuple[SyncCost, ...]:
    """End of the step on every pipeline rank (docs/model.md, section "End of the step")."""
    by_rank = chunks_by_rank(schedule, stages, by_place=pricer.scenario.software.buckets_by_chunk)
    same = rank_step_ends(pricer, by_rank, schedule)
    return tuple(same[chunks] for chunks in by_rank)


def rank_step_ends(
    pricer: Pricer, ranks: Iterable[RankChunks], schedule: Schedule, known: Known | None = None
) -> dict[RankChunks, SyncCost]:
    """End of the step on each of some pipeline ranks; what ranks with equal chunks share is priced once."""
    known = known or Known({}, {})
    return {chunks: rank_step_end(pricer, chunks, schedule, known) for chunks in dict.fromkeys(ranks)}


class Known(NamedTuple):
    """Prices that pipeline ranks share, by what they are of."""

    of_plan: dict[Hashable, Any]
    """Those of one plan."""
    alike: dict[Hashable, Any]
    """Those of plans that differ in context parallelism, micro-batch, recompute, SMs or pairs only."""
    evidence: bool = True
    """Whether costs carry their evidence and bytes."""


def _once(known: dict[Hashable, Any], key: Hashable, price: Callable[[], T]) -> T:
    if key not in known:
        known[key] = price()
    value: T = known[key]
    return value


def rank_step_end(
    pricer: Pricer, chunks: RankChunks, schedule: Schedule, known: Known | None = None
) -> SyncCost:
    """End of the step on a pipeline rank that holds these blocks (docs/model.md, eq. E5).

    `known`: prices of the ranks before, with the same schedule.
    """
    known = known or Known({}, {})
    carried = known.evidence and not pricer.shifted  # prices at shifted rates carry no evidence

    def updated() -> tuple[tuple[float, float], PhaseCost]:
        update = phase_cost(*update_operators(pricer, chunks, schedule), evidence=carried)
        return _held_parameters(pricer, chunks), update

    def shared() -> tuple[float, float]:
        norm_s = small_all_reduce_s(pricer.cluster.n_gpus, pricer.links.gpus_per_node)
        return norm_s, 1.0 + collective_residual(pricer.profile, pricer.links.curves)

    kinds = chunks.kinds
    parameters, update = _once(known.alike, kinds, updated)
    norm_s, most = _once(known.alike, "shared", shared)
    reduction, gather = _collectives(pricer, chunks, schedule, *parameters, update.fixed_s, known)
    tied = _tied_tables(pricer, kinds, schedule)
    reduce_s, gather_s = reduction.seconds + tied.seconds, gather.seconds
    worst = (reduce_s + gather_s) * most + norm_s + update.worst_s
    total = reduce_s + norm_s + update.fixed_s + gather_s
    cost = SyncCost(reduce_s, norm_s, update.fixed_s, gather_s, update.best_s, max(worst, total))
    if not known.evidence:
        return cost
    stands_on = NO_EVIDENCE
    if carried:
        shares = link_share_evidence(pricer.job) if pricer.cluster.n_gpus > 1 else NO_EVIDENCE
        parts = (reduction.evidence, tied.evidence, gather.evidence, update.evidence, shares)
        stands_on = combined((part, 1.0) for part in parts)
    norm = busiest_bytes("all_reduce", NORM_BYTES, pricer.cluster.n_gpus, pricer.links.gpus_per_node)
    # A collective that is added to the step's end, or that runs once a micro-batch outside of the actions'
    # transfers, adds its bytes here.
    rows = reduction.moved(REDUCTION), tied.moved(TIED), Moved(NORM, *norm), gather.moved(GATHER)
    return dataclasses.replace(cost, evidence=stands_on, moved=summed((row, 1.0) for row in rows))


def update_s(pricer: Pricer, chunks: RankChunks, schedule: Schedule) -> float:
    """Seconds of the gradient norm and the optimizer of a rank."""
    norm_s = small_all_reduce_s(pricer.cluster.n_gpus, pricer.links.gpus_per_node)
    return norm_s + phase_cost(*update_operators(pricer, chunks, schedule), evidence=False).fixed_s


def _held_parameters(pricer: Pricer, chunks: RankChunks) -> tuple[float, float]:
    """(dense, expert) parameters of the blocks on a rank."""
    parameters = [pricer.block_parameters(kind) for kind in chunks.kinds]
    return fsum(d for d, _ in parameters), fsum(e for _, e in parameters)


def update_operators(
    pricer: Pricer, chunks: RankChunks, schedule: Schedule
) -> tuple[tuple[Operator, ...], tuple[OperatorCost, ...]]:
    """Operators of the gradient norm and of the optimizer on a rank, and the price of each."""
    plan, recipe, layout = pricer.scenario.parallel, pricer.scenario.recipe, pricer.layout
    dense, expert = _held_parameters(pricer, chunks)
    expert_shards, shards = layout.optimizer_shards if plan.zero_stage else (1, 1)
    held_by = len(schedule.routes) if plan.zero_stage else 1
    owned = dense / (shards * held_by) + expert / (expert_shards * held_by)
    local = dense + expert if recipe.linear != "bf16" else 0.0
    operators = with_step_kernels(
        optimizer_operators(owned, recipe, local),
        pricer.scenario.software.step_kernels,
        owned,
        owned if plan.zero_stage == 3 else dense + expert,
        recipe,
        pricer.scenario.software.weight_gradients != "written",
    )
    return operators, pricer.operator_prices(operators)


def _collectives(
    pricer: Pricer,
    chunks: RankChunks,
    schedule: Schedule,
    dense: float,
    expert: float,
    update_s: float,
    known: Known,
) -> tuple[CostedSeconds, CostedSeconds]:
    """Exposed gradient reduction and parameter gather of a rank with (dense, expert) parameters.

    What runs block by block inside the step is absent: ZeRO-3's gathers, and the reductions of gradients that
    stay sharded while micro-batches accumulate. `update_s`: its optimizer.
    """
    plan, software, copies = pricer.scenario.parallel, pricer.scenario.software, len(schedule.routes)
    sync = pricer.gradient_sync
    if plan.zero_stage == 3:
        groups = CostedSeconds(), CostedSeconds()
        if not sync.groups_in_backward:
            groups = _over_groups(pricer, chunks.kinds, schedule, dense, expert)
        if sync.in_backward:
            return groups
        # The exposed scatter of whole gradients after the last micro-batch (`software.gradient_sync`).
        pieces, (reduced, _) = pieces_of(pricer, chunks.kinds, dense, expert, 1), _element_bytes(pricer)
        sizes, over = (dense * reduced, expert * reduced), shard_rings(pricer)
        scatter = data_parallel(pricer, "reduce_scatter", *sizes, 1, pieces, over=over)
        number = pieces.dense + (pieces.expert if expert else 0)
        last, _ = exposed_behind_compute(pricer, chunks.kinds, schedule, scatter, CostedSeconds(), number)
        return last + groups[0], groups[1]
    if software.buckets_by_chunk and copies == 1:
        update_s = update_s if software.overlap_optimizer else 0.0
        reduction, gather = exposed_by_chunk(pricer, chunks, schedule, update_s, known)
    else:
        pieces = pieces_of(pricer, chunks.kinds, dense, expert, copies)
        reduction, gather = _alone(pricer, dense, expert, copies, pieces)
        if software.overlap_data_parallel:
            number = pieces.dense + (pieces.expert if expert else 0)
            reduction, gather = exposed_behind_compute(
                pricer, chunks.kinds, schedule, reduction, gather, number
            )
    if sync.in_backward:
        reduction = _between_copies(pricer, dense, expert, copies)
    return reduction, gather


def _between_copies(pricer: Pricer, dense: float, expert: float, copies: int) -> CostedSeconds:
    """Reduction of gradient shards between the pipeline ranks that hold the same stages (eq. X32).

    Each of them scatters the gradients of its own micro-batches over its own replicas, because the others run
    theirs at other times; their sums meet once, after the last micro-batch.
    """
    if copies == 1:
        return CostedSeconds()
    (expert_shards, shards), (reduced, _) = pricer.layout.shards, _element_bytes(pricer)
    ring = Ring(copies, copies if pricer.cluster.nodes == 1 else 1)
    sizes = dense / shards * reduced, expert / expert_shards * reduced
    return data_parallel(pricer, "reduce_scatter", *sizes, 1, over=(ring, ring), place="copies")


def _alone(
    pricer: Pricer, dense: float, expert: float, copies: int, pieces: Pieces = WHOLE
) -> tuple[CostedSeconds, CostedSeconds]:
    """Gradient reduction and parameter gather of (dense, expert) parameters, alone on their links."""
    reduced, gathered = _element_bytes(pricer)
    sharded = pricer.scenario.parallel.zero_stage > 0
    # Without shards an all-reduce also gathers before the optimizer; DeepSpeed's BF16 optimizer runs both.
    whole = not sharded or pricer.scenario.software.gradients_all_reduced
    name: RingOperation = "all_reduce" if whole else "reduce_scatter"
    reduction = data_parallel(pricer, name, dense * reduced, expert * reduced, copies, pieces)
    if not sharded:
        return reduction, CostedSeconds()
    return reduction, data_parallel(pricer, "all_gather", dense * gathered, expert * gathered, copies, pieces)


def _over_groups(
    pricer: Pricer, kinds: Sequence[BlockKind], schedule: Schedule, dense: float, expert: float
) -> tuple[CostedSeconds, CostedSeconds]:
    """Reduction of gradient shards over the groups of hybrid FSDP, and gather of parameter shards (eq. X24).

    Both hide behind one pass over the rank's blocks where data-parallel collectives overlap.
    """
    plan, software = pricer.scenario.parallel, pricer.scenario.software
    if plan.shard_group is None:
        return CostedSeconds(), CostedSeconds()
    expert_shards, shards = pricer.layout.shards
    own, over = (dense / shards, expert / expert_shards), group_rings(pricer)
    reduced, gathered = _element_bytes(pricer)
    name: RingOperation = "reduce_scatter" if plan.shard_optimizer_over_groups else "all_reduce"
    reduction = data_parallel(pricer, name, own[0] * reduced, own[1] * reduced, 1, over=over, place="groups")
    gather = CostedSeconds()
    if plan.shard_optimizer_over_groups:
        gather = data_parallel(
            pricer, "all_gather", own[0] * gathered, own[1] * gathered, 1, over=over, place="groups"
        )
    if not software.overlap_data_parallel:
        return reduction, gather
    slow = OverlapSlowDown(pricer.lost_beside_library)
    forward, backward = _windows(pricer, kinds, schedule)
    left = [
        replace(part, seconds=exposed_behind_window(part.seconds, own[0], len(kinds), slow, own[1]))
        for part, own in ((reduction, backward), (gather, forward))
    ]
    return left[0], left[1]


_Chunk: TypeAlias = tuple[tuple[float, float], tuple[CostedSeconds, CostedSeconds]]
"""Dense and expert parameters of a chunk, and its collectives alone."""


class _Chunks(NamedTuple):
    """What pipeline ranks with equal chunks share of their reduction and gather."""

    dense: float
    """Dense parameters of the first chunk."""
    others: float
    """Share of the parameters that are not those."""
    alone_s: tuple[tuple[float, ...], tuple[float, ...]]
    slow_downs: tuple[OverlapSlowDown, OverlapSlowDown]
    carried: tuple[CostedSeconds, CostedSeconds]
    """Evidence and bytes of both collectives."""


def exposed_by_chunk(
    pricer: Pricer, chunks: RankChunks, schedule: Schedule, update_s: float, known: Known
) -> tuple[CostedSeconds, CostedSeconds]:
    """Exposed reduction and gather of a rank as Megatron core buckets them (docs/model.md, eq. O12, O13).

    `update_s`: seconds of its optimizer where the first chunk is gathered beside that of the others, else 0.
    `known`: see `rank_step_end`.
    """

    def passes_s() -> tuple[tuple[float, ...], ...]:
        each = [_windows(pricer, chunk, schedule, known.of_plan) for chunk in chunks.chunks]
        return tuple(tuple(fsum(window[i]) for window in each) for i in (0, 1))

    size = pricer.scenario.software.bucket_size(pricer.layout.dp * pricer.scenario.parallel.cp)
    assert size is not None  # Megatron's buckets have one
    own: _Chunks = _once(known.alike, chunks.chunks, lambda: _chunks_of(pricer, chunks, known))
    forwards, backwards = _once(known.of_plan, chunks.chunks, passes_s)
    passes = min(schedule.pp, schedule.microbatches) if len(chunks.chunks) > 1 else 1
    place = ChunkPlace(chunks.rank, passes, max(1, ceil(own.dense / size)))
    (reduced_s, gathered_s), (slow, slows) = own.alone_s, own.slow_downs
    exposed = (
        exposed_reductions(ChunkTimes(reduced_s, backwards), place, slow),
        exposed_gathers(ChunkTimes(gathered_s, forwards), place, slows, update_s * own.others),
    )
    reduction, gather = (c + CostedSeconds(s) for c, s in zip(own.carried, exposed, strict=True))
    return reduction, gather


def _chunks_of(pricer: Pricer, chunks: RankChunks, known: Known) -> _Chunks:
    """Collectives of a rank's chunks, whatever its place; chunks alike are priced once."""

    def priced(chunk: tuple[BlockKind, ...]) -> _Chunk:
        dense, expert = (fsum(pricer.block_parameters(kind)[i] for kind in chunk) for i in (0, 1))
        return (dense, expert), _alone(pricer, dense, expert, 1)

    each = {c: _once(known.alike, ("chunk", c), partial(priced, c)) for c in dict.fromkeys(chunks.chunks)}
    parameters, alone = zip(*(each[chunk] for chunk in chunks.chunks), strict=True)
    kinds, lost = chunks.kinds, pricer.lost_beside_library
    names: tuple[tuple[RingOperation, ...], ...] = (("reduce_scatter",), ("all_gather",))
    if pricer.scenario.parallel.zero_stage == 0:
        names = (("reduce_scatter", "all_gather"), ("all_gather",))
    slow = [
        _once(known.alike, (name, kinds), partial(slow_down_by_compute, pricer, name, kinds, size, 1))
        for name, size in zip(names, _element_bytes(pricer), strict=True)
    ]
    carried = [
        CostedSeconds(
            0.0,
            combined((part, 1.0) for part in (*(c[i].evidence for c in alone), slow[i][1])),
            fsum(chunk[i].nic_bytes for chunk in alone),
            fsum(chunk[i].scale_up_bytes for chunk in alone),
        )
        for i in (0, 1)
        if known.evidence
    ] or [CostedSeconds()] * 2
    dense = fsum(parameters[0])
    return _Chunks(
        dense,
        1.0 - dense / (fsum(map(fsum, parameters)) or 1.0),
        (tuple(chunk[0].seconds for chunk in alone), tuple(chunk[1].seconds for chunk in alone)),
        (OverlapSlowDown(lost, slow[0][0]), OverlapSlowDown(lost, slow[1][0])),
        (carried[0], carried[1]),
    )


def _tied_tables(pricer: Pricer, kinds: Sequence[BlockKind], schedule: Schedule) -> CostedSeconds:
    """All-reduce of a shared table's gradient between its two pipeline ranks (docs/model.md, eq. E30).

    It is exposed, because it follows the reduction of the last gradients. 0 for other ranks, for tables that
    are not shared, and where one rank holds embedding and head.
    """
    shape, plan = pricer.shape, pricer.scenario.parallel
    both = EMBEDDING in kinds and HEAD in kinds
    if not pricer.scenario.software.tied_tables_reduced or not shape.tied_embeddings:
        return CostedSeconds()
    if schedule.pp == 1 or both or not (EMBEDDING in kinds or HEAD in kinds):
        return CostedSeconds()
    table = shape.vocab * shape.hidden / plan.tp * BYTES_PER_ELEMENT[pricer.scenario.recipe.gradients]
    # Pipeline ranks lie as far apart as the layout places them: a node holds both ends or one of them.
    inside = pricer.cluster.n_gpus <= pricer.links.gpus_per_node
    return ring_price("all_reduce", table, 2, 2 if inside else 1, pricer.links, pricer.profile)


def exposed_behind_compute(
    pricer: Pricer,
    kinds: Sequence[BlockKind],
    schedule: Schedule,
    reduction: CostedSeconds,
    gather: CostedSeconds,
    pieces: int,
) -> tuple[CostedSeconds, CostedSeconds]:
    """Exposed parts of a rank's reduction behind its last backward and gather behind its first forward.

    `kinds`: blocks of the rank. `reduction` and `gather`: their prices alone, in `pieces` (docs/model.md,
    eq. O4).
    """
    plan = pricer.scenario.parallel
    copies, lost = len(schedule.routes), pricer.lost_beside_library
    passes = min(schedule.pp, schedule.microbatches) if plan.vpp > 1 else 1
    forward, backward = _windows(pricer, kinds, schedule)
    # Without ZeRO the reduction is an all-reduce, which runs both rings over the gradients.
    reductions: tuple[RingOperation, ...] = ("reduce_scatter",)
    if plan.zero_stage == 0:
        reductions = ("reduce_scatter", "all_gather")
    gathers: tuple[RingOperation, ...] = ("all_gather",)
    left = []
    for collective, window, names, element_bytes in zip(
        (reduction, gather),
        (backward, forward),
        (reductions, gathers),
        _element_bytes(pricer),
        strict=True,
    ):
        factor, evidence = slow_down_by_compute(pricer, names, kinds, element_bytes, copies)
        slow_down = OverlapSlowDown(lost, factor)
        compute_s, free_s = (passes * part for part in window)
        exposed_s = exposed_behind_window(collective.seconds, compute_s, pieces, slow_down, free_s)
        left.append(replace(collective, seconds=exposed_s, evidence=collective.evidence | evidence))
    return left[0], left[1]


def _element_bytes(pricer: Pricer) -> tuple[float, float]:
    """Bytes of a reduced gradient and of a gathered parameter."""
    recipe = pricer.scenario.recipe
    return BYTES_PER_ELEMENT[recipe.gradient_reduce], BYTES_PER_ELEMENT[recipe.parameter_gather]


def pass_seconds(pricer: Pricer, kind: BlockKind) -> tuple[float, float]:
    """(forward, backward) compute seconds of one block and micro-batch, alone on all SMs."""
    priced = {phase: pricer.phase(kind, phase, "alone") for phase in pricer.operators(kind)}
    forward = fsum(c.seconds for p, c in priced.items() if p.endswith(" F"))
    return forward, fsum(c.seconds for c in priced.values()) - forward


def _windows(
    pricer: Pricer, kinds: Sequence[BlockKind], schedule: Schedule, known: dict[Hashable, Any] | None = None
) -> tuple[tuple[float, float], tuple[float, float]]:
    """(compute, free) seconds of one forward and of one backward of a rank's blocks (docs/model.md, eq. O4).

    `free`: expert-parallel transfers outside of pairs, as far as they leave the port free that data-parallel
    collectives fill: the NIC where these cross nodes, else the scale-up port. `known`: `Known.of_plan`.
    """
    known = {} if known is None else known
    seconds = {k: _once(known, ("pass", k), partial(pass_seconds, pricer, k)) for k in sorted(set(kinds))}
    forward_s, backward_s = (fsum(seconds[kind][i] for kind in kinds) for i in (0, 1))
    routed = [kind for kind in kinds if pricer.shape.block(kind).routed]
    free = 0.0, 0.0
    if routed and not schedule.paired:
        free = _once(known, "free", partial(_free_seconds, pricer, routed[0]))
    count = len(routed)
    return (forward_s, count * free[0]), (backward_s, count * free[1])


def _free_seconds(pricer: Pricer, routed: BlockKind) -> tuple[float, float]:
    """Seconds of a block's transfers, forward and backward, that leave data-parallel collectives a port."""
    links, free = pricer.links, {True: 0.0, False: 0.0}
    crosses = any(ring.ranks > ring.ranks_per_node for ring in rings(pricer, 1))
    for (_, phase, _), cost in block_transfers(pricer, routed, ("alone",)).items():
        filled_s = (
            cost.nic_bytes / links.nic_bytes_per_s
            if crosses and cost.nic_bytes
            else 0.0
            if crosses
            else cost.scale_up_bytes / links.scale_up_bytes_per_s
        )
        free[phase.endswith(" F")] += cost.launch_s + max(0.0, cost.payload_s - filled_s)
    return free[True], free[False]
