"""Prices of one block by phase and mode, shared by the simulator and the planner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum

from moesim.simulator.cost.end_collectives import end_collectives
from moesim.simulator.cost.expert_transfers import expert_transfer
from moesim.simulator.cost.layer_collectives import CoreSeconds, LayerCollectives
from moesim.simulator.cost.moved import REPEATED_EXPERTS, Moved, summed
from moesim.simulator.cost.overlap import CUTS_GEMMS, EdgeGemms, SplitGemm, methods_of
from moesim.simulator.cost.price_evidence import NO_EVIDENCE, PriceEvidence
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.cost.small_collectives import amax_exposed_s
from moesim.simulator.cost.table import Mode, PhaseCost, TransferCost
from moesim.simulator.model.operator import GEMM_CLASSES, BlockKind, Operator, Phase
from moesim.simulator.model.repeated import repeated_communication
from moesim.simulator.schedules.template import EP_PHASES


@dataclass(frozen=True, slots=True)
class BarePrices:
    """Compute of the phases of a block without the exposed time of the collectives inside them.

    `core_s`: seconds of the GEMMs and of the core attention, behind which those collectives may hide; empty
    where the block has no such collectives.
    """

    compute: Mapping[tuple[Phase, Mode], PhaseCost]
    core_s: Mapping[Phase, CoreSeconds]


def block_compute(
    pricer: Pricer, kind: BlockKind, modes: tuple[Mode, ...]
) -> dict[tuple[BlockKind, Phase, Mode], PhaseCost]:
    """Compute of a block by phase and mode, with the collectives inside its phases."""
    return with_collectives(pricer, kind, bare_prices(pricer, kind, modes))


def bare_prices(
    pricer: Pricer, kind: BlockKind, modes: tuple[Mode, ...], only: frozenset[Phase] | None = None
) -> BarePrices:
    """Compute of a block without the collectives inside its phases; `only` limits it to some phases."""
    phases = [phase for phase in pricer.operators(kind) if only is None or phase in only]
    return BarePrices(
        {(phase, mode): pricer.phase(kind, phase, mode) for phase in phases for mode in modes},
        {phase: _core_seconds(pricer, kind, phase) for phase in phases} if _cuts(pricer, kind) else {},
    )


def with_collectives(
    pricer: Pricer,
    kind: BlockKind,
    bare: BarePrices,
    *,
    evidence: bool = True,
    repeated: Callable[[], Sequence[TransferCost]] | None = None,
) -> dict[tuple[BlockKind, Phase, Mode], PhaseCost]:
    """Compute of a block with the collectives inside its phases (eqs. X6, X14, X15, O2, O3, O9).

    `evidence`: whether the prices carry that of the collectives, and their bytes. `repeated` gives the
    transfers that recompute repeats, where a caller keeps their prices (`repeated_transfers`); they do not
    depend on the block.
    """
    exposed: dict[Phase, float] = {}
    moved: dict[Phase, tuple[Moved, ...]] = {}
    stands_on = NO_EVIDENCE
    if _cuts(pricer, kind):
        collectives = LayerCollectives(
            pricer.scenario, pricer.links, pricer.profile, pricer.cluster.accelerator
        )
        exposed = collectives.exposed(pricer.shape, kind, pricer.tokens, bare.core_s)
        if evidence:
            stands_on = collectives.evidence(pricer.shape, kind, pricer.tokens)
            moved = collectives.moved(pricer.shape, kind, pricer.tokens)
    for phase, seconds in amax_exposed_s(pricer, kind, bare.compute).items():
        exposed[phase] = exposed.get(phase, 0.0) + seconds
    block, plan = pricer.shape.block(kind), pricer.scenario.parallel
    if pricer.scenario.software.end_collectives and plan.tp > 1 and block.layer is None:
        gemms = {phase: _core_seconds(pricer, kind, phase) for phase, _ in bare.compute}
        exposed, stands_on, moved = end_collectives(pricer, block, gemms)
    keeps = pricer.scenario.software.op_keeps_transfers
    if repeated_communication(block, pricer.scenario.recompute, keeps).experts:
        again = repeated_transfers(pricer) if repeated is None else repeated()
        exposed["mlp I"] = exposed.get("mlp I", 0.0) + fsum(t.launch_s + t.payload_s for t in again)
        for transfer in again:
            stands_on |= transfer.evidence
        sent = [Moved(REPEATED_EXPERTS, part.nic_bytes, part.scale_up_bytes) for part in again]
        before = [part for transfer in again for part in transfer.moved_before]
        moved["mlp I"] = summed((part, 1.0) for part in (*moved.get("mlp I", ()), *sent, *before))
    return {
        (kind, ph, mode): _later(
            cost, exposed.get(ph, 0.0), moved.get(ph, ()), stands_on if evidence else None
        )
        for (ph, mode), cost in bare.compute.items()
    }


def _cuts(pricer: Pricer, kind: BlockKind) -> bool:
    plan, block = pricer.scenario.parallel, pricer.shape.block(kind)
    return block.layer is not None and plan.tp * plan.cp * (plan.expert_tp if block.routed else 1) > 1


def _later(
    cost: PhaseCost, exposed_s: float, moved: tuple[Moved, ...], evidence: PriceEvidence | None
) -> PhaseCost:
    if not exposed_s and not moved:
        return cost
    return PhaseCost(
        fixed_s=cost.fixed_s + exposed_s,
        row_s=cost.row_s,
        exposed_s=exposed_s,
        best_s=cost.best_s,
        worst_s=cost.worst_s + exposed_s,
        host_s=cost.host_s,
        evidence=cost.evidence if evidence is None else cost.evidence | evidence,
        moved=moved,
    )


REPEATED: tuple[Phase, Phase] = ("dispatch F", "combine F")
"""Transfers of the forward, which recompute repeats without overlap (eq. X15)."""


def repeated_transfers(pricer: Pricer) -> tuple[TransferCost, ...]:
    """Prices of the transfers that recompute repeats; none without expert parallelism."""
    if pricer.scenario.parallel.ep == 1:
        return ()
    return tuple(expert_transfer(pricer, phase, "alone") for phase in REPEATED)


def block_transfers(
    pricer: Pricer, kind: BlockKind, modes: tuple[Mode, ...]
) -> dict[tuple[BlockKind, Phase, Mode], TransferCost]:
    """Expert-parallel transfers of a block; they have no mode `sms_reserved`."""
    if pricer.scenario.parallel.ep == 1:
        return {}
    phases = [phase for phase in pricer.operators(kind) if phase in EP_PHASES]
    return {
        (kind, ph, mode): expert_transfer(pricer, ph, mode)
        for ph in phases
        for mode in modes
        if mode != "sms_reserved"
    }


def _core_seconds(pricer: Pricer, kind: BlockKind, phase: Phase) -> CoreSeconds:
    """Seconds of the GEMMs and of the attention of a phase, alone on all SMs and without recomputed ones."""
    gemms = attention = 0.0
    costs = pricer.operator_costs(kind, phase, "alone")
    split: list[tuple[Operator, float]] = []
    for op, cost in zip(pricer.operators(kind)[phase], costs, strict=True):
        if op.recompute:
            continue
        if op.cls in GEMM_CLASSES:
            gemms += cost.seconds
            if op.cls in ("gemm", "wgrad_gemm") and op.gemm is not None and op.gemm.groups == 1:
                split.append((op, cost.seconds))
        elif op.cls.startswith("attention"):
            attention += cost.seconds
    software, tp = pricer.scenario.software, pricer.scenario.parallel.tp
    if tp == 1 or software.overlap_tensor_parallel not in CUTS_GEMMS or not split:
        return CoreSeconds(gemms, attention)
    methods = methods_of(software.overlap_tensor_parallel, pricer.scenario.recipe.linear)
    half = methods.attention if phase.startswith("attn") else methods.feed_forward
    edges = (_split_gemm(pricer, *split[end], tp, half.scatter.pieces) for end in (0, -1))
    return CoreSeconds(gemms, attention, EdgeGemms(*edges))


def _split_gemm(pricer: Pricer, op: Operator, whole_s: float, tp: int, pieces: int) -> SplitGemm:
    """A GEMM as a whole, and one of `tp` and of `pieces` pieces of its rows at the rates of their shapes.

    A weight gradient is never cut: its rows are summed.
    """
    if op.cls == "wgrad_gemm" or op.gemm is None:
        return SplitGemm(whole_s)
    parts = tuple(
        replace(op, flop=op.flop / n, bytes_read=op.bytes_read / n, bytes_written=op.bytes_written / n,
                gemm=replace(op.gemm, m=op.gemm.m / n))
        for n in (tp, pieces)
    )  # fmt: skip
    ring, pipeline = (pricer.compute((part,), "alone").fixed_s for part in parts)
    # A piece is at best as fast as the whole; a rate that a table reads higher for fewer rows is not gained.
    return SplitGemm(whole_s, max(ring, whole_s / tp), max(pipeline, whole_s / pieces))
