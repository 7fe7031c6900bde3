"""Computes the memory of a plan by pipeline rank, and that of the fullest GPU of a pool (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moesim.hwmodels.cluster import Cluster
from moesim.simulator.layout.memory import MemoryInputs, MemoryReport, RankStages, memory_by_kind
from moesim.simulator.layout.parallel import Layout
from moesim.simulator.layout.stages import StageAssignment
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.predict.result_parts import MemoryResult
from moesim.simulator.scenario import Scenario


def memory_of(
    scenario: Scenario,
    shape: ModelShape,
    cluster: Cluster,
    stages: StageAssignment,
    ranks: Sequence[RankStages],
    microbatches: int,
) -> MemoryReport:
    """Memory of a scenario's plan for given stages, by kind and pipeline rank (eq. M1 to M5).

    `shape` and `cluster`: the scenario's model and cluster, already loaded.
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
    return memory_by_kind(inputs, stages, ranks, cluster.accelerator.hbm_bytes)


def fullest_of(report: MemoryReport, ranks: Iterable[int]) -> MemoryResult:
    """Memory of the fullest GPU among some pipeline ranks."""
    rank = max(ranks, key=lambda r: (report.by_rank[r].total, -r))
    fullest = report.by_rank[rank]
    return MemoryResult(
        total_bytes=fullest.total,
        range_bytes=fullest.range,
        capacity_bytes=report.capacity_bytes,
        fits=fullest.total <= report.capacity_bytes,
        by_kind_bytes=fullest.by_kind(),
    )
