"""Prices a job's data-parallel collectives, inside the step and at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import fsum
from typing import NamedTuple

from msgspec import Struct

from moesim.simulator.cost.collectives.ring import busiest_bytes
from moesim.simulator.cost.evidence import CostedSeconds, Evidence, combined
from moesim.simulator.cost.library_collectives import (
    RingOperation,
    collective_residual,
    overlap_delay,
    ring_price,
)
from moesim.simulator.cost.overlap import OverlapSlowDown, exposed_behind_window, exposed_overlapped
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.cost.table import Compute, Mode, PhaseCost, PhaseKey, TransferCost, compute_of_pass
from moesim.simulator.cost.transfers import RingPlace, over_tiers
from moesim.simulator.model.operator import BlockKind, Operator, Phase
from moesim.simulator.model.precision import BYTES_PER_ELEMENT
from moesim.simulator.model.primitives import move

# -- data parallel -----------------------------------------------------------------------------------
# Prices collectives over a job's data-parallel groups: rings, seconds alone, slow-down beside compute.


class Ring(NamedTuple):
    """Number of ranks of a ring, in total and on one node."""

    ranks: int
    ranks_per_node: int


def rings(pricer: Pricer, copies: int) -> tuple[Ring, Ring]:
    """Rings of the dense parameters and of the experts.

    `copies`: number of pipeline ranks that hold the same parameters (2 for a bidirectional pipeline), which
    multiplies the replicas of dense and expert parameters (eq. X7).
    """
    plan, layout = pricer.scenario.parallel, pricer.layout
    node = pricer.links.gpus_per_node
    dense = _ring(layout.dp * plan.cp, plan.tp, node)
    expert = _ring(layout.expert_dp, plan.ep * plan.expert_tp, node)
    whole = (
        Ring(dense.ranks * copies, dense.ranks_per_node),
        Ring(expert.ranks * copies, expert.ranks_per_node),
    )
    if pricer.cluster.nodes == 1:  # every copy is on the one node
        return Ring(whole[0].ranks, whole[0].ranks), Ring(whole[1].ranks, whole[1].ranks)
    return whole


def shard_rings(pricer: Pricer) -> tuple[Ring, Ring]:
    """Rings over which parameters or gradients are sharded inside a step, by group where one is given."""
    plan, node = pricer.scenario.parallel, pricer.links.gpus_per_node
    if plan.shard_group is None:
        return rings(pricer, 1)
    expert, dense = pricer.layout.shards
    return _ring(dense, plan.tp, node), _ring(expert, plan.ep * plan.expert_tp, node)


def group_rings(pricer: Pricer) -> tuple[Ring, Ring]:
    """Rings over the groups of `parallel.shard_group`: GPUs that hold the same shards (eq. X24)."""
    group, node = pricer.scenario.parallel.shard_group, pricer.links.gpus_per_node
    assert group is not None
    (dense, expert), (expert_shards, shards) = rings(pricer, 1), pricer.layout.shards
    return _ring(dense.ranks // shards, group, node), _ring(expert.ranks // expert_shards, group, node)


def _ring(ranks: int, apart: int, node: int) -> Ring:
    """A ring of ranks that are `apart` GPUs from each other."""
    return Ring(ranks, max(1, min(node // min(apart, node), ranks)))


class Pieces(NamedTuple):
    """Collectives, one after the other, in which dense and expert parameters travel."""

    dense: int = 1
    expert: int = 1


WHOLE = Pieces()


def pieces_of(pricer: Pricer, kinds: Sequence[BlockKind], dense: float, expert: float, copies: int) -> Pieces:
    """Pieces in which a rank's (dense, expert) parameters travel (docs/model.md, eq. X26).

    Collectives that are not overlapped travel whole.
    """
    if not pricer.gradient_sync.hidden:
        return WHOLE
    bucket = pricer.scenario.software.bucket_size(rings(pricer, copies)[0].ranks)
    if bucket is not None:
        return Pieces(max(1, int(dense // bucket)), max(1, int(expert // bucket)))
    parameters = [pricer.block_parameters(kind) for kind in kinds]
    return Pieces(max(1, sum(d > 0 for d, _ in parameters)), max(1, sum(e > 0 for _, e in parameters)))


def data_parallel(
    pricer: Pricer,
    operation: RingOperation,
    dense_bytes: float,
    expert_bytes: float,
    copies: int,
    pieces: Pieces = WHOLE,
    over: tuple[Ring, Ring] | None = None,
    place: RingPlace = "replicas",
) -> CostedSeconds:
    """A collective over the dense and then the expert data-parallel group, alone.

    `copies`: see `rings`. Every piece pays the latency of its ring (eq. X26). `over`: other rings than those,
    on the GPUs that `place` says.
    """
    own, plan = over or rings(pricer, copies), pricer.scenario.parallel
    aparts = (plan.tp, plan.ep * plan.expert_tp)
    if place == "groups" and plan.shard_group is not None:
        aparts = (plan.shard_group, plan.shard_group)

    def price() -> CostedSeconds:
        total = CostedSeconds()
        sizes = (dense_bytes, expert_bytes)
        for size, ring, apart, count in zip(sizes, own, aparts, pieces, strict=True):
            one = ring_price(operation, size / count, *ring, pricer.links, pricer.profile)
            mirrored = copies > 1 or place == "copies"
            one = over_tiers(pricer, one, operation, ring.ranks, apart, place, mirrored=mirrored)
            total += one * count
        return total

    return pricer.moves((operation, dense_bytes, expert_bytes, own, pieces, copies, place), price)


def slow_down_by_compute(
    pricer: Pricer,
    names: Sequence[RingOperation],
    kinds: Sequence[BlockKind],
    element_bytes: float,
    copies: int,
) -> tuple[float, Evidence]:
    """Factor by which data-parallel collectives, block by block, take longer beside compute (eq. O8).

    The factor is 1 where the profile has not measured it; only rings of dense parameters were measured.
    """
    ring = rings(pricer, copies)[0]
    of_kind: dict[BlockKind, tuple[CostedSeconds, CostedSeconds]] = {}
    for kind in dict.fromkeys(kinds):
        dense, expert = (count * element_bytes for count in pricer.block_parameters(kind))
        own = (data_parallel(pricer, name, dense, expert, copies) for name in names)
        delays = (overlap_delay(name, dense, *ring, pricer.links, pricer.profile) for name in names)
        of_kind[kind] = sum(own, CostedSeconds()), sum(delays, CostedSeconds())
    alone = longer = 0.0
    for kind in kinds:
        collectives, delay = of_kind[kind]
        alone += collectives.seconds
        longer += delay.seconds
    evidence = combined((priced.evidence, 1.0) for both in of_kind.values() for priced in both)
    return 1.0 + longer / alone if alone else 1.0, evidence


# -- chunked overlap ---------------------------------------------------------------------------------
# Exposed data-parallel collectives of a rank that holds several model chunks (eq. O12 and O13; pure).


class ChunkTimes(NamedTuple):
    """Seconds of each model chunk of a rank, in the order of its forward: a collective and one pass."""

    collective_s: tuple[float, ...]
    pass_s: tuple[float, ...]


class ChunkPlace(NamedTuple):
    """Where a rank is: its number, micro-batches between two of its chunks, buckets of its first chunk.

    Only pipeline rank 0 cuts its first chunk into buckets; every other chunk is one bucket.
    """

    rank: int
    passes: int
    buckets: int


def exposed_gathers(
    chunks: ChunkTimes, place: ChunkPlace, slow_down: OverlapSlowDown, update_s: float = 0.0
) -> float:
    """Eq. O12: exposed seconds of the parameter gathers behind the next step's forwards.

    The first two chunks are gathered at once, one after the other; a further one when the chunk before it
    begins. Rank r begins r forwards after rank 0 and is idle until then. `update_s`: seconds of the optimizer
    on other chunks, beside which the first is gathered (in one piece).
    """
    first_s, forward_s = chunks.collective_s[0], chunks.pass_s[0]
    idle_s = place.rank * forward_s
    if update_s:
        exposed = exposed_overlapped(max(0.0, first_s - idle_s), update_s, slow_down)
    elif place.rank == 0:
        exposed = exposed_behind_window(first_s, forward_s, place.buckets, slow_down)
    else:
        exposed = max(0.0, first_s - idle_s)
    begins = list(accumulate((place.passes * s for s in chunks.pass_s), initial=0.0))
    end = first_s
    for number, collective_s in enumerate(chunks.collective_s[1:], start=1):
        start = max(end, begins[number - 1] if number > 1 else 0.0)
        needed = idle_s + begins[number] + exposed
        left = exposed_overlapped(collective_s, max(0.0, needed - start), slow_down)
        exposed += left
        end = max(needed, start + collective_s * slow_down.collective_factor)
    return exposed


def exposed_reductions(chunks: ChunkTimes, place: ChunkPlace, slow_down: OverlapSlowDown) -> float:
    """Eq. O13: exposed seconds of the gradient reductions after a rank's last backward.

    The last chunk's gradients are complete first. The first chunk's are reduced by buckets beside its last
    backward on rank 0, and after it on other ranks, which end earlier and wait for rank 0 anyway.
    """
    count = len(chunks.collective_s)
    complete = [-place.passes * fsum(chunks.pass_s[:number]) for number in range(count)]
    end, lost = complete[-1], 0.0
    for number in range(count - 1, 0, -1):
        start = max(end, complete[number])
        end = start + chunks.collective_s[number] * slow_down.collective_factor
        lost += slow_down.compute_lost * min(chunks.collective_s[number], max(0.0, -start))
    first_s, backward_s = chunks.collective_s[0], chunks.pass_s[0]
    if place.rank == 0:
        busy_s = max(0.0, end + backward_s) if count > 1 else 0.0
        window_s = max(0.0, backward_s - busy_s)
        behind = exposed_behind_window(first_s, window_s, place.buckets, slow_down)
        return lost + behind + max(0.0, busy_s - backward_s)
    return lost + first_s + (max(0.0, end) if count > 1 else 0.0)


# -- sharded -----------------------------------------------------------------------------------------
# Prices collectives over the replicas inside the step, block by block, and compute beside them (eq. O5).
#
# These are ZeRO-3's parameter gathers, and the gradient scatters of every plan whose gradients stay
# sharded while micro-batches accumulate (`layout.gradient_sync`).

PASSES: tuple[tuple[bool, tuple[Phase, ...]], ...] = (
    (True, ("gather F",)), (False, ("gather B", "scatter W"))
)  # fmt: skip
"""Collectives beside each pass of a block: forward and backward."""


class ShardedBlock(Struct, frozen=True):
    """Collectives over the replicas inside the step of one block."""

    transfers: Mapping[Phase, TransferCost]
    alone_s: Mapping[Phase, float]
    """Seconds of each alone on its links."""
    hidden: bool
    """Whether they run beside compute; else compute waits for them."""

    def beside(self, compute_s: Mapping[bool, float]) -> tuple[float, float]:
        """Seconds of collectives (for which compute waits, that run beside compute).

        `compute_s`: seconds of the block's forward (True) and backward.
        """
        waits = beside = 0.0
        for forward, collectives in PASSES:
            moved = fsum(self.alone_s.get(phase, 0.0) for phase in collectives)
            hidden = min(moved, compute_s[forward]) if self.hidden else 0.0
            waits, beside = waits + moved - hidden, beside + hidden
        return waits, beside


def sharded_block(pricer: Pricer, kind: BlockKind, *, paired: bool = False) -> ShardedBlock:
    """All-gathers and gradient scatter of a block and micro-batch; none where replicas meet at the end only.

    `paired`: inside an overlapped pair, whose transfers always run beside compute.
    """
    plan, software, recipe = pricer.scenario.parallel, pricer.scenario.software, pricer.scenario.recipe
    sync = pricer.gradient_sync
    hidden = sync.hidden or paired
    gathered, reduced = (BYTES_PER_ELEMENT[of] for of in (recipe.parameter_gather, recipe.gradient_reduce))
    phases: list[tuple[Phase, RingOperation, float]] = []
    if plan.zero_stage == 3:
        phases += [("gather F", "all_gather", gathered), ("gather B", "all_gather", gathered)]
    if sync.in_backward:
        whole = software.gradients_all_reduced and plan.zero_stage == 2
        phases.append(("scatter W", "all_reduce" if whole else "reduce_scatter", reduced))
    transfers: dict[Phase, TransferCost] = {}
    alone_s: dict[Phase, float] = {}
    if not phases:
        return ShardedBlock(transfers, alone_s, hidden)
    copied = pricer.compute(gather_copies(pricer, kind), "alone")
    for phase, name, size in phases:
        parts = parts_of(pricer, kind, phase)
        transfers[phase], alone_s[phase] = _collective(
            pricer, kind, name, size * parts.times, hidden, pieces=parts.collectives
        )
        if name == "all_gather" and copied.seconds:
            transfers[phase] = _behind_copy(transfers[phase], copied)
            alone_s[phase] += copied.seconds
    if sync.groups_in_backward:  # the shards are added up over the groups of hybrid FSDP, one after the other
        expert_part, dense_part = (1.0 / n for n in pricer.layout.shards)
        more, more_s = _collective(pricer, kind, "all_reduce", reduced, hidden, (dense_part, expert_part))
        one, alone_s["scatter W"] = transfers["scatter W"], alone_s["scatter W"] + more_s
        transfers["scatter W"] = TransferCost(
            0.0,
            one.nic_s + more.nic_s,
            one.scale_up_s + more.scale_up_s,
            one.nic_bytes + more.nic_bytes,
            one.scale_up_bytes + more.scale_up_bytes,
            one.best_s + more.best_s,
            one.worst_s + more.worst_s,
            one.evidence | more.evidence,
        )
    return ShardedBlock(transfers, alone_s, hidden)


class Parts(NamedTuple):
    """Collectives in which a block's parameters travel, how often all of its bytes do, and copies by rank."""

    collectives: int = 1
    times: float = 1.0
    copies: float = 0.0


