"""Prices collectives over the replicas inside the step, block by block, and compute beside them (eq. O5).

These are ZeRO-3's parameter gathers, and the gradient scatters of every plan whose gradients stay sharded
while micro-batches accumulate (`layout.gradient_sync`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import fsum

from moesim.simulator.cost.collectives.ring import busiest_bytes
from moesim.simulator.cost.data_parallel import Ring, data_parallel, group_rings, shard_rings
from moesim.simulator.cost.library_collectives import RingOperation, overlap_delay
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.cost.profile_use import collective_residual
from moesim.simulator.cost.table import Mode, PhaseCost, TransferCost
from moesim.simulator.model.operator import BlockKind, Phase
from moesim.simulator.model.precision import BYTES_PER_ELEMENT

PASSES: tuple[tuple[bool, tuple[Phase, ...]], ...] = (
    (True, ("gather F",)), (False, ("gather B", "scatter W"))
)  # fmt: skip
"""Collectives beside each pass of a block: forward and backward."""


@dataclass(frozen=True, slots=True)
class ShardedBlock:
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
    costs = {phase: _collective(pricer, kind, name, size, hidden) for phase, name, size in phases}
    if sync.groups_in_backward:
        shards = tuple(1.0 / n for n in reversed(pricer.layout.shards))
        more = _collective(pricer, kind, "all_reduce", reduced, hidden, (shards[0], shards[1]))
        first = costs["scatter W"]
        costs["scatter W"] = _added(first[0], more[0]), _added(first[1], more[1])
    return ShardedBlock(
        {phase: cost for phase, (cost, _) in costs.items()},
        {phase: alone.payload_s for phase, (_, alone) in costs.items()},
        hidden,
    )


def _collective(
    pricer: Pricer,
    kind: BlockKind,
    name: RingOperation,
    size: float,
    hidden: bool,
    shares: tuple[float, float] | None = None,
) -> tuple[TransferCost, TransferCost]:
    """A collective of a block's (dense, expert) parameters inside the step, and the same alone.

    `size`: bytes of an element. `shares`: parts of the parameters that travel over the groups of hybrid
    FSDP; absent: all of them travel over the shards.
    """
    over: tuple[Ring, Ring] = shard_rings(pricer) if shares is None else group_rings(pricer)
    parts = shares or (1.0, 1.0)
    dense, expert = (
        count * size * part for count, part in zip(pricer.block_parameters(kind), parts, strict=True)
    )
    moved = [busiest_bytes(name, n, *ring) for n, ring in zip((dense, expert), over, strict=True)]
    nic, scale_up = (fsum(bytes_[i] for bytes_ in moved) for i in (0, 1))
    alone = data_parallel(pricer, name, dense, expert, 1, over=over)
    seconds, evidence = alone.seconds, alone.evidence
    if hidden:
        delay = overlap_delay(name, dense, *over[0], pricer.links, pricer.profile)
        seconds, evidence = seconds + delay.seconds, evidence | delay.evidence
    links = pricer.links
    nominal_s = max(
        nic / links.nic_bytes_per_s if nic else 0.0,
        scale_up / links.scale_up_bytes_per_s if scale_up else 0.0,
    )
    residual = 1.0 + collective_residual(pricer.profile, links.curves)
    as_priced, as_alone = (
        TransferCost(0.0, each, each, nic, scale_up, min(each, nominal_s), each * residual, evidence)
        for each in (seconds, alone.seconds)
    )
    return as_priced, as_alone


def _added(one: TransferCost, two: TransferCost) -> TransferCost:
    """Two collectives, one after the other, as one."""
    seconds = one.nic_s + two.nic_s
    nic, scale_up = one.nic_bytes + two.nic_bytes, one.scale_up_bytes + two.scale_up_bytes
    best, worst = one.best_s + two.best_s, one.worst_s + two.worst_s
    return TransferCost(0.0, seconds, seconds, nic, scale_up, best, worst, one.evidence | two.evidence)


def slowed_by_overlap(
    kind: BlockKind,
    compute: Mapping[tuple[BlockKind, Phase, Mode], PhaseCost],
    sharded: ShardedBlock,
    lost: float,
    modes: tuple[Mode, ...],
) -> dict[tuple[BlockKind, Phase, Mode], PhaseCost]:
    """Compute of a block in some modes with collectives beside it, spread evenly over its phases (eq. O5).

    `lost`: seconds that compute loses for each second that a collective beside it takes alone.
    """
    out: dict[tuple[BlockKind, Phase, Mode], PhaseCost] = {}
    if not sharded.hidden:
        return out
    for mode in modes:
        for forward, collectives in PASSES:
            own = {
                key: cost
                for key, cost in compute.items()
                if key[0] == kind and key[2] == mode and key[1].endswith(" F") == forward
            }
            total = fsum(cost.fixed_s + cost.row_s for cost in own.values())
            hidden = min(total, fsum(sharded.alone_s.get(phase, 0.0) for phase in collectives))
            factor = 1.0 + lost * hidden / total if total else 1.0
            for key, cost in own.items():
                worst_s = max(cost.worst_s, (cost.fixed_s + cost.row_s) * factor)
                out[key] = replace(
                    cost, fixed_s=cost.fixed_s * factor, row_s=cost.row_s * factor, worst_s=worst_s
                )
    return out
