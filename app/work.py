"""What job processes run: functions of plain arguments, found by name, over the public API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import moesim
import moesim.simulator.neighbours
import moesim.simulator.planner.search
import moesim.simulator.simulate
import moesim.simulator.study.uncertainty
import moesim.simulator.timeline
from moesim.app.exports import trace_bytes
from moesim.hwmodels import load_cluster
from moesim.hwmodels.calibration import fitting_profiles
from moesim.hwmodels.confidence import best_profile
from moesim.simulator.check import Check
from moesim.simulator.neighbours import Neighbour
from moesim.simulator.planner.result import PlanResult
from moesim.simulator.result import Result
from moesim.simulator.scenario import Scenario
from moesim.simulator.study import kept
from moesim.simulator.study.sensitivity import Sensitivity
from moesim.simulator.timeline import Timeline

Progress = Callable[[float | None, str], None]


def simulate(scenario: Scenario) -> Result:
    """One predicted step, without prices; kept on disk, where the command line finds it."""
    return kept.predict_unpriced(scenario)


def check(scenario: Scenario) -> Check:
    """Legality and memory."""
    return moesim.check(scenario)


def timeline(scenario: Scenario, rank: int) -> Timeline:
    """What ran when."""
    return moesim.timeline(scenario, rank=rank)


def trace(scenario: Scenario) -> bytes:
    """A Perfetto trace."""
    return trace_bytes(scenario)


def neighbours(scenario: Scenario, result: Result, progress: Progress) -> tuple[Neighbour, ...]:
    """What to try next."""
    return moesim.neighbours(scenario, result, progress)


def profiles(cluster: str) -> tuple[str, list[str]]:
    """The best shipped calibration profile for a cluster, and all that fit it."""
    accelerator = load_cluster(cluster).accelerator
    return best_profile(accelerator)[1], fitting_profiles(accelerator.name)


def interval(scenario: Scenario) -> Result:
    """The same prediction with P10, P50 and P90 of its figures."""
    return kept.predict_unpriced(scenario, uncertainty=True)


def sensitivity(scenario: Scenario) -> Sensitivity:
    """The tornado."""
    return moesim.sensitivity(scenario)


def plan(
    scenario: Scenario, space: dict[str, Any], options: dict[str, Any], progress: Progress
) -> PlanResult:
    """Search for a better plan; `space` holds the keys of a PlanSpace."""
    return moesim.plan(
        scenario,
        space=moesim.PlanSpace(**space),
        workers=1,
        progress=lambda text: progress(None, text),
        **options,
    )