def parts_of(pricer: Pricer, kind: BlockKind, phase: Phase) -> Parts:
    """Eq. X36: parts of a gather or scatter where `software.parameter_gathers` is by matrix; else one.

    Each matrix is gathered alone: for the forward, again for a recomputed one, and behind that again for the
    backward, but for the last, which is still there. Vectors stay on every GPU, but their gradients are
    scattered. A collective takes a list with a view for each rank, made in Python, which torch copies from
    or to one flat buffer. Source: microsoft/DeepSpeed@v0.4.0 deepspeed/runtime/zero,
    partition_parameters.py:813 and :948, stage3.py:521; pytorch/pytorch@v1.8.0 ProcessGroupNCCL.cpp.
    """
    software, shape = pricer.scenario.software, pricer.shape
    if software.parameter_gathers == "block":
        return Parts()
    operators = (op for ops in pricer.operators(kind).values() for op in ops if op.direction == "W")
    sizes = [op.gemm.m * op.gemm.n * op.gemm.groups for op in operators if op.gemm is not None] or [1.0]
    count, times = len(sizes), 1.0
    layer = shape.block(kind).layer is not None
    if phase == "gather B" and layer and pricer.scenario.recompute == "full":
        count, times = 2 * count - 1, 2.0 - sizes[0] / fsum(sizes)
    if phase == "scatter W" and layer:
        count += count * shape.ffn_bias + 2 * (1 + (shape.norm == "layernorm"))
    return Parts(count, times, count * shard_rings(pricer)[0].ranks)


