"""The cost of each fault, as the step with that fault alone against the step without faults."""

from __future__ import annotations

from moesim.hwmodels.errors import InfeasibleError
from moesim.simulator.engine.full_resolution.result import FaultEffect
from moesim.simulator.predict.prepared import Prepared
from moesim.simulator.predict.step import run_step
from moesim.simulator.scenario.faults import Fault, NodeLoss


def fault_effects(prepared: Prepared, together_s: float) -> tuple[FaultEffect, ...]:
    """Step times with each fault alone and with all of them (`together_s`), against the healthy cluster.

    The draws of speed, load and jitter are the same in all cases, so the faults alone cause the differences.
    """
    faults = prepared.scenario.faults
    if not faults:
        return ()
    without = _seconds(prepared, ())
    rows = [FaultEffect(cause="no fault", step_s=without, effect_s=0.0)]
    for fault in faults if len(faults) > 1 else ():
        try:
            alone = _seconds(prepared, (fault,))
        except InfeasibleError as error:
            rows.append(FaultEffect(cause=str(fault), step_s=None, effect_s=None, note=str(error)))
            continue
        rows.append(FaultEffect(cause=str(fault), step_s=alone, effect_s=alone - without))
    name = str(faults[0]) if len(faults) == 1 else "all of them"
    lost = any(isinstance(fault, NodeLoss) for fault in faults)
    note = "with fewer sequences a step: see lost_groups" if lost else ""
    rows.append(FaultEffect(cause=name, step_s=together_s, effect_s=together_s - without, note=note))
    return tuple(rows)


def _seconds(prepared: Prepared, faults: tuple[Fault, ...]) -> float:
    """Seconds of the same step with only these faults."""
    scenario = prepared.scenario.model_copy(update={"faults": faults})
    return run_step(prepared.job.with_scenario(scenario), engine=prepared.engine.name).time_s
