"""Functions that job processes run; they take plain arguments, are found by name and use the public API."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import moesim
import moesim.simulator.planner.search
import moesim.simulator.predict.simulate
import moesim.simulator.studies.compare
import moesim.simulator.studies.neighbours
import moesim.simulator.studies.uncertainty
from moesim.app import budget, uploads
from moesim.app.components.timeline.packing import PackedStep, packed_step
from moesim.app.exports import trace_bytes
from moesim.hwmodels import load_cluster
from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.confidence import best_profile
from moesim.hwmodels.files import READ_BELOW
from moesim.hwmodels.profile_choice import fitting_profiles
from moesim.hwmodels.topologies import Inventory
from moesim.hwmodels.topologies.picture import Picture, picture
from moesim.simulator.planner.result import PlanResult
from moesim.simulator.predict.check import Check
from moesim.simulator.predict.result import Result
from moesim.simulator.predict.step_events import step_events
from moesim.simulator.scenario import Scenario
from moesim.simulator.studies import result_cache
from moesim.simulator.studies.engine_draws import DRAWS
from moesim.simulator.studies.neighbours import Neighbour
from moesim.simulator.studies.sensitivity import Sensitivity

Progress = Callable[[float | None, str], None]


@dataclass(frozen=True, slots=True)
class Drawing:
    """A cluster's topology: its picture, its parts, its kind and how many GPUs it joins."""

    picture: Picture
    inventory: Inventory
    kind: str
    n_gpus: int


def read_scenario(folder: str, name: str, texts: tuple[str, ...]) -> Scenario:
    """The scenario of a link, with uploads in `folder`; raises InputError above the dashboard's limits."""
    _read_below(folder)
    return budget.admit(uploads.scenario_of(name, texts))


def read_upload(folder: str, kind: str, name: str, data: bytes) -> uploads.Kept:
    """Check an upload and store it in `folder`."""
    _read_below(folder)
    kept_file = uploads.accept(kind, name, data)
    if isinstance(kept_file.content, Scenario):
        budget.admit(kept_file.content)
    return kept_file


def _read_below(folder: str) -> None:
    """From now on this process reads no file by path except uploads."""
    os.environ[READ_BELOW] = folder


def topology(scenario: Scenario) -> Drawing:
    """The picture of the cluster and its parts."""
    found = scenario.machine.topology()
    found.check_size(budget.DRAWN_PARTS)
    return Drawing(picture(found), found.inventory(), found.kind, found.n_gpus)


def simulate(scenario: Scenario) -> Result:
    """One predicted step, without prices; it is stored on disk, where the command line finds it."""
    return result_cache.predict_unpriced(budget.admit(scenario))


def check(scenario: Scenario) -> Check:
    """Check whether the plan is legal and fits into memory."""
    return moesim.check(budget.admit(scenario))


def timeline(scenario: Scenario, rank: int) -> PackedStep:
    """The events of a step as bytes; of a step with very many, the phases of one pipeline rank."""
    return packed_step(step_events(budget.admit(scenario)), rank)


def trace(scenario: Scenario) -> bytes:
    """A Perfetto trace of the step."""
    return trace_bytes(budget.admit(scenario, trace=True))


def neighbours(scenario: Scenario, result: Result, progress: Progress) -> tuple[Neighbour, ...]:
    """Single changes to try next, each simulated."""
    return moesim.neighbours(budget.admit(scenario), result, progress)


def profiles(cluster: str) -> tuple[str, list[str]]:
    """(best shipped calibration profile for a cluster, all that fit it)."""
    accelerator = load_cluster(cluster).accelerator
    return best_profile(accelerator)[1], fitting_profiles(accelerator.name)


def interval(scenario: Scenario) -> Result:
    """The same prediction with P10, P50 and P90 of its figures."""
    return result_cache.predict_unpriced(budget.admit(scenario), uncertainty=True)


def interval_by_engine(scenario: Scenario, progress: Progress) -> Result:
    """The same prediction with the intervals of 200 engine runs beside the first-order ones."""

    def say(done: int, draws: int) -> None:
        progress(done / draws, f"{done} of {draws} engine runs")

    return result_cache.predict_unpriced(
        budget.admit(scenario), uncertainty=True, engine_draws=DRAWS, workers=1, say=say
    )


def relative_draws(scenario: Scenario) -> FloatArray:
    """Random draws of the step time, each divided by the predicted step time."""
    return moesim.simulator.studies.compare.relative_draws(scenario)


def sensitivity(scenario: Scenario) -> Sensitivity:
    """The step time with each uncertain input alone at its low and high end (the tornado chart)."""
    return moesim.sensitivity(budget.admit(scenario))


def plan(
    scenario: Scenario, space: dict[str, Any], options: dict[str, Any], progress: Progress
) -> PlanResult:
    """Search for a better plan; `space` holds the keys of a PlanSpace."""
    return moesim.plan(
        budget.admit(scenario),
        space=moesim.PlanSpace(**space),
        workers=1,
        progress=progress,
        **options,
    )
