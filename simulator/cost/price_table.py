"""The cost table of a scenario: every phase, transfer, send and end of step that a schedule needs."""

from __future__ import annotations

from math import ceil, fsum, log2

from moesim.simulator.cost.block_prices import block_compute, block_transfers
from moesim.simulator.cost.communication import notify_seconds, send_seconds
from moesim.simulator.cost.end_of_step import behind_compute
from moesim.simulator.cost.launches import launch_stalls
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.cost.profile_use import collective_residual
from moesim.simulator.cost.sharded import slowed_beside
from moesim.simulator.cost.table import CostTable, Mode, PhaseCost, SyncCost, TransferCost
from moesim.simulator.layout.groups import sends_on_a_link
from moesim.simulator.layout.in_flight import held_by_rank
from moesim.simulator.layout.stages import StageAssignment
from moesim.simulator.model.operator import BlockKind, Phase
from moesim.simulator.model.optimizer import optimizer_operators
from moesim.simulator.model.precision import BYTES_PER_ELEMENT
from moesim.simulator.schedules import Overlap, Schedule


def cost_table(pricer: Pricer, schedule: Schedule, stages: StageAssignment) -> CostTable:
    """Prices of everything that the schedule and its stages need."""
    paired = any(isinstance(step, Overlap) for rank in schedule.ranks for step in rank)
    modes: tuple[Mode, ...] = ("alone", "sms_reserved", "overlapped") if paired else ("alone",)
    compute: dict[tuple[BlockKind, Phase, Mode], PhaseCost] = {}
    transfer: dict[tuple[BlockKind, Phase, Mode], TransferCost] = {}
    for kind in sorted({block.kind for stage in stages.stages for block in stage}):
        compute |= block_compute(pricer, kind, modes)
        transfer |= block_transfers(pricer, kind, modes)
        if pricer.scenario.parallel.zero_stage == 3:
            sharded, alone = pricer.sharded_phases(kind)
            transfer |= {(kind, phase, "alone"): cost for phase, cost in sharded.items()}
            compute |= slowed_beside(kind, compute, alone, pricer.profile.lost_beside_nccl.value)
        compute |= launch_stalls(pricer, kind, compute, transfer, modes)
    send_bytes, send_s, across = pipeline_send(pricer, schedule)
    return CostTable(compute, transfer, send_bytes, send_s, step_end(pricer, schedule, stages), across)


def pipeline_send(pricer: Pricer, schedule: Schedule) -> tuple[float, float, bool]:
    """(bytes, seconds, across nodes?) of one activation or gradient between pipeline neighbours.

    Each tensor-parallel rank sends its own part of the sequence, in BF16. Where any hop of the
    pipeline crosses nodes, all are priced so (eq. X4).
    """
    if schedule.pp == 1:
        return 0.0, 0.0, False
    size = pricer.ep_tokens * pricer.shape.hidden * 2.0
    across = pricer.layout.nodes_spanned(pricer.layout.pp_group(0)) > 1
    shared = 1 if across else sends_on_a_link(pricer.layout, pricer.links.wiring)
    seconds = send_seconds(size, pricer.links, pricer.profile, across_nodes=across, shared=shared)
    return size, seconds, across


def step_end(pricer: Pricer, schedule: Schedule, stages: StageAssignment) -> tuple[SyncCost, ...]:
    """End of the step on every pipeline rank (docs/model.md, section "End of the step")."""
    if pricer.cluster.n_gpus > 1:
        pricer.note_carried_shares()
    held = held_by_rank(schedule, stages)
    same = {kinds: rank_step_end(pricer, kinds, schedule) for kinds in dict.fromkeys(held)}
    return tuple(same[kinds] for kinds in held)


def rank_step_end(pricer: Pricer, kinds: tuple[BlockKind, ...], schedule: Schedule) -> SyncCost:
    """End of the step on a pipeline rank that holds these blocks (docs/model.md, eq. E5)."""
    plan, recipe, layout = pricer.scenario.parallel, pricer.scenario.recipe, pricer.layout
    copies = len(schedule.routes)
    held = [pricer.block_parameters(kind) for kind in kinds]
    dense, expert = fsum(d for d, _ in held), fsum(e for _, e in held)
    reduce_bytes = BYTES_PER_ELEMENT[recipe.gradient_reduce]
    gather_bytes = BYTES_PER_ELEMENT[recipe.parameter_gather]
    reduce_s = pricer.data_parallel_s(dense * reduce_bytes, expert * reduce_bytes, copies)
    gather_s = pricer.data_parallel_s(dense * gather_bytes, expert * gather_bytes, copies)
    if plan.zero_stage == 0:  # an all-reduce: the gradients are gathered as well, before the optimizer
        reduce_s, gather_s = 2.0 * reduce_s, 0.0
    if plan.zero_stage == 3:
        reduce_s = gather_s = 0.0  # both happen block by block inside the step
    elif pricer.scenario.software.overlap_data_parallel:
        reduce_s, gather_s = behind_compute(pricer, kinds, schedule, reduce_s, gather_s)
    shards = (layout.dp * plan.cp * copies, layout.expert_dp * copies) if plan.zero_stage else (1, 1)
    owned = dense / shards[0] + expert / shards[1]
    local = dense + expert if recipe.linear == "fp8" else 0.0
    update = pricer.phase(optimizer_operators(owned, recipe, local), "alone")
    nodes = max(2, pricer.cluster.nodes)
    links = pricer.links
    norm_s = 2 * ceil(log2(nodes)) * links.nic_latency_s + notify_seconds(links, 1)
    total = reduce_s + norm_s + update.fixed_s + gather_s
    worst = (
        (reduce_s + gather_s) * (1.0 + collective_residual(pricer.profile, links.curves))
        + norm_s
        + update.worst_s
    )
    return SyncCost(reduce_s, norm_s, update.fixed_s, gather_s, update.best_s, max(worst, total))
