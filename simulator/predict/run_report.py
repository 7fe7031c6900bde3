"""Reports the whole run of a prepared scenario with its phases, interruptions and bill."""

from __future__ import annotations

from moesim.hwmodels.arrays import FloatArray
from moesim.simulator.layout.job import ResolvedJob
from moesim.simulator.model.counts import parameters_mtp, parameters_total
from moesim.simulator.predict.prepared import Prepared
from moesim.simulator.predict.step import run_step
from moesim.simulator.run.interruptions import interruptions
from moesim.simulator.run.report import RunReport
from moesim.simulator.run.simulate_run import simulate_run
from moesim.simulator.run.work import StepFigures, phase_works


def run_report(prepared: Prepared, time_s: float, factors: FloatArray | None = None) -> RunReport:
    """The whole run of a prepared scenario whose step takes `time_s` seconds.

    Simulates the steps of other batches and phases. `factors`: see `simulate_run`. Raises InputError for an
    illegal phase and for a fleet, InfeasibleError for a run that practically never ends.
    """
    scenario, plan, job = prepared.scenario, prepared.scenario.run, prepared.job

    def measure(of: ResolvedJob) -> StepFigures:
        if of is job:
            memory, seconds = prepared.memory, time_s
        else:
            step = run_step(of, engine=prepared.engine.name)
            memory, seconds = step.prepared.memory, step.time_s
        return StepFigures(seconds, memory.total_bytes, memory.capacity_bytes)

    trained = parameters_total(job.shape) + parameters_mtp(job.shape)
    stops = interruptions(plan, job.cluster, trained, scenario.recipe)
    works = phase_works(job, measure)
    return simulate_run(plan, job.cluster, works, stops, scenario.seed, factors)
