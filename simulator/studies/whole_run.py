"""Predicts the whole run with an uncertain step time, so that its end and cost include that uncertainty."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moesim.hwmodels.arrays import FloatArray
from moesim.simulator.engine.records import Execution, step_time_s
from moesim.simulator.predict.report import step_energy
from moesim.simulator.predict.result import Result
from moesim.simulator.predict.result_parts import StepEnergy
from moesim.simulator.predict.step import Prepared, execute, prepare
from moesim.simulator.predict.summarise import run_report
from moesim.simulator.run.report import RunReport
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.defaults import Default
from moesim.simulator.scenario.inputs import EVENTS, inputs_of
from moesim.simulator.scenario.run_plan import default_stops
from moesim.simulator.studies.effects import SAMPLES, draws_s, entry_effects, generator_of

ORDER = "run.replicas"
"""Name of the random stream that assigns points of the distribution to replicas."""


def step_factors(prepared: Prepared, executions: Sequence[Execution], replicas: int) -> FloatArray:
    """Step time relative to the predicted one for every replica [replicas], distributed as in eq. U2.

    The replicas take evenly spaced points of the sorted draws, so that their percentiles are those of all
    draws. A seeded order, independent of the stops, assigns the points; it is the same in every scenario.
    """
    time = step_time_s(executions)
    drawn = np.sort(draws_s(time, entry_effects(prepared, executions))) / time
    points = ((np.arange(replicas) + 0.5) * (len(drawn) / replicas)).astype(np.int64)
    order = np.argsort(generator_of(ORDER, prepared.scenario.seed).random(replicas), kind="stable")
    return np.asarray(drawn[points][order])


def uncertain_report(
    prepared: Prepared, executions: Sequence[Execution], known_s: float | None = None
) -> RunReport:
    """The report of a simulated scenario, with a step time drawn for every replica.

    `known_s`: step time (s) to use instead of the simulated one. Raises as `run_report` does.
    """
    plan = prepared.scenario.run
    # Without failures replicas cost nothing; as many as there are draws give the interval of the step itself.
    factors = step_factors(prepared, executions, plan.replicas if plan.interrupted else SAMPLES)
    simulated_s = step_time_s(executions)
    energy = None if prepared.of_fleet else step_energy(prepared, executions, simulated_s)
    return run_report(prepared, simulated_s if known_s is None else known_s, factors, energy)


def with_default_stops(scenario: Scenario) -> tuple[Scenario, tuple[Default, ...]]:
    """The scenario with failures, restart and checkpoints by rule where it does not mention failures.

    A fleet, whose run is refused, and a scenario that states `run.failures`, if only as `none`, stay as they
    are. Returns the keys that were chosen as well.
    """
    if scenario.fleet is not None or scenario.run.failures is not None:
        return scenario, ()
    chosen = default_stops(scenario.run, scenario.machine)
    stops = {key: one.value for key, one in chosen.items()}
    return scenario.replace(run=stops), tuple(one.default for one in chosen.values())


def predict_run(
    scenario: Scenario,
    step_time_s: float | None = None,
    uncertainty: bool | None = None,
    energy: StepEnergy | None = None,
) -> RunReport:
    """Predict the whole run of a scenario; see `run_report`.

    Failures that the scenario does not mention are those of `with_default_stops`, which the report lists.
    `uncertainty` includes that of the step time; by default it is on unless `step_time_s` is given. With a
    given `step_time_s` and no uncertainty, only further phases are simulated; `energy` is then that of the
    step, without which nodes draw their power under load.
    """
    with_stops, assumed = with_default_stops(scenario)
    report = _report(prepare(with_stops), step_time_s, uncertainty, energy)
    engine = EVENTS if step_time_s is None else f"step time given: {step_time_s} s"
    return report.model_copy(update={"inputs": inputs_of(scenario, engine), "defaults": assumed})


def _report(
    prepared: Prepared, step_time_s: float | None, uncertainty: bool | None, energy: StepEnergy | None
) -> RunReport:
    if uncertainty is None:
        uncertainty = step_time_s is None
    if not uncertainty and step_time_s is not None:
        return run_report(prepared, step_time_s, energy=energy)
    step = execute(prepared)
    if uncertainty:
        return uncertain_report(prepared, step.executions, step_time_s)
    return run_report(prepared, step.time_s, energy=step_energy(prepared, step.executions, step.time_s))


def with_uncertain_run(prepared: Prepared, executions: Sequence[Execution], result: Result) -> Result:
    """The result with the uncertain step time in the report of its run, if it has one."""
    if result.run.report is None:
        return result
    report = uncertain_report(prepared, executions)
    return result.model_copy(update={"run": result.run.model_copy(update={"report": report})})
