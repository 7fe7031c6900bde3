"""Loads a scenario's model, cluster and profile once, and splits a fleet's job over its pools."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import fsum, gcd

from msgspec import Struct
from msgspec.structs import replace

from moesim.hwmodels.calibration import CalibrationProfile
from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.topologies import NetworkTier
from moesim.simulator.layout.parallel import Layout
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.machine import check_machine
from moesim.simulator.scenario.sections import Pool
from moesim.simulator.scenario.stated import is_stated
from moesim.simulator.schedules import Schedule, fleet_defaults


class ResolvedJob(Struct, frozen=True, dict=True):
    """A scenario with everything that it names loaded; the job of a fleet's pool has that pool's cluster."""

    scenario: Scenario
    shape: ModelShape
    cluster: Cluster
    profile: CalibrationProfile
    tiers: tuple[NetworkTier, ...] | None = None
    """Levels that limit the network in place of those of the cluster, as if some were not there."""

    @cached_property
    def layout(self) -> Layout:
        """Coordinates and groups of the ranks; raises InputError where the plan does not divide the GPUs."""
        return Layout(self.scenario.parallel, self.cluster.n_gpus, self.cluster.node.n_gpus)

    def with_scenario(self, scenario: Scenario) -> ResolvedJob:
        """Return the job with another plan, precision or software, on the same model, cluster and profile."""
        return replace(self, scenario=scenario)

    def with_rates(
        self, *, profile: CalibrationProfile | None = None, cluster: Cluster | None = None
    ) -> ResolvedJob:
        """Return the job with another profile, or with a cluster of the same GPUs and nodes."""
        return replace(self, profile=profile or self.profile, cluster=cluster or self.cluster)

    def changed_to(self, scenario: Scenario) -> ResolvedJob:
        """Return the job of another scenario, without loading again what both scenarios name alike.

        Raises InputError as `resolve` does.
        """
        own = self.scenario
        same_folder = scenario._base == own._base  # the same name may be another file in another folder
        same_rates = scenario.profile == own.profile and scenario.without_entries == own.without_entries
        job = ResolvedJob(
            scenario,
            self.shape if same_folder and scenario.model == own.model else scenario.shape,
            self.cluster if same_folder and scenario.cluster == own.cluster else scenario.machine,
            self.profile if same_folder and same_rates else scenario.calibration,
        )
        check_machine(scenario, job.cluster, job.profile)
        return job


class OfJob:
    """A part of a prediction that is made from one job, and gives what the job holds."""

    __slots__ = ()
    job: ResolvedJob

    @property
    def scenario(self) -> Scenario:
        """The scenario of the job."""
        return self.job.scenario

    @property
    def shape(self) -> ModelShape:
        """The model of the job."""
        return self.job.shape

    @property
    def cluster(self) -> Cluster:
        """The cluster of the job."""
        return self.job.cluster

    @property
    def profile(self) -> CalibrationProfile:
        """The calibration profile of the job."""
        return self.job.profile

    @property
    def layout(self) -> Layout:
        """Placement of the ranks of the job on GPUs."""
        return self.job.layout


def resolve(
    scenario: Scenario, profile: CalibrationProfile | None = None, *, shape: ModelShape | None = None
) -> ResolvedJob:
    """Load the model, cluster and profile that a scenario names.

    `profile` replaces the scenario's profile; `shape` is its model, if it was loaded already. Raises
    InputError for names and files that do not exist, for a fleet, for a dispatcher that nobody knows, and,
    all in one error, for the profile, formats, kernels and SMs that the accelerator does not have.
    """
    if scenario.serving is not None and not is_stated(scenario, "batch"):
        raise InputError(
            f"scenario {scenario.name} says how the model is served, not how it is trained: state parallel "
            "and batch for a training step, or use `moesim serve simulate`"
        )
    shape, cluster = shape or scenario.shape, scenario.machine
    chosen = scenario.calibration if profile is None else profile
    check_machine(scenario, cluster, chosen)
    return ResolvedJob(scenario, shape, cluster, chosen)


# -- pools -------------------------------------------------------------------------------------------
# Splits the pipeline ranks of a job over the pools of its fleet, each with a cluster to price on (pure).


class PoolSlice(Struct, frozen=True):
    """One pool with its cluster and pipeline ranks.

    `scenario` is the job as if the whole pipeline ran on GPUs of this pool's kind.
    """

    label: str
    cluster: Cluster
    scenario: Scenario
    ranks: range


def split_over_pools(scenario: Scenario) -> tuple[PoolSlice, ...]:
    """Assign pipeline ranks to the pools of a scenario's fleet, in proportion to their GPUs.

    Raises InputError for keys that are not modelled on a fleet, and where the ranks do not divide.
    """
    check_supported(scenario)
    clusters = pool_clusters(scenario)
    total, pp = sum(cluster.n_gpus for _, cluster in clusters), scenario.parallel.pp
    unit = rank_unit([cluster for _, cluster in clusters])
    if pp % unit:
        below = pp - pp % unit
        near = tuple(n for n in (below, below + unit) if n)
        held = " + ".join(f"{cluster.n_gpus:,} x {cluster.accelerator.name}" for _, cluster in clusters)
        raise InputError(
            f"parallel.pp={pp} does not spread over the fleet of {held} GPUs: every pipeline rank has "
            f"the same number of GPUs, of one pool, so parallel.pp is a multiple of {unit}; take "
            f"{' or '.join(map(str, near))}, or change fleet.pools.*.nodes",
            key="parallel.pp",
            nearest=near,
        )
    parts, first = [], 0
    for (label, cluster), pool in zip(clusters, pools_of(scenario), strict=True):
        ranks = range(first, first + pp * cluster.n_gpus // total)
        parts.append(PoolSlice(label, cluster, pricing_scenario(scenario, pool, cluster, total), ranks))
        first = ranks.stop
    return tuple(parts)


def pools_of(scenario: Scenario) -> tuple[Pool, ...]:
    """The pools of a scenario; raises InputError where it has no fleet."""
    if scenario.fleet is None:
        raise InputError(f"scenario {scenario.name} has no fleet: give fleet.pools")
    return scenario.fleet.pools


def pool_clusters(scenario: Scenario) -> list[tuple[str, Cluster]]:
    """Label and cluster of each pool; raises InputError for unknown clusters and nodes that do not divide."""
    pools_of(scenario)
    labelled = [
        (f"fleet.pools.{number} ({cluster.accelerator.name})", cluster)
        for number, cluster in enumerate(scenario.machines)
    ]
    for label, cluster in labelled:
        total, node = sum(other.n_gpus for _, other in labelled), cluster.node.n_gpus
        if total % node:
            raise InputError(
                f"{label}: the fleet's {total} GPUs do not fill its nodes of {node}; change nodes of a pool"
            )
    return labelled


def rank_unit(clusters: Sequence[Cluster]) -> int:
    """Least number of pipeline ranks that splits over the clusters; legal numbers are its multiples."""
    return sum(cluster.n_gpus for cluster in clusters) // gcd(*(cluster.n_gpus for cluster in clusters))


def legal_pipelines(clusters: Sequence[Cluster], most: int) -> tuple[int, ...]:
    """Numbers of pipeline ranks up to `most` that give every rank the same number of GPUs, of one pool."""
    unit, common = rank_unit(clusters), gcd(*(cluster.n_gpus for cluster in clusters))
    return tuple(unit * times for times in range(1, most // unit + 1) if common % times == 0)


def usd_per_hour(clusters: Sequence[Cluster]) -> float | None:
    """Rent of all pools for an hour (USD); None where one has no price."""
    prices = [(cluster.n_gpus, cluster.price_per_gpu_hour) for cluster in clusters]
    if any(price is None for _, price in prices):
        return None
    return fsum(n * price.value for n, price in prices if price is not None)


def pricing_scenario(scenario: Scenario, pool: Pool, cluster: Cluster, total: int) -> Scenario:
    """Return the scenario on `total` GPUs of one pool's kind, which prices the ranks of this pool."""
    communication = scenario.communication.model_copy(update={"sms": scenario.pool_sms(pool, cluster)})
    # Not validated again, because this cluster serves for pricing only and its network is never built.
    whole = cluster.model_copy(update={"nodes": total // cluster.node.n_gpus})
    update = {"fleet": None, "cluster": whole, "communication": communication}
    part = scenario.model_copy(update={**update, "profile": scenario.pool_profile(pool, cluster)})
    return part if scenario._base is None else part.based_on(scenario._base)


def pool_of_ranks(parts: Sequence[PoolSlice]) -> tuple[int, ...]:
    """Number of the pool that holds each pipeline rank."""
    return tuple(number for number, part in enumerate(parts) for _ in part.ranks)


def check_schedule(schedule: Schedule, owners: Sequence[int], labels: Sequence[str]) -> None:
    """Raise InputError where two pools would hold copies of one stage."""
    for stage, holders in enumerate(zip(*schedule.routes, strict=True)):
        pools = sorted({owners[rank] for rank in holders})
        if len(pools) > 1:
            raise InputError(
                f"schedule={schedule.name} keeps stage {stage} on pipeline ranks "
                f"{' and '.join(map(str, sorted(holders)))}, on {labels[pools[0]]} and {labels[pools[1]]}: "
                "its gradients would be reduced between pools, which is not modelled; use a schedule that "
                f"keeps every stage on one rank, such as {', '.join(reversed(fleet_defaults()))}",
                key="schedule",
                nearest=tuple(reversed(fleet_defaults())),
            )


def check_supported(scenario: Scenario) -> None:
    """Raise InputError for keys of a scenario that are not modelled on a fleet."""
    if scenario.resolution == "full":
        raise InputError(
            "resolution=full needs one cluster: a fleet's pools have no network between them; use "
            "resolution: folded",
            key="resolution",
            nearest=("folded",),
        )
    if scenario.faults:
        raise InputError(
            "faults need every GPU simulated for itself (resolution: full), which a fleet does not have; "
            "leave faults out"
        )
    if scenario.stages.blocks is not None:
        raise InputError(
            "stages.blocks fixes a part of the model; a fleet takes the whole: give stages.layers, or leave "
            "stages out and layers are balanced over the pools"
        )
    if scenario.run.asks_for_more:
        raise InputError(
            "run: ramps, phases, checkpoints, failures, spares and prices are not modelled for a fleet; give "
            f"run: {{tokens: {scenario.run.tokens:g}}}"
        )
