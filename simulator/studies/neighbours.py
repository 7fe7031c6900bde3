"""Suggests what to try next: scenarios that are one change away, each simulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from pydantic import BaseModel, ConfigDict

from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.simulator.layout.memory import VERDICTS, Verdict
from moesim.simulator.predict.band import Band
from moesim.simulator.predict.result import Result
from moesim.simulator.predict.run_report import run_report
from moesim.simulator.predict.step import run_step
from moesim.simulator.scenario import Scenario
from moesim.simulator.schedules import SCHEDULES
from moesim.simulator.studies.compare import relative_draws

Progress = Callable[[float, str], None]

SMS_STEPS = (-8, -4, 4, 8)
"""Changes of the number of communication SMs that are tried."""

RECOMPUTE = ("none", "selective", "deepseek-v3", "full")


class Neighbour(BaseModel):
    """One change of a scenario and its effect; `change` is the relative change of the step time."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    override: str
    why: str
    step_time_s: float
    change: float
    memory_bytes: float
    fits: bool
    verdict: Verdict
    """`fits`, `at risk` or `does not fit` (docs/model.md, eq. M10)."""


def neighbours(
    scenario: Scenario, result: Result, progress: Progress = lambda share, text: None
) -> tuple[Neighbour, ...]:
    """Simulate all legal single changes of the plan: those that fit, then those at risk, fastest first.

    `result` is the scenario's own. Illegal changes are left out.
    """
    wanted = _candidates(scenario)
    found = []
    for number, (override, why) in enumerate(wanted):
        progress(number / len(wanted), override)
        try:
            step = run_step(scenario.overridden(override))
            if scenario.run.asks_for_more:  # leave out a change with which the run cannot be predicted
                run_report(step.prepared, step.time_s)
        except (InputError, InfeasibleError):
            continue
        memory = step.prepared.memory
        found.append(
            Neighbour(
                override=override,
                why=why,
                step_time_s=step.time_s,
                change=step.time_s / result.step.time_s - 1.0,
                memory_bytes=memory.total_bytes,
                fits=memory.fits,
                verdict=memory.verdict,
            )
        )
    return tuple(sorted(found, key=lambda n: (VERDICTS.index(n.verdict), n.step_time_s, n.override)))


def change_bands(scenario: Scenario, result: Result, found: Sequence[Neighbour]) -> dict[str, Band]:
    """Intervals of the relative changes of the step time, by override.

    The draws are shared with the scenario's own (docs/model.md, eq. U2), so that a change is less uncertain
    than either step time. A change without draws, as on a fleet, is left out.
    """
    bands: dict[str, Band] = {}
    try:
        own = relative_draws(scenario)
    except InputError:
        return bands
    for row in found:
        try:
            other = relative_draws(scenario.overridden(row.override))
        except (InputError, InfeasibleError):
            continue
        drawn = (row.step_time_s * other) / (result.step.time_s * own) - 1.0
        p10, p50, p90 = (float(value) for value in np.quantile(drawn, [0.1, 0.5, 0.9]))
        bands[row.override] = Band(predicted=row.change, p10=p10, p50=p50, p90=p90)
    return bands


def _candidates(scenario: Scenario) -> list[tuple[str, str]]:
    """Single changes with the reason to try each; changes to the scenario's own value are left out."""
    sms, ep = scenario.communication.sms, scenario.parallel.ep
    found = [
        (f"communication.sms={sms + step}", "more SMs for transfers" if step > 0 else "more SMs for compute")
        for step in SMS_STEPS
        if sms and sms + step > 0
    ]
    if ep > 1:
        found.append((f"parallel.ep={ep // 2}", "tokens go to fewer nodes, every GPU holds more experts"))
        found.append((f"parallel.ep={2 * ep}", "every GPU holds fewer experts, tokens go to more nodes"))
    found += [
        (f"recompute={name}", "other activations kept or formed again")
        for name in RECOMPUTE
        if name != scenario.recompute
    ]
    if scenario.parallel.pp > 1 and scenario.stages.blocks is None:
        found += [
            (f"schedule={spec.name}", "another pipeline order")
            for spec in SCHEDULES.values()
            if spec.advised and spec.name != scenario.schedule
        ]
    return found