def gather_copies(pricer: Pricer, kind: BlockKind) -> tuple[Operator, ...]:
    """The copies of a GPU's shards of a block into the buffer of an FSDP2 all-gather (eq. O34).

    Shards in a wider format are cast into one tensor, which is then copied into the buffer. The copies run on
    a stream of their own before the collective, which waits for them (torch 2.11 `_fsdp_collectives.py`,
    `_get_param_all_gather_inputs` and `all_gather_copy_in`).
    """
    plan, recipe = pricer.scenario.parallel, pricer.scenario.recipe
    if plan.zero_stage != 3 or not pricer.scenario.software.parameters_copied:
        return ()
    stored, gathered = (BYTES_PER_ELEMENT[of] for of in (recipe.parameters, recipe.parameter_gather))
    parts = zip(pricer.block_parameters(kind), shard_rings(pricer), strict=True)
    own = fsum(count / ring.ranks for count, ring in parts if ring.ranks > 1)
    if not own:
        return ()
    copy = move("fsdp.shard_copy", "copy", "F", own * gathered, own * gathered, variant="flat")
    cast = move("fsdp.shard_cast", "copy", "F", own * stored, own * gathered, variant="gather_in")
    return (cast, copy) if stored != gathered and pricer.scenario.software.shards_cast else (copy,)


