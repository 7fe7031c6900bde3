"""Builds the cost table of a scenario, with every phase, transfer, send and end of step of its schedule."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum

from moesim.simulator.common.bounded_cache import BoundedCache, Same
from moesim.simulator.cost.block_prices import block_compute, block_transfers
from moesim.simulator.cost.communication import send_seconds
from moesim.simulator.cost.data_parallel import PASSES, ShardedBlock, sharded_block, slowed_by_overlap
from moesim.simulator.cost.end_of_step import step_end
from moesim.simulator.cost.launches import Compute, Transfers, launch_stalls
from moesim.simulator.cost.layer_collectives import LayerCollectives
from moesim.simulator.cost.load_clock import Waits, at_load, law_of
from moesim.simulator.cost.pricing import Pricer, prices_key
from moesim.simulator.cost.table import PAIR_MODES, CostTable, Mode, PhaseCost, TransferCost
from moesim.simulator.layout.parallel import sends_on_a_link
from moesim.simulator.layout.stages import StageAssignment
from moesim.simulator.model.operator import BlockKind, Phase
from moesim.simulator.schedules import Schedule


def cost_table(pricer: Pricer, schedule: Schedule, stages: StageAssignment) -> CostTable:
    """Prices of all phases, transfers, sends and ends of step of a schedule and its stages."""
    if pricer.shifted:
        return _cost_table(pricer, schedule, stages)
    key = (prices_key(pricer.job), Same(schedule), stages)
    return _TABLES.get(key, lambda: (schedule, _cost_table(pricer, schedule, stages)))[1]


_TABLES: BoundedCache[tuple[Schedule, CostTable]] = BoundedCache(
    200_000, lambda kept: sum(map(len, kept[0].ranks)) + 20 * len(kept[1].compute)
)
"""Cost tables of the scenarios before, limited by their prices and the steps of their schedules."""


def _cost_table(pricer: Pricer, schedule: Schedule, stages: StageAssignment) -> CostTable:
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
    ends = step_end(pricer, schedule, stages)
    waits = not pricer.gradient_sync.hidden
    return CostTable(compute, transfer, send_bytes, send_s, ends, across, waits)


def inside_step(
    pricer: Pricer, kind: BlockKind, compute: Compute, transfer: Transfers, modes: Sequence[Mode]
) -> tuple[dict[tuple[BlockKind, Phase, Mode], PhaseCost], dict[tuple[BlockKind, Phase, Mode], TransferCost]]:
    """Prices of a block that change inside a step, and the transfers that the step adds.

    The clock follows the load of the block, collectives over the replicas run beside the compute or hold it
    up, and launch stalls lengthen the compute. Raises InputError for an unknown host.
    """
    sharded = sharded_block(pricer, kind)
    moved: dict[tuple[BlockKind, Phase, Mode], TransferCost] = {
        (kind, phase, "alone"): cost for phase, cost in sharded.transfers.items()
    }
    each: list[tuple[ShardedBlock, tuple[Mode, ...]]] = [(sharded, ("alone",))]
    if sharded.transfers and "overlapped" in modes:
        pair = sharded_block(pricer, kind, paired=True)
        moved |= {(kind, phase, "overlapped"): cost for phase, cost in pair.transfers.items()}
        each.append((pair, PAIR_MODES))

    def stalled(prices: Compute) -> dict[tuple[BlockKind, Phase, Mode], PhaseCost]:
        slowed: dict[tuple[BlockKind, Phase, Mode], PhaseCost] = {}
        for block, own in each:
            if block.transfers:
                slowed |= slowed_by_overlap(kind, prices, block, pricer.lost_beside_library, own)
        return slowed | launch_stalls(pricer, kind, {**prices, **slowed}, {**transfer, **moved}, modes)

    if law_of(pricer) is None:
        return stalled(compute), moved
    host_s = _host_s(stalled(compute)) if pricer.scenario.software.host else 0.0
    waits_s, beside_s = sharded.beside(_pass_seconds(kind, compute))
    waits = Waits(host_s, waits_s, beside_s + _tensor_beside(pricer, kind, compute))
    clocked = at_load(pricer, kind, compute, transfer, modes, waits)
    return clocked | stalled({**compute, **clocked}), moved


def _host_s(prices: Compute) -> float:
    """Seconds in which a block alone waits for launches."""
    return fsum(cost.host_s for (_, _, mode), cost in prices.items() if mode == "alone")


def _tensor_beside(pricer: Pricer, kind: BlockKind, compute: Compute) -> float:
    """Seconds of a layer's tensor-parallel collectives that run beside its compute."""
    if pricer.shape.block(kind).layer is None or pricer.scenario.parallel.tp == 1:
        return 0.0
    collectives = LayerCollectives(pricer.scenario, pricer.links, pricer.profile, pricer.cluster.accelerator)
    exposed = fsum(cost.exposed_s for (k, _, mode), cost in compute.items() if k == kind and mode == "alone")
    return max(0.0, collectives.tensor_s(pricer.shape, pricer.tokens) - exposed)


def _pass_seconds(kind: BlockKind, compute: Compute) -> dict[bool, float]:
    """Seconds of a block's compute alone in the forward (True) and in the backward."""
    return {
        forward: fsum(
            cost.fixed_s + cost.row_s
            for (k, phase, mode), cost in compute.items()
            if k == kind and mode == "alone" and phase.endswith(" F") == forward
        )
        for forward, _ in PASSES
    }


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
