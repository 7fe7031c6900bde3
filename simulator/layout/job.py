"""A scenario with its model, cluster and calibration profile loaded once; nothing above reads them again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from moesim.hwmodels.calibration import CalibrationProfile
from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.profile_choice import fitting_profiles
from moesim.simulator.layout.parallel import Layout
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario import Scenario


@dataclass(frozen=True)
class ResolvedJob:
    """What a prediction is made from. The cluster of a fleet's job is that of one of its pools."""

    scenario: Scenario
    shape: ModelShape
    cluster: Cluster
    profile: CalibrationProfile

    @cached_property
    def layout(self) -> Layout:
        """Where the ranks stand; raises InputError where the plan does not divide the GPUs."""
        return Layout(self.scenario.parallel, self.cluster.n_gpus, self.cluster.node.n_gpus)

    def with_scenario(self, scenario: Scenario) -> ResolvedJob:
        """The same model on the same machine under another plan, precision or software."""
        return replace(self, scenario=scenario)

    def with_rates(
        self, *, profile: CalibrationProfile | None = None, cluster: Cluster | None = None
    ) -> ResolvedJob:
        """The same plan at the rates of another profile, or of a cluster with the same GPUs and nodes."""
        return replace(self, profile=profile or self.profile, cluster=cluster or self.cluster)

    def changed_to(self, scenario: Scenario) -> ResolvedJob:
        """The job of another scenario; what both name alike is not loaded again.

        Raises InputError as `resolve` does.
        """
        own = self.scenario
        beside = scenario._base == own._base  # the same name may be another file from another folder
        job = ResolvedJob(
            scenario,
            self.shape if beside and scenario.model == own.model else scenario.shape,
            self.cluster if beside and scenario.cluster == own.cluster else scenario.machine,
            self.profile if beside and scenario.profile == own.profile else scenario.calibration,
        )
        check_profile(job.profile, job.cluster)
        return job


def resolve(
    scenario: Scenario, profile: CalibrationProfile | None = None, *, shape: ModelShape | None = None
) -> ResolvedJob:
    """Load what a scenario names; `profile`, where given, takes the place of the scenario's.

    `shape`: its model, where that is loaded already.

    Raises InputError for names and files that do not exist, for a fleet, and for a profile of another
    accelerator.
    """
    shape, cluster = shape or scenario.shape, scenario.machine
    chosen = scenario.calibration if profile is None else profile
    check_profile(chosen, cluster)
    return ResolvedJob(scenario, shape, cluster, chosen)


def check_profile(profile: CalibrationProfile, cluster: Cluster) -> None:
    """Raise InputError where a profile of one accelerator would price another."""
    accelerator = cluster.accelerator.name
    if profile.accelerator == "any" or accelerator in (profile.accelerator, *profile.also_for):
        return
    fitting = fitting_profiles(accelerator)
    raise InputError(
        f"profile={profile.name} was taken on {profile.accelerator}, but the cluster has {accelerator}; use "
        f"{' or '.join(fitting)} (the last one prices from datasheet peaks)",
        key="profile",
        nearest=fitting,
    )
