"""Prepares and executes one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moesim.hwmodels.calibration import CalibrationProfile
from moesim.simulator.common.garbage import without_cyclic_collection
from moesim.simulator.engine.records import Execution, step_time_s
from moesim.simulator.layout.job import ResolvedJob
from moesim.simulator.layout.stages import StageAssignment
from moesim.simulator.predict.compile import prepare
from moesim.simulator.predict.prepared import Prepared
from moesim.simulator.scenario import Scenario


@dataclass(frozen=True, slots=True)
class ExecutedStep:
    """A prepared step with the executions, one a program, that the engine returned."""

    prepared: Prepared
    executions: Sequence[Execution]

    @property
    def time_s(self) -> float:
        """Seconds of the step."""
        return step_time_s(self.executions)


def execute(prepared: Prepared) -> ExecutedStep:
    """Run a prepared step on its engine."""
    return ExecutedStep(prepared, prepared.engine.execute(prepared.programs))


def run_step(
    what: Scenario | ResolvedJob,
    *,
    profile: CalibrationProfile | None = None,
    stages: StageAssignment | None = None,
    engine: str | None = None,
) -> ExecutedStep:
    """Prepare and run a step, for callers that need its seconds and memory but no result.

    Takes the arguments and raises the errors of `prepare`; raises InfeasibleError where faults leave no way
    to end a step.
    """
    with without_cyclic_collection():
        return execute(prepare(what, profile=profile, stages=stages, engine=engine))
