"""Assigns blocks to pipeline stages, as the scenario states or balanced by compute and transfers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from math import fsum

import numpy as np
from msgspec.structs import replace

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InputError
from moesim.simulator.cost.cost_table import block_prices
from moesim.simulator.cost.end_of_step import step_end
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.layout.expert_load import load_spec
from moesim.simulator.layout.parallel import Layout
from moesim.simulator.layout.stages import Block, StageAssignment, balanced, blocks_of, from_layers_per_stage
from moesim.simulator.memory.fsdp2 import replayed_peaks
from moesim.simulator.memory.gpu import REPLAY_ERRORS, MemoryInputs, MemoryReport, RankStages, memory_by_kind
from moesim.simulator.model.block import PLAIN_KINDS, may_route
from moesim.simulator.model.operator import BlockKind, Phase
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.predict.draws import Draws
from moesim.simulator.predict.result_parts import MemoryResult
from moesim.simulator.scenario import Scenario
from moesim.simulator.schedules.action import Kind, Schedule
from moesim.simulator.schedules.template import EP_PHASES
from moesim.simulator.schedules.timeline import step_order


def assign_stages(scenario: Scenario, pricer: Pricer, schedule: Schedule) -> StageAssignment:
    """Stages as the scenario states, or balanced by the seconds of one micro-batch (eq. S1).

    Balancing makes the heaviest stage as light as possible, with the embedding on the first stage, MTP module
    and head passes on the last. This rule was fixed before any comparison
    (docs/decisions/0003-stage-balance.md).
    """
    if scenario.stages.blocks is not None:
        return explicit_blocks(scenario.stages.blocks, schedule.n_stages, pricer.shape)
    blocks = blocks_of(pricer.shape)
    if scenario.stages.layers is not None:
        if len(scenario.stages.layers) != schedule.n_stages:
            raise InputError(
                f"stages.layers has {len(scenario.stages.layers)} entries, but {schedule.name} with "
                f"parallel.pp={scenario.parallel.pp} has {schedule.n_stages} stages"
            )
        return from_layers_per_stage(blocks, scenario.stages.layers, scenario.stages.mtp)
    times = block_times(pricer, blocks, schedule.microbatches)
    hidden = pricer.gradient_sync.hidden
    weights = [_seconds(own.sum(axis=0), schedule.paired, hidden) for own in times]
    # Both ends of a bidirectional pipeline are on one rank, where an end without layers hides no transfers.
    lightest = balanced(blocks, weights, schedule.n_stages, ends_alone=len(schedule.routes) == 1)
    each, more = divmod(pricer.shape.n_layers, schedule.n_stages)
    if not each:
        return lightest
    sizes = [each + (stage < more) for stage in range(schedule.n_stages)]
    even = from_layers_per_stage(blocks, sizes)
    if even == lightest:
        return lightest
    of_block = dict(zip(blocks, times, strict=True))
    return min((lightest, even), key=lambda stages: _step_s(stages, pricer, schedule, of_block))


def block_seconds(pricer: Pricer, kind: BlockKind) -> float:
    """Compute seconds of one micro-batch of a block, alone on all SMs."""
    costs = [pricer.phase(kind, phase, "alone") for phase in pricer.operators(kind)]
    return fsum(cost.fixed_s + cost.row_s for cost in costs)


ROWS_OF: dict[Kind, slice] = {"F": slice(0, 1), "I": slice(1, 2), "W": slice(2, 3), "B": slice(1, 3)}
"""Rows of `block_times` that an action runs."""


def block_times(pricer: Pricer, blocks: Sequence[Block], microbatches: int) -> list[FloatArray]:
    """Seconds of every block for one micro-batch [F I W, compute, experts' transfers, others] (eq. S1).

    Compute comes with its launch stalls and exposed collectives; `others` are collectives over the replicas.
    Rows and bytes are those of the fullest rank.
    """
    compute, transfer = block_prices(pricer, {block.kind for block in blocks}, ("alone",))
    loads = iter(_fullest_loads(pricer, blocks, microbatches))
    times = []
    known: dict[tuple[BlockKind, float, float], FloatArray] = {}
    for block in blocks:
        rows, node_rows = next(loads) if may_route(block.kind) else (1.0, 1.0)
        if (block.kind, rows, node_rows) in known:
            times.append(known[block.kind, rows, node_rows])
            continue
        own = known[block.kind, rows, node_rows] = np.zeros((3, 3))
        for (kind, phase, _), price in compute.items():
            if kind == block.kind:
                own[_row(phase), 0] += price.fixed_s + price.row_s * rows
        for (kind, phase, _), moved in transfer.items():
            if kind == block.kind:
                experts = phase in EP_PHASES
                paths = (moved.nic_s * node_rows, moved.scale_up_s * rows) if experts else (moved.payload_s,)
                own[_row(phase), 1 if experts else 2] += moved.launch_s + max(paths)
        times.append(own)
    return times


def kind_weights(pricer: Pricer, schedule: Schedule) -> dict[BlockKind, float]:
    """Mean weight in s of the blocks of each kind (eq. S3)."""
    blocks = blocks_of(pricer.shape)
    times, hidden = block_times(pricer, blocks, schedule.microbatches), pricer.gradient_sync.hidden
    by_kind: dict[BlockKind, list[float]] = {}
    for block, own in zip(blocks, times, strict=True):
        by_kind.setdefault(block.kind, []).append(_seconds(own.sum(axis=0), schedule.paired, hidden))
    return {kind: fsum(all_) / len(all_) for kind, all_ in by_kind.items()}


def _row(phase: Phase) -> int:
    return {"F": 0, "W": 2}.get(phase[-1], 1)


def _seconds(times: FloatArray, paired: bool, hidden: bool) -> float:
    """Seconds of work [compute, experts' transfers, others] whose transfers hide in pairs only.

    Collectives over the replicas count where they are longer than the rest, or where they do not hide.
    """
    compute, experts, replicas = map(float, times)
    chain = max(compute, experts) if paired else compute + experts
    return max(chain, replicas) if hidden else chain + replicas


def _step_s(
    stages: StageAssignment, pricer: Pricer, schedule: Schedule, of_block: Mapping[Block, FloatArray]
) -> float:
    """Seconds of a step with free sends: the longest path of its schedule, and its end."""
    hidden = pricer.gradient_sync.hidden
    of_stage = [sum((of_block[block] for block in stage), np.zeros((3, 3))) for stage in stages.stages]

    def seconds(actions: tuple[tuple[Kind, int], ...]) -> float:
        parts = [of_stage[stage][ROWS_OF[kind]].sum(axis=0) for kind, stage in actions]
        return _seconds(sum(parts, np.zeros(3)), len(parts) == 2, hidden)

    ends, order = step_end(pricer, schedule, stages), step_order(schedule)
    of_kind = [seconds(actions) for actions in order.kinds]
    done = order.ends([of_kind[number] for number in order.kind_of])
    last = accumulate(map(len, schedule.ranks))  # the last step of every rank
    reduced = max(done[number - 1] + end.reduce_s for number, end in zip(last, ends, strict=True))
    return reduced + max(end.total_s - end.reduce_s for end in ends)


def _fullest_loads(
    pricer: Pricer, blocks: Sequence[Block], microbatches: int
) -> Sequence[tuple[float, float]]:
    """(rows of the fullest rank, rows of the fullest node) over their mean, by block that may route.

    All blocks share the mean of their draws unless the scenario states the load of its experts, because only
    a stated load says which layers are fuller.
    """
    scenario, job = pricer.scenario, pricer.job
    layers = sum(may_route(block.kind) for block in blocks)
    if not layers:
        return ()
    spec = load_spec(scenario, pricer.shape, job.layout, layers)
    loads = Draws(job, spec, layers, microbatches, pricer.received_rows).first_loads
    if loads is None:
        return [(1.0, 1.0)] * layers
    each = [
        part.max(axis=1).reshape(layers, microbatches).mean(axis=1) for part in (loads.rows, loads.node_rows)
    ]
    if scenario.routing.load is None:
        return [(float(each[0].mean()), float(each[1].mean()))] * layers
    return [(float(rows), float(node)) for rows, node in zip(*each, strict=True)]


def explicit_blocks(texts: Sequence[str], n_stages: int, shape: ModelShape) -> StageAssignment:
    """Stages from texts such as "embedding dense*3 moe" (kinds with a count).

    Raises InputError for another number of stages, an empty one, and a kind that the model does not have.
    """
    kinds = PLAIN_KINDS if shape.attentions is None else shape.block_kinds
    if len(texts) != n_stages:
        raise InputError(f"stages.blocks has {len(texts)} entries, but the schedule has {n_stages} stages")
    stages = []
    for number, text in enumerate(texts):
        stage: list[Block] = []
        for word in text.split():
            name, _, times = word.partition("*")
            if name not in kinds or not (times.isdigit() or not times) or len(times) > 4:
                raise InputError(
                    f"stages.blocks.{number}={text!r}: {word!r} is not a block; write {', '.join(kinds)}, "
                    "with a count such as moe*4"
                )
            stage.extend([Block(name)] * int(times or 1))
        if not stage:
            raise InputError(f"stages.blocks.{number} is empty: every stage needs a block")
        stages.append(tuple(stage))
    for number, blocks in enumerate(stages):
        for kind in dict.fromkeys(block.kind for block in blocks):
            try:
                shape.block(kind)
            except InputError:
                has = ", ".join(k for k in shape.block_kinds if shape.block(k).layer is not None)
                raise InputError(
                    f"stages.blocks.{number} names a {kind} block, but model {shape.name} has none; it has "
                    f"{has}, embedding and head"
                ) from None
    return StageAssignment(tuple(stages))


# -- plan memory -------------------------------------------------------------------------------------
# Computes the memory of a plan by pipeline rank, and that of the fullest GPU of a pool (pure).


def memory_of(
    scenario: Scenario,
    shape: ModelShape,
    cluster: Cluster,
    stages: StageAssignment,
    ranks: Sequence[RankStages],
    microbatches: int,
    schedule: Schedule | None = None,
) -> MemoryReport:
    """Memory of a scenario's plan for given stages, by kind and pipeline rank (eq. M1 to M5).

    `shape` and `cluster`: the scenario's model and cluster, already loaded. With a `schedule`, the steps of
    the fullest rank are also replayed through the allocator that `software.allocator` names (eq. M43).
    """
    inputs = MemoryInputs(
        shape,
        Layout(scenario.parallel, cluster.n_gpus, cluster.node.n_gpus),
        scenario.recipe,
        scenario.recompute,
        scenario.batch.sequence_length,
        scenario.communication.sms,
        scenario.communication.kernels,
        scenario.routing.redundant_experts,
        scenario.software,
        single_pass=len(ranks) == 1 and microbatches == 1,
    )
    report = memory_by_kind(inputs, stages, ranks, cluster.accelerator.hbm_bytes)
    if schedule is None or scenario.software.allocator == "none":
        return report
    peaks = replayed_peaks(inputs, stages, schedule, report.fullest_rank)
    if isinstance(peaks, str):
        return replace(report, notes=(*report.notes, f"the allocator's memory is not predicted: {peaks}"))
    error = REPLAY_ERRORS[scenario.software.allocator]
    return replace(report, allocator=peaks, replay_error=error)


def fullest_of(report: MemoryReport, ranks: Iterable[int]) -> MemoryResult:
    """Memory of the fullest GPU among some pipeline ranks."""
    rank = max(ranks, key=lambda r: (report.by_rank[r].total, -r))
    fullest = report.by_rank[rank]
    allocator = report.allocator if rank == report.fullest_rank else None
    slack = report.slack if allocator is None else report.replay_error or report.slack
    return MemoryResult(
        total_bytes=fullest.total,
        range_bytes=fullest.range(slack, allocator),
        capacity_bytes=report.capacity_bytes,
        fits=fullest.total <= report.capacity_bytes,
        by_kind_bytes=fullest.by_kind(),
        active_bytes=allocator.active if allocator else None,
        reserved_bytes=allocator.reserved if allocator else None,
    )
