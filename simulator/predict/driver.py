"""The driver from a scenario to a result, which all callers use: resolve, compile, execute, summarise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moesim.hwmodels.calibration import CalibrationProfile
from moesim.simulator.common.garbage import without_cyclic_collection
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
    """A result with the prepared step and the executions, one a program, behind it."""

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
    """Predict one training step and the run that consists of such steps, on one cluster or on a fleet.

    `what`: a scenario or a resolved job. `profile` and `stages` replace those of the scenario. `engine`: a
    name in `engine.registry.ENGINES`; that engine also runs the additional steps for faults and phases of the
    run. Raises InputError for an illegal scenario, InfeasibleError where faults leave no way to end a step. A
    plan that does not fit into memory is still predicted, with `memory.fits` false. For a caller that needs
    seconds only, `predict.step.run_step` does the same without the result.
    """
    with without_cyclic_collection():
        return finish(prepare(what, profile=profile, stages=stages, engine=engine))


def finish(prepared: Prepared) -> Prediction:
    """Execute and summarise a prepared step. Raises InfeasibleError as `predict` does."""
    step = execute(prepared)
    return Prediction(prepared, step.executions, summarise(step))
