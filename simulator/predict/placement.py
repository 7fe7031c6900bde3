"""Assigns blocks to pipeline stages, as the scenario states or balanced by compute."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import fsum

from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InputError
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.layout.parallel import Layout
from moesim.simulator.layout.stages import Block, StageAssignment, balanced, blocks_of, from_layers_per_stage
from moesim.simulator.memory.fsdp2 import replayed_peaks
from moesim.simulator.memory.gpu import REPLAY_ERRORS, MemoryInputs, MemoryReport, RankStages, memory_by_kind
from moesim.simulator.model.block import PLAIN_KINDS
from moesim.simulator.model.operator import BlockKind
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.predict.result_parts import MemoryResult
from moesim.simulator.scenario import Scenario
from moesim.simulator.schedules.action import Schedule


def assign_stages(scenario: Scenario, pricer: Pricer, schedule: Schedule) -> StageAssignment:
    """Stages as the scenario states, or balanced by the compute of one micro-batch on all SMs (eq. S1).

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
    weight = {kind: block_seconds(pricer, kind) for kind in sorted({block.kind for block in blocks})}
    # Both ends of a bidirectional pipeline are on one rank, where an end without layers hides no transfers.
    ends_alone = len(schedule.routes) == 1
    weights = [weight[block.kind] for block in blocks]
    return balanced(blocks, weights, schedule.n_stages, ends_alone=ends_alone)


def block_seconds(pricer: Pricer, kind: BlockKind) -> float:
    """Compute seconds of one micro-batch of a block, alone on all SMs (eq. S1)."""
    costs = [pricer.phase(kind, phase, "alone") for phase in pricer.operators(kind)]
    return fsum(cost.fixed_s + cost.row_s for cost in costs)


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
