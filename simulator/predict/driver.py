"""The driver from a scenario to a result, which all callers use: resolve, compile, execute, summarise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import ref

from pydantic import BaseModel, ConfigDict

from moesim.hwmodels.calibration import CalibrationProfile
from moesim.simulator.common.processes import without_cyclic_collection
from moesim.simulator.engine.records import Execution
from moesim.simulator.layout.job import ResolvedJob
from moesim.simulator.layout.stages import StageAssignment, describe
from moesim.simulator.predict.result import Result
from moesim.simulator.predict.result_parts import MemoryResult
from moesim.simulator.predict.step import Prepared, execute, prepare
from moesim.simulator.predict.summarise import summarise
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.inputs import Inputs, inputs_of


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


_unread: ref[Result] | None = None
"""The last result, whose fields may not have been read, and which keeps the arrays of its step so long."""


def finish(prepared: Prepared) -> Prediction:
    """Execute and summarise a prepared step. Raises InfeasibleError as `predict` does.

    Somebody who still has the result before gets its fields now, so that no two keep the arrays of a step.
    """
    global _unread
    before = None if _unread is None else _unread()
    if before is not None:
        before.completed()
    step = execute(prepared)
    prediction = Prediction(prepared, step.executions, summarise(step))
    _unread = ref(prediction.result)
    return prediction


# -- simulate ----------------------------------------------------------------------------------------
# Predicts a scenario and returns its result.


def simulate(scenario: Scenario) -> Result:
    """Predict one training step and the run that consists of such steps; see `predict.driver.predict`.

    Raises InputError for an illegal scenario. A plan that does not fit into memory is still predicted, with
    `memory.fits` false.
    """
    return predict(scenario).result


# -- check -------------------------------------------------------------------------------------------
# Checks whether a scenario is legal and fits into memory, without simulating it.


class Check(BaseModel):
    """Figures of a legal plan; `microbatches` counts those of one pipeline."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    inputs: Inputs
    model: str
    accelerator: str
    n_gpus: int
    dp: int
    microbatches: int
    stages: tuple[str, ...]
    memory: MemoryResult
    """Memory of the fullest GPU; for a fleet, in the pool with the smallest reserve."""


def check(scenario: Scenario) -> Check:
    """Resolve, check and lay out a scenario without running it.

    Raises InputError, with key and nearest legal values, for an illegal scenario.
    """
    prepared = prepare(scenario)
    return Check(
        inputs=inputs_of(scenario),
        model=prepared.shape.name,
        accelerator=" + ".join(pool.part.cluster.accelerator.title for pool in prepared.pools),
        n_gpus=prepared.n_gpus,
        dp=prepared.layout.dp,
        microbatches=prepared.schedule.microbatches,
        stages=tuple(describe(prepared.stages).splitlines()),
        memory=prepared.memory,
    )
