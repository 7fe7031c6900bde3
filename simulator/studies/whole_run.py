"""The whole run with its step time uncertain: end and bill from stops and calibration together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moesim.hwmodels.arrays import FloatArray
from moesim.simulator.engine.records import Execution, step_time_s
from moesim.simulator.predict.compile import prepare
from moesim.simulator.predict.prepared import Prepared
from moesim.simulator.predict.result import Result
from moesim.simulator.predict.run_report import run_report
from moesim.simulator.predict.step import execute
from moesim.simulator.run.report import RunReport
from moesim.simulator.scenario import Scenario
from moesim.simulator.studies.effects import entry_effects, generator_of
from moesim.simulator.studies.monte_carlo import SAMPLES, draws_s
from moesim.simulator.studies.sources import MODEL_ERROR

ORDER = "run.replicas"
"""Names the stream of random numbers that says which replica has which point."""


def step_factors(
    prepared: Prepared, executions: Sequence[Execution], replicas: int, *, left_out: float = MODEL_ERROR
) -> FloatArray:
    """Step time over the predicted one for every replica ([replicas]): the distribution of eq. U2.

    Few replicas take evenly spaced points of the sorted draws, in a seeded order that the stops do not know
    of: their percentiles are those of all draws, and a replica keeps its point from scenario to scenario.
    """
    time = step_time_s(executions)
    drawn = np.sort(draws_s(time, entry_effects(prepared, executions), left_out=left_out)) / time
    points = ((np.arange(replicas) + 0.5) * (len(drawn) / replicas)).astype(np.int64)
    order = np.argsort(generator_of(ORDER, prepared.scenario.seed).random(replicas), kind="stable")
    return np.asarray(drawn[points][order])


def uncertain_report(
    prepared: Prepared, executions: Sequence[Execution], known_s: float | None = None
) -> RunReport:
    """The report of a prepared and executed scenario, its step time drawn anew for every replica.

    `known_s`: seconds of the step in place of the executed one. Raises as `run_report` does.
    """
    plan = prepared.scenario.run
    # Without failures a replica costs nothing, and as many as an interval has make both agree.
    factors = step_factors(prepared, executions, plan.replicas if plan.failures is not None else SAMPLES)
    return run_report(prepared, step_time_s(executions) if known_s is None else known_s, factors)


def predict_run(
    scenario: Scenario, step_time_s: float | None = None, uncertainty: bool | None = None
) -> RunReport:
    """The whole run of a scenario; see `run_report`.

    `uncertainty` of the step time is included where the step is simulated here, and where it is asked for;
    with a known `step_time_s` alone nothing but further phases is simulated.
    """
    prepared = prepare(scenario)
    if uncertainty is None:
        uncertainty = step_time_s is None
    if not uncertainty and step_time_s is not None:
        return run_report(prepared, step_time_s)
    step = execute(prepared)
    if not uncertainty:
        return run_report(prepared, step.time_s)
    return uncertain_report(prepared, step.executions, step_time_s)


def with_uncertain_run(prepared: Prepared, executions: Sequence[Execution], result: Result) -> Result:
    """The same result with the uncertain step in the report of its run, where it has one."""
    if result.run.report is None:
        return result
    report = uncertain_report(prepared, executions)
    return result.model_copy(update={"run": result.run.model_copy(update={"report": report})})
