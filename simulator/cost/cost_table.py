"""Builds the cost table of a scenario: every phase, transfer, send and end of step of its schedule.

The parts that price one block serve the planner too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import fsum

from msgspec import Struct
from msgspec.structs import replace

from moesim.simulator.common.bounded_cache import BoundedCache, Same
from moesim.simulator.cost.data_parallel import PASSES, ShardedBlock, sharded_block, slowed_by_overlap
from moesim.simulator.cost.end_of_step import step_end
from moesim.simulator.cost.evidence import NO_EVIDENCE, REPEATED_EXPERTS, Moved, combined, summed
from moesim.simulator.cost.launches import launch_stalls
from moesim.simulator.cost.layer_collectives import (
    CoreSeconds,
    Inside,
    LayerCollectives,
    amax_exposed_s,
    end_collectives,
)
from moesim.simulator.cost.load_clock import Waits, at_load, law_of
from moesim.simulator.cost.overlap import CUTS_GEMMS, EdgeGemms, SplitGemm, methods_of
from moesim.simulator.cost.pricing import Pricer, table_key
from moesim.simulator.cost.table import (
    NO_COMPUTE,
    PAIR_MODES,
    Compute,
    CostTable,
    Mode,
    PhaseCost,
    PhaseKey,
    TransferCost,
    Transfers,
    compute_of_pass,
)
from moesim.simulator.cost.transfers import REPEATED, block_transfers, expert_transfer, send_seconds
from moesim.simulator.layout.parallel import sends_on_a_link
from moesim.simulator.layout.stages import StageAssignment
from moesim.simulator.model.operator import GEMM_CLASSES, BlockKind, Operator, Phase
from moesim.simulator.model.repeated import repeated_communication
from moesim.simulator.schedules import Schedule


def cost_table(pricer: Pricer, schedule: Schedule, stages: StageAssignment) -> CostTable:
    """Prices of all phases, transfers, sends and ends of step of a schedule and its stages."""
    if pricer.shifted:
        return _cost_table(pricer, schedule, stages)
    key = (table_key(pricer.job), Same(schedule), stages)
    return _TABLES.get(key, lambda: (schedule, _cost_table(pricer, schedule, stages)))[1]


_TABLES: BoundedCache[tuple[Schedule, CostTable]] = BoundedCache(
    200_000, lambda kept: sum(map(len, kept[0].ranks)) + 20 * len(kept[1].compute)
)
"""Cost tables of the scenarios before, limited by their prices and the steps of their schedules."""


def _cost_table(pricer: Pricer, schedule: Schedule, stages: StageAssignment) -> CostTable:
    modes: tuple[Mode, ...] = ("alone", "sms_reserved", "overlapped") if schedule.paired else ("alone",)
    compute, transfer = block_prices(
        pricer, {block.kind for stage in stages.stages for block in stage}, modes
    )
    send_bytes, send_s, across = pipeline_send(pricer, schedule)
    ends = step_end(pricer, schedule, stages)
    waits = not pricer.gradient_sync.hidden, pricer.scenario.software.gathers_wait
    return CostTable(compute, transfer, send_bytes, send_s, ends, across, *waits)


def block_prices(
    pricer: Pricer, kinds: Iterable[BlockKind], modes: tuple[Mode, ...]
) -> tuple[dict[PhaseKey, PhaseCost], dict[PhaseKey, TransferCost]]:
    """Prices of all phases and transfers of some kinds of blocks, as they are inside a step.

    Prices at shifted rates carry neither evidence nor bytes: they are compared with those before the shift.
    """
    compute: dict[PhaseKey, PhaseCost] = {}
    transfer: dict[PhaseKey, TransferCost] = {}
    for kind in sorted(kinds):
        compute |= block_compute(pricer, kind, modes)
        transfer |= block_transfers(pricer, kind, modes)
        inside = inside_step(pricer, kind, compute, transfer, modes, evidence=not pricer.shifted)
        compute |= inside[0]
        transfer |= inside[1]
    return compute, transfer


def inside_step(
    pricer: Pricer,
    kind: BlockKind,
    compute: Compute,
    transfer: Transfers,
    modes: Sequence[Mode],
    *,
    evidence: bool = True,
) -> tuple[dict[PhaseKey, PhaseCost], dict[PhaseKey, TransferCost]]:
    """Prices of a block that change inside a step, and the transfers that the step adds.

    The clock follows the load of the block, collectives over the replicas run beside the compute or hold it
    up, and launch stalls lengthen the compute. `evidence`: whether the prices carry that of launches. Raises
    InputError for an unknown host.
    """
    beside = shared_beside_transfers(pricer, kind, compute, transfer)
    compute = {**compute, **beside}
    sharded = sharded_block(pricer, kind)
    moved: dict[PhaseKey, TransferCost] = {
        (kind, phase, "alone"): cost for phase, cost in sharded.transfers.items()
    }
    each: list[tuple[ShardedBlock, tuple[Mode, ...]]] = [(sharded, ("alone",))]
    if sharded.transfers and "overlapped" in modes:
        pair = sharded_block(pricer, kind, paired=True)
        moved |= {(kind, phase, "overlapped"): cost for phase, cost in pair.transfers.items()}
        each.append((pair, PAIR_MODES))

    def stalled(prices: Compute, chosen: Sequence[Mode]) -> dict[PhaseKey, PhaseCost]:
        slowed: dict[PhaseKey, PhaseCost] = {}
        for block, own in each:
            if block.transfers and own[0] in chosen:
                slowed |= slowed_by_overlap(kind, prices, block, pricer.lost_beside_library, own)
        return slowed | launch_stalls(
            pricer, kind, {**prices, **slowed}, {**transfer, **moved}, chosen, evidence=evidence
        )

    if law_of(pricer) is None:
        return beside | stalled(compute, modes), moved
    alone = {key: cost for key, cost in compute.items() if key[0] == kind and key[2] == "alone"}
    host_s = 0.0
    if pricer.scenario.software.host:
        host_s = fsum(cost.host_s for cost in stalled(compute, ("alone",)).values())
    waits_s, beside_s = sharded.beside(
        {
            forward: fsum(c.seconds for c in compute_of_pass(alone, kind, "alone", forward).values())
            for forward, _ in PASSES
        }
    )
    if pricer.shape.block(kind).layer is not None and pricer.scenario.parallel.tp > 1:
        exposed_s = fsum(cost.exposed_s for cost in alone.values())
        beside_s += max(0.0, LayerCollectives(pricer, kind).tensor_s() - exposed_s)
    waits = Waits(host_s, waits_s, beside_s)
    clocked = at_load(pricer, kind, compute, transfer, modes, waits)
    return beside | clocked | stalled({**compute, **clocked}, modes), moved


BESIDE: tuple[tuple[Phase, str, Phase], ...] = (
    ("mlp F", "shared.gate_up", "dispatch F"),
    ("mlp F", "shared.", "combine F"),
    ("mlp I", "shared.gate_up", "dispatch B"),
    ("mlp I", "shared.", "combine B"),
    ("mlp W", "shared.gate_up", "dispatch B"),
    ("mlp W", "shared.", "combine B"),
)
"""Phase, operators and the transfer that they run beside: the first projection of shared experts beside the
dispatch, the rest beside the combine (NVIDIA/Megatron-LM@d98e8a64 moe/token_dispatcher.py)."""


def shared_beside_transfers(
    pricer: Pricer, kind: BlockKind, compute: Compute, transfer: Transfers
) -> dict[PhaseKey, PhaseCost]:
    """Compute of a routed block without the part of its shared experts that hides (eq. X33).

    A transfer of T seconds hides T (1 - SMs of its kernels / SMs) seconds of GEMMs, which run that much
    slower beside it. Empty where the scenario does not ask for it.
    """
    scenario = pricer.scenario
    if not scenario.communication.overlap_shared_experts or not pricer.shape.block(kind).routed:
        return {}
    sms = scenario.communication.sms  # none on accelerators whose engines move the data
    free = 1.0 - sms / pricer.cluster.accelerator.n_sms if sms else 1.0
    room = {
        phase: free * (moved.launch_s + moved.payload_s)
        for (own, phase, mode), moved in transfer.items()
        if own == kind and mode == "alone"
    }
    taken: set[tuple[Phase, str]] = set()
    hidden: dict[Phase, float] = {}
    for phase, prefix, beside in BESIDE:
        seconds = 0.0
        pairs = zip(
            pricer.operators(kind).get(phase, ()), pricer.operator_costs(kind, phase, "alone"), strict=True
        )
        for op, cost in pairs:
            if op.name.startswith(prefix) and not op.recompute and (phase, op.name) not in taken:
                taken.add((phase, op.name))
                seconds += cost.seconds
        part = min(seconds, room.get(beside, 0.0))
        room[beside] = room.get(beside, 0.0) - part
        hidden[phase] = hidden.get(phase, 0.0) + part
    out: dict[PhaseKey, PhaseCost] = {}
    for phase, part in hidden.items():
        price = compute.get((kind, phase, "alone"), NO_COMPUTE)
        if part > 0.0:
            best_s = max(0.0, price.best_s - part)
            out[kind, phase, "alone"] = dataclasses.replace(
                price, fixed_s=price.fixed_s - part, best_s=best_s
            )
    return out


def pipeline_send(pricer: Pricer, schedule: Schedule) -> tuple[float, float, bool]:
    """(bytes, seconds, across nodes?) of one activation or gradient between pipeline neighbours.

    Each tensor-parallel rank sends its own part of the sequence, all residual streams, in BF16. If any hop of
    the pipeline crosses nodes, all hops are priced as if they did (eq. X4).
    """
    if schedule.pp == 1:
        return 0.0, 0.0, False
    size = pricer.ep_tokens * pricer.shape.hidden * pricer.shape.residual_streams * 2.0
    across = pricer.layout.nodes_spanned(pricer.layout.pp_group(0)) > 1
    shared = 1 if across else sends_on_a_link(pricer.layout, pricer.links.wiring)
    seconds = send_seconds(size, pricer.links, pricer.profile, across_nodes=across, shared=shared)
    return size, seconds, across


# -- one block ----------------------------------------------------------------------------------------


class BareCosts(Struct, frozen=True):
    """Compute of the phases of a block without the exposed time of the collectives inside them.

    `core_s`: seconds of the GEMMs and of the core attention, behind which those collectives may hide; empty
    where the block has no such collectives.
    """

    compute: Mapping[tuple[Phase, Mode], PhaseCost]
    core_s: Mapping[Phase, CoreSeconds]


def block_compute(pricer: Pricer, kind: BlockKind, modes: tuple[Mode, ...]) -> dict[PhaseKey, PhaseCost]:
    """Compute of a block by phase and mode, with the collectives inside its phases."""
    return with_collectives(pricer, kind, bare_costs(pricer, kind, modes), evidence=not pricer.shifted)


def bare_costs(
    pricer: Pricer, kind: BlockKind, modes: tuple[Mode, ...], only: frozenset[Phase] | None = None
) -> BareCosts:
    """Compute of a block without the collectives inside its phases; `only` limits it to some phases."""
    phases = [phase for phase in pricer.operators(kind) if only is None or phase in only]
    return BareCosts(
        {(phase, mode): pricer.phase(kind, phase, mode) for phase in phases for mode in modes},
        {phase: _core_seconds(pricer, kind, phase) for phase in phases} if _cuts(pricer, kind) else {},
    )


def with_collectives(
    pricer: Pricer,
    kind: BlockKind,
    bare: BareCosts,
    *,
    evidence: bool = True,
    repeated: Callable[[], Sequence[TransferCost]] | None = None,
) -> dict[PhaseKey, PhaseCost]:
    """Compute of a block with the collectives inside its phases (eqs. X6, X14, X15, O2, O3, O9).

    `evidence`: whether the prices carry that of the collectives, and their bytes. `repeated` gives the
    transfers that recompute repeats, where a caller keeps their prices; they do not depend on the block.
    """
    block, scenario = pricer.shape.block(kind), pricer.scenario
    inside = Inside({}, {}, NO_EVIDENCE)
    if _cuts(pricer, kind):
        inside = LayerCollectives(pricer, kind).inside(bare.core_s, evidence=evidence)
    elif scenario.software.end_collectives and scenario.parallel.tp > 1 and block.layer is None:
        gemms = {phase: _core_seconds(pricer, kind, phase) for phase, _ in bare.compute}
        inside = end_collectives(pricer, kind, gemms)
    exposed, moved, stands_on = inside if evidence else (inside.exposed, {}, NO_EVIDENCE)
    for phase, seconds in amax_exposed_s(pricer, kind, bare.compute).items():
        exposed[phase] = exposed.get(phase, 0.0) + seconds
    if repeated_communication(block, scenario.recompute, scenario.software.op_keeps_transfers).experts:
        if repeated is not None:
            again = repeated()
        else:
            phases = REPEATED if scenario.parallel.ep > 1 else ()
            again = [expert_transfer(pricer, phase, "alone") for phase in phases]
        exposed["mlp I"] = exposed.get("mlp I", 0.0) + fsum(t.launch_s + t.payload_s for t in again)
        stands_on = combined((part, 1.0) for part in (stands_on, *(t.evidence for t in again)))
        sent = [Moved(REPEATED_EXPERTS, part.nic_bytes, part.scale_up_bytes) for part in again]
        before = [part for transfer in again for part in transfer.moved_before]
        moved["mlp I"] = summed((part, 1.0) for part in (*moved.get("mlp I", ()), *sent, *before))
    out: dict[PhaseKey, PhaseCost] = {}
    for (phase, mode), cost in bare.compute.items():
        exposed_s, crosses = exposed.get(phase, 0.0), moved.get(phase, ())
        if exposed_s or crosses:
            cost = dataclasses.replace(
                cost,
                fixed_s=cost.fixed_s + exposed_s,
                exposed_s=exposed_s,
                worst_s=cost.worst_s + exposed_s,
                evidence=cost.evidence | stands_on if evidence else cost.evidence,
                moved=crosses,
            )
        out[kind, phase, mode] = cost
    return out


def _cuts(pricer: Pricer, kind: BlockKind) -> bool:
    plan, block = pricer.scenario.parallel, pricer.shape.block(kind)
    return block.layer is not None and plan.tp * plan.cp * (plan.expert_tp if block.routed else 1) > 1


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
    card, linear = pricer.cluster.accelerator.architecture, pricer.scenario.recipe.linear
    methods = methods_of(software.overlap_tensor_parallel, linear, card, pricer.shape.hidden)
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
