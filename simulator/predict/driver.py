"""The one way from a scenario to a result: resolve, compile, execute, summarise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moesim.hwmodels.calibration import CalibrationProfile
from moesim.simulator.engine.records import Execution
from moesim.simulator.layout.job import ResolvedJob
from moesim.simulator.layout.stages import StageAssignment
from moesim.simulator.predict.compile import prepare
from moesim.simulator.predict.prepared import Prepared
from moesim.simulator.predict.result import Result
from moesim.simulator.predict.step import execute
from moesim.simulator.predict.summarise import summarise
from moesim.simulator.scenario import Scenario


class Prediction(NamedTuple):
    """A result with what it was made from: the prepared step, and one execution a program."""

    prepared: Prepared
    executions: Sequence[Execution]
    result: Result


def predict(
    what: Scenario | ResolvedJob,
    *,
    profile: CalibrationProfile | None = None,
    stages: StageAssignment | None = None,
    engine: str | None = None,
) -> Prediction:
    """Predict one training step and the run made of it, on one cluster or on a fleet.

    `what`: a scenario, or a job that was resolved before. `profile` and `stages`, where given, take the place
    of the scenario's. `engine`: a name of `engine.registry.ENGINES`, which also runs the steps that faults
    and phases of the run need. Raises InputError for an illegal scenario, InfeasibleError where faults leave
    no way to end a step. A plan that does not fit into memory is predicted all the same, with `memory.fits`
    false. `predict.step.run_step` does the same without the result, for those who need seconds only.
    """
    return finish(prepare(what, profile=profile, stages=stages, engine=engine))


def finish(prepared: Prepared) -> Prediction:
    """Execute and summarise a prepared step. Raises InfeasibleError as `predict` does."""
    step = execute(prepared)
    return Prediction(prepared, step.executions, summarise(step))
