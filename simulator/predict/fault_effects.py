"""What each fault costs: the step with one fault alone against the step without any."""

from __future__ import annotations

from moesim.hwmodels.errors import InfeasibleError
from moesim.simulator.engine.full_resolution.result import FaultEffect
from moesim.simulator.engine.simpy.execute import execute_all
from moesim.simulator.predict.compile import prepare
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.faults import NodeLoss


def step_seconds(scenario: Scenario) -> float:
    """Seconds of one step and nothing else. Raises InputError and InfeasibleError as `simulate` does."""
    return execute_all(prepare(scenario).programs)[0].end_ns / 1e9


def fault_effects(scenario: Scenario, together_s: float) -> tuple[FaultEffect, ...]:
    """Each fault alone, and all of them together (`together_s`), against the cluster without faults.

    The draws of speed, load and jitter are the same in all of them, so a difference is the fault's.
    """
    if not scenario.faults:
        return ()
    without = step_seconds(scenario.model_copy(update={"faults": ()}))
    rows = [FaultEffect(cause="no fault", step_s=without, effect_s=0.0)]
    for fault in scenario.faults if len(scenario.faults) > 1 else ():
        try:
            alone = step_seconds(scenario.model_copy(update={"faults": (fault,)}))
        except InfeasibleError as error:
            rows.append(FaultEffect(cause=str(fault), step_s=None, effect_s=None, note=str(error)))
            continue
        rows.append(FaultEffect(cause=str(fault), step_s=alone, effect_s=alone - without))
    name = str(scenario.faults[0]) if len(scenario.faults) == 1 else "all of them"
    lost = any(isinstance(fault, NodeLoss) for fault in scenario.faults)
    note = "with fewer sequences a step: see lost_groups" if lost else ""
    rows.append(FaultEffect(cause=name, step_s=together_s, effect_s=together_s - without, note=note))
    return tuple(rows)
