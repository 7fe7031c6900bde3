"""Repairs a plan: the legal plans that fit and change the fewest keys of a scenario, fastest first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Any

from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.simulator.common.garbage import without_cyclic_collection
from moesim.simulator.layout.job import resolve
from moesim.simulator.planner.engine_stage import simulated
from moesim.simulator.planner.goal import Goal
from moesim.simulator.planner.placements import IN_ORDER
from moesim.simulator.planner.progress import OnProgress, no_progress
from moesim.simulator.planner.result import PlanRow
from moesim.simulator.planner.rows import PlanStep, scenario_of
from moesim.simulator.planner.space import PlanSpace, Space, with_defaults
from moesim.simulator.planner.variant_search import VariantSearch
from moesim.simulator.scenario import Scenario
from moesim.simulator.schedules import SCHEDULES

REPAIRED = ("pp", "ep", "tp", "cp", "zero_stage", "recompute", "microbatch", "schedule", "vpp")
"""Keys of a plan that a repair may change; precision, communication SMs and placement keep their values."""

MOST_CHANGES = 3
"""Most keys that are changed together before a search of the whole space is the better question."""


@dataclass(frozen=True, slots=True)
class Repair:
    """A legal plan that fits, and the keys of the plan that it changes: (key, before, after)."""

    row: PlanRow
    changes: tuple[tuple[str, object, object], ...]


def nearest_plans(
    scenario: Scenario, most: int = 3, progress: OnProgress | None = None
) -> tuple[Repair, ...]:
    """Find the legal plans that fit and differ from the scenario's own in the fewest keys, fastest first.

    Plans with one changed key are tried before those with two, and these before those with three; layers
    are balanced over the stages anew. At most `most` plans with the same number of changes are simulated and
    returned. `progress` gets the share of the work and a text. Raises InputError for a fleet, and
    InfeasibleError where no change of up to three keys gives a legal plan that fits.
    """
    if scenario.fleet is not None:
        raise InputError("a repair changes the plan of one cluster; a fleet has several: use moesim plan")
    say = progress or no_progress
    goal = Goal(top=most)
    goal.check(scenario)
    job = resolve(scenario)
    whole = with_defaults(PlanSpace(), scenario, job.shape, job.cluster)
    own = own_plan(scenario)
    with without_cyclic_collection():
        for count in range(1, MOST_CHANGES + 1):
            found: list[tuple[float, int, VariantSearch]] = []
            keys = list(combinations(REPAIRED, count))
            for number, free in enumerate(keys):
                share = (count - 1 + number / len(keys)) / MOST_CHANGES
                say(share, f"plans that change {' and '.join(free)}")
                found += _with_free(scenario, goal, _space(scenario, whole, own, free))
            repairs = list(islice(_simulated(scenario, own, found), most))
            if repairs:
                say(1.0, f"{len(repairs)} plans fit")
                return tuple(sorted(repairs, key=lambda repair: repair.row.time_s))
    raise InfeasibleError(
        f"no change of up to {MOST_CHANGES} keys ({', '.join(REPAIRED)}) gives a legal plan that fits into "
        f"{job.cluster.n_gpus:,} x {job.cluster.accelerator.name}; use more GPUs, or search the whole space "
        "(moesim plan)"
    )


def own_plan(scenario: Scenario) -> dict[str, Any]:
    """The scenario's own values of the keys that a repair may change."""
    own = {key: getattr(scenario.parallel, key) for key in REPAIRED if hasattr(scenario.parallel, key)}
    return {**own, "recompute": scenario.recompute, "schedule": scenario.schedule}


def _space(scenario: Scenario, whole: Space, own: Mapping[str, Any], free: Sequence[str]) -> PlanSpace | None:
    """The plans in which exactly the free keys differ from the scenario's own; None where there are none."""
    values = {
        key: tuple(value for value in getattr(whole, key) if value != own[key])
        if key in free
        else (own[key],)
        for key in REPAIRED
    }
    if not all(values.values()) or not set(values["schedule"]) <= set(SCHEDULES):
        return None
    return PlanSpace(
        **values,
        precision=(scenario.precision,),
        sms=(scenario.communication.sms,),
        expert_tp=(scenario.parallel.expert_tp,),
        placement=(scenario.routing.eplb or IN_ORDER,),
    )


def _with_free(
    scenario: Scenario, goal: Goal, space: PlanSpace | None
) -> Iterator[tuple[float, int, VariantSearch]]:
    """The fastest plans of a space that fit, as (seconds in closed form, number, search)."""
    if space is None:
        return
    try:
        search = VariantSearch({}, scenario, space, goal, no_progress)
        if len(search.candidates.bound):
            search.explore(None, no_progress)
    except (InputError, InfeasibleError):
        return
    for number in search.chosen:
        yield float(search.candidates.time_s[number]), number, search


def _simulated(
    scenario: Scenario, own: Mapping[str, Any], found: Sequence[tuple[float, int, VariantSearch]]
) -> Iterator[Repair]:
    """The plans that fit in the engine too, fastest in closed form first."""
    for _, number, search in sorted(found, key=lambda item: item[:1]):
        candidate = scenario_of(scenario, search.candidates, number)
        step = simulated(candidate)
        if isinstance(step, PlanStep) and step.keeps(search.headroom):
            changes = ((key, own[key], after) for key, after in own_plan(candidate).items())
            yield Repair(
                search.row(number, step), tuple(change for change in changes if change[1] != change[2])
            )