def _behind_copy(transfer: TransferCost, copied: PhaseCost) -> TransferCost:
    """A collective that begins when its input has been copied."""
    return replace(
        transfer,
        nic_s=transfer.nic_s + copied.seconds,
        scale_up_s=transfer.scale_up_s + copied.seconds,
        best_s=transfer.best_s + copied.best_s,
        worst_s=transfer.worst_s + copied.worst_s,
        evidence=transfer.evidence | copied.evidence,
    )


def _collective(
    pricer: Pricer,
    kind: BlockKind,
    name: RingOperation,
    size: float,
    hidden: bool,
    shares: tuple[float, float] | None = None,
    pieces: int = 1,
) -> tuple[TransferCost, float]:
    """A collective of a block's (dense, expert) parameters inside the step, and its seconds alone.

    `size`: bytes of an element. `shares`: parts of the parameters that travel over the groups of hybrid
    FSDP; absent: all of them travel over the shards.
    """
    over: tuple[Ring, Ring] = shard_rings(pricer) if shares is None else group_rings(pricer)
    dense, expert = (
        count * size * part
        for count, part in zip(pricer.block_parameters(kind), shares or (1.0, 1.0), strict=True)
    )
    moved = [busiest_bytes(name, n, *ring) for n, ring in zip((dense, expert), over, strict=True)]
    nic, scale_up = (fsum(bytes_[i] for bytes_ in moved) for i in (0, 1))
    place: RingPlace = "replicas" if shares is None else "groups"
    alone = priced = data_parallel(pricer, name, dense, expert, 1, Pieces(pieces, pieces), over, place)
    if hidden:
        priced += overlap_delay(name, dense, *over[0], pricer.links, pricer.profile)
    links, seconds = pricer.links, priced.seconds
    nominal_s = max(
        nic / links.nic_bytes_per_s if nic else 0.0,
        scale_up / links.scale_up_bytes_per_s if scale_up else 0.0,
    )
    worst_s = seconds * (1.0 + collective_residual(pricer.profile, links.curves))
    best_s = min(seconds, nominal_s)
    cost = TransferCost(0.0, seconds, seconds, nic, scale_up, best_s, worst_s, priced.evidence)
    return cost, alone.seconds


def slowed_by_overlap(
    kind: BlockKind,
    compute: Compute,
    sharded: ShardedBlock,
    lost: float,
    modes: tuple[Mode, ...],
) -> dict[PhaseKey, PhaseCost]:
    """Compute of a block in some modes with collectives beside it, spread evenly over its phases (eq. O5).

    `lost`: seconds that compute loses for each second that a collective beside it takes alone.
    """
    out: dict[PhaseKey, PhaseCost] = {}
    if not sharded.hidden:
        return out
    for mode in modes:
        for forward, collectives in PASSES:
            own = compute_of_pass(compute, kind, mode, forward)
            total = fsum(cost.seconds for cost in own.values())
            hidden = min(total, fsum(sharded.alone_s.get(phase, 0.0) for phase in collectives))
            factor = 1.0 + lost * hidden / total if total else 1.0
            for key, cost in own.items():
                worst_s = max(cost.worst_s, cost.seconds * factor)
                out[key] = replace(
                    cost, fixed_s=cost.fixed_s * factor, row_s=cost.row_s * factor, worst_s=worst_s
                )
    return out
