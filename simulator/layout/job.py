"""Loads the model, cluster and calibration profile of a scenario once, for every later step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from moesim.hwmodels.calibration import CalibrationProfile
from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.profile_choice import fitting_profiles
from moesim.simulator.layout.parallel import Layout
from moesim.simulator.model.precision import Precision
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario import Scenario


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
        check_profile(job.profile, job.cluster)
        check_precision(scenario.recipe, job.cluster)
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
    InputError for names and files that do not exist, for a fleet, and for a profile of another accelerator.
    """
    shape, cluster = shape or scenario.shape, scenario.machine
    chosen = scenario.calibration if profile is None else profile
    check_profile(chosen, cluster)
    check_precision(scenario.recipe, cluster)
    return ResolvedJob(scenario, shape, cluster, chosen)


def check_precision(recipe: Precision, cluster: Cluster) -> None:
    """Raise InputError for scales by blocks (NVFP4, MXFP8) on tensor cores that do not apply them.

    These are the tensor cores that have FP4.
    """
    accelerator = cluster.accelerator
    if not recipe.blocks or "fp4" in accelerator.peak:
        return
    what = "linear=fp4" if recipe.linear == "fp4" else "scaling=mx"
    nearest = ("linear: fp8, scaling: tensor",) if "fp8" in accelerator.peak else ("linear: bf16",)
    raise InputError(
        f"precision.{what}: the tensor cores of {accelerator.name} do not apply scales of 16 or 32 elements; "
        f"it has {', '.join(sorted(accelerator.peak))}: write {nearest[0]}, or choose an accelerator with "
        "fp4, such as b200-sxm",
        key="precision",
        nearest=nearest,
    )


def check_profile(profile: CalibrationProfile, cluster: Cluster) -> None:
    """Raise InputError for a profile that does not apply to the cluster's accelerator."""
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
