"""A scenario as torchtitan sees it: facts of the plan, release, flavor, and what it cannot express."""

from __future__ import annotations

from dataclasses import dataclass

from moesim.simulator.scenario import Scenario
from moesim.simulator.trainers.export import unwritten
from moesim.simulator.trainers.facts import PlanFacts, facts_of
from moesim.simulator.trainers.torchtitan.flavors import flavor_of
from moesim.simulator.trainers.torchtitan.releases import TitanRelease, release_of
from moesim.simulator.trainers.torchtitan.rules import problems
from moesim.simulator.trainers.torchtitan.settings import unspelled

WRITTEN = (
    "software.attention", "software.compiled_blocks", "software.dropout", "software.kernels",
    "software.overlap_data_parallel",
)  # fmt: skip
"""Keys of `export.SETTINGS` that the configuration holds, that the rules judge, or that FSDP always does."""

LOSSES = ("compiled", "eager")
"""Values of `software.loss` that the section `compile` of torchtitan makes."""


@dataclass(frozen=True, slots=True)
class TitanPlan:
    """A plan for one release; `family` and `flavor` are None for a model that torchtitan does not ship."""

    plan: PlanFacts
    release: TitanRelease
    family: str | None
    flavor: str | None
    missing: tuple[str, ...]
    """What the release cannot run, and what no field expresses."""


def titan_plan(scenario: Scenario, version: str) -> TitanPlan:
    """The plan of a scenario for a release of torchtitan.

    Raises InputError for a model or cluster that cannot be loaded, a fleet and an unknown release.
    """
    if scenario.fleet is not None:
        raise scenario.needs_one_cluster()
    plan, release = facts_of(scenario), release_of(version)
    flavor = flavor_of(plan.shape, version)
    family = None if flavor is None else flavor.family
    written = (*WRITTEN, "software.loss") if plan.software.loss in LOSSES else WRITTEN
    further = unwritten(scenario, written, f"torchtitan {version}")
    missing = (*problems(plan, version), *unspelled(plan, release, family), *further)
    return TitanPlan(plan, release, family, None if flavor is None else flavor.name, missing)
