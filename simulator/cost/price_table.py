"""Builds the cost table of a scenario, with every phase, transfer, send and end of step of its schedule."""

from __future__ import annotations

from collections.abc import Sequence

from moesim.simulator.cost.block_prices import block_compute, block_transfers
from moesim.simulator.cost.communication import send_seconds
from moesim.simulator.cost.end_of_step import step_end
from moesim.simulator.cost.launches import Compute, Transfers, launch_stalls
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.cost.sharded import sharded_phases, slowed_by_overlap
from moesim.simulator.cost.table import CostTable, Mode, PhaseCost, TransferCost
from moesim.simulator.layout.groups import sends_on_a_link
from moesim.simulator.layout.stages import StageAssignment
from moesim.simulator.model.operator import BlockKind, Phase
from moesim.simulator.schedules import Schedule


def cost_table(pricer: Pricer, schedule: Schedule, stages: StageAssignment) -> CostTable:
    """Prices of all phases, transfers, sends and ends of step of a schedule and its stages."""
    modes: tuple[Mode, ...] = ("alone", "sms_reserved", "overlapped") if schedule.paired else ("alone",)
    compute: dict[tuple[BlockKind, Phase, Mode], PhaseCost] = {}
    transfer: dict[tuple[BlockKind, Phase, Mode], TransferCost] = {}
    for kind in sorted({block.kind for stage in stages.stages for block in stage}):
        compute |= block_compute(pricer, kind, modes)
        transfer |= block_transfers(pricer, kind, modes)
        inside = inside_step(pricer, kind, compute, transfer, modes)
        compute |= inside[0]
        transfer |= inside[1]
    send_bytes, send_s, across = pipeline_send(pricer, schedule)
    return CostTable(compute, transfer, send_bytes, send_s, step_end(pricer, schedule, stages), across)


def inside_step(
    pricer: Pricer, kind: BlockKind, compute: Compute, transfer: Transfers, modes: Sequence[Mode]
) -> tuple[dict[tuple[BlockKind, Phase, Mode], PhaseCost], dict[tuple[BlockKind, Phase, Mode], TransferCost]]:
    """Prices of a block that change inside a step, and the transfers that the step adds.

    ZeRO-3 gathers parameters and scatters gradients beside the compute, and launch stalls lengthen the
    compute. Raises InputError for an unknown host.
    """
    moved: dict[tuple[BlockKind, Phase, Mode], TransferCost] = {}
    slowed: dict[tuple[BlockKind, Phase, Mode], PhaseCost] = {}
    if pricer.scenario.parallel.zero_stage == 3:
        sharded, alone = sharded_phases(pricer, kind)
        moved = {(kind, phase, "alone"): cost for phase, cost in sharded.items()}
        slowed = slowed_by_overlap(kind, compute, alone, pricer.lost_beside_library)
    stalled = launch_stalls(pricer, kind, {**compute, **slowed}, {**transfer, **moved}, modes)
    return slowed | stalled, moved


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
