"""The model, machines and plan of a prediction in words; of a kept prediction without pricing it again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from pathlib import Path
from textwrap import wrap

from moesim.hwmodels.cluster import Cluster
from moesim.simulator.layout.parallel import Layout, microbatches
from moesim.simulator.predict.prepared import Prepared
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.inputs import WIDTH, inputs_of


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """What a printed prediction says about its scenario."""

    scenario: Scenario
    model: str
    clusters: tuple[Cluster, ...]
    dp: int
    schedule: str
    microbatches: int

    @property
    def peak_flop_per_s(self) -> float:
        """BF16 peak of one GPU, averaged over all GPUs."""
        if len(self.clusters) == 1:
            return self.clusters[0].accelerator.peak_flop_per_s("bf16")
        gpus = sum(cluster.n_gpus for cluster in self.clusters)
        return fsum(c.n_gpus * c.accelerator.peak_flop_per_s("bf16") for c in self.clusters) / gpus

    @property
    def headline(self) -> str:
        """Name, model, GPUs, source, overrides and plan, in lines of at most 80 columns."""
        machines = " + ".join(f"{c.n_gpus:,} x {c.accelerator.title}" for c in self.clusters)
        title = f"{self.scenario.name}: {self.model} on {machines}, {self.microbatches:,} micro-batches"
        lines = wrap(title, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        return "\n".join([*lines, *inputs_of(self.scenario).lines()])


def summary_of_prepared(prepared: Prepared) -> PlanSummary:
    """The summary of a prepared scenario."""
    clusters = tuple(pool.part.cluster for pool in prepared.pools)
    schedule = prepared.schedule
    return _summary(prepared.scenario, prepared.shape.name, clusters, prepared.layout, schedule.name)


def summary_of_kept(scenario: Scenario) -> PlanSummary:
    """The summary of a scenario on one cluster that was predicted before; loads only model and cluster."""
    cluster = scenario.machine
    layout = Layout(scenario.parallel, cluster.n_gpus, cluster.node.n_gpus)
    name = scenario.schedule
    if name.lower().endswith(".csv"):
        name = Path(scenario.path(name)).stem
    return _summary(scenario, scenario.shape.name, (cluster,), layout, name)


def _summary(
    scenario: Scenario, model: str, clusters: Sequence[Cluster], layout: Layout, schedule: str
) -> PlanSummary:
    count = microbatches(layout, scenario.batch.sequences)
    return PlanSummary(scenario, model, tuple(clusters), layout.dp, schedule, count)
