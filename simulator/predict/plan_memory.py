"""Computes the memory of a plan by pipeline rank, and that of the fullest GPU of a pool (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from moesim.hwmodels.cluster import Cluster
from moesim.simulator.layout.memory import (
    REPLAY_ERRORS,
    MemoryInputs,
    MemoryReport,
    RankStages,
    memory_by_kind,
)
from moesim.simulator.layout.parallel import Layout
from moesim.simulator.layout.stages import StageAssignment
from moesim.simulator.layout.step_replay import replayed_peaks
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.predict.result_parts import MemoryResult
from moesim.simulator.scenario import Scenario
from moesim.simulator.schedules.schedule import Schedule


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
