"""Loads the model, cluster and calibration profile of a scenario once, for every later step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from moesim.hwmodels.calibration import CalibrationProfile
from moesim.hwmodels.cluster import Cluster
from moesim.simulator.layout.parallel import Layout
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.machine import check_machine


@dataclass(frozen=True)
class ResolvedJob:
    """A scenario with everything that it names loaded; the job of a fleet's pool has that pool's cluster."""

    scenario: Scenario
    shape: ModelShape
    cluster: Cluster
    profile: CalibrationProfile

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
    shape, cluster = shape or scenario.shape, scenario.machine
    chosen = scenario.calibration if profile is None else profile
    check_machine(scenario, cluster, chosen)
    return ResolvedJob(scenario, shape, cluster, chosen)
