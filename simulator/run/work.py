"""How long each phase of a run trains, from simulated steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.units import SECONDS_PER_HOUR
from moesim.simulator.layout.parallel import Layout
from moesim.simulator.run.phases import Level, StepTimes, levels, work_seconds
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.run_plan import Ramp, RunPhase
from moesim.simulator.schedules import build


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What the run needs to know of one simulated step."""

    time_s: float
    needed_bytes: float
    capacity_bytes: float


Measure = Callable[[Scenario], StepFigures]
"""Simulates one step of a scenario; raises InputError for an illegal one."""


@dataclass(frozen=True, slots=True)
class PhaseWork:
    """A phase with its steps and its training time (s), nothing interrupting it."""

    name: str
    stated: bool
    steps: int
    tokens: float
    sequences: int
    sequence_length: int
    step_time_s: float
    seconds: float
    interpolation_error: float = 0.0
    notes: tuple[str, ...] = ()


def phase_works(scenario: Scenario, measure: Measure) -> list[PhaseWork]:
    """Every phase of the scenario's run plan, the main one first (eq. J1).

    `measure` is called once for each phase, and up to twice more for a batch ramp. Raises InputError that
    names the phase where its plan is illegal.
    """
    plan = scenario.run
    found = [_simulated("main", scenario, plan.tokens, None, plan.ramp, "", measure)]
    for phase in plan.phases:
        if phase.gpu_hours is not None:
            found.append(_stated(phase, scenario))
            continue
        try:
            found.append(
                _simulated(
                    phase.name,
                    phase_scenario(scenario, phase),
                    phase.tokens,
                    phase.steps,
                    phase.ramp,
                    phase.assumption,
                    measure,
                )
            )
        except InputError as error:
            raise InputError(f"run.phases {phase.name!r}: {error}") from None
    return found


def phase_scenario(scenario: Scenario, phase: RunPhase) -> Scenario:
    """The scenario of a phase: batch, sequence length and overrides in place."""
    batch = scenario.batch
    return scenario.overridden(
        f"batch.sequences={phase.sequences or batch.sequences}",
        f"batch.sequence_length={phase.sequence_length or batch.sequence_length}",
        *phase.override,
    )


def _stated(phase: RunPhase, scenario: Scenario) -> PhaseWork:
    assert phase.gpu_hours is not None
    hours = phase.gpu_hours
    return PhaseWork(
        name=phase.name,
        stated=True,
        steps=0,
        tokens=0.0,
        sequences=0,
        sequence_length=0,
        step_time_s=0.0,
        seconds=hours.value * SECONDS_PER_HOUR / scenario.machine.n_gpus,
        notes=(f"{phase.name}: {hours.text} as stated ({hours.source}), not predicted",),
    )


def _simulated(
    name: str,
    scenario: Scenario,
    tokens: float | None,
    steps: int | None,
    ramp: Ramp | None,
    assumption: str,
    measure: Measure,
) -> PhaseWork:
    batch = scenario.batch
    full = measure(scenario)
    notes = [f"{name}: {assumption}"] if assumption else []
    if full.needed_bytes > full.capacity_bytes:
        notes.append(
            f"{name}: does not fit: {full.needed_bytes / 2**30:.1f} of {full.capacity_bytes / 2**30:.1f} GiB"
        )
    if steps is not None:
        found = [Level(batch.sequences, steps)]
    else:
        assert tokens is not None
        found = levels(tokens, batch.sequences, batch.sequence_length, ramp, _pipeline_quantum(scenario))
    times = StepTimes((batch.sequences,), (full.time_s,))
    if ramp is not None:
        times = _ramp_times(scenario, ramp, full.time_s, measure)
        if ramp.sequences < times.sequences[0]:
            notes.append(
                f"{name}: schedule {scenario.schedule} cannot run batches below {times.sequences[0]:,} "
                "sequences on this plan; their step times continue the line of the next ones down to "
                f"{ramp.sequences:,}"
            )
    return PhaseWork(
        name=name,
        stated=False,
        steps=sum(level.steps for level in found),
        tokens=float(sum(level.steps * level.sequences * batch.sequence_length for level in found)),
        sequences=batch.sequences,
        sequence_length=batch.sequence_length,
        step_time_s=full.time_s,
        seconds=work_seconds(found, times),
        interpolation_error=times.error,
        notes=tuple(notes),
    )


def _pipeline_quantum(scenario: Scenario) -> int:
    """Sequences of one micro-batch in every pipeline."""
    cluster, plan = scenario.machine, scenario.parallel
    return Layout(plan, cluster.n_gpus, cluster.node.n_gpus).dp * plan.microbatch


def _ramp_times(scenario: Scenario, ramp: Ramp, full_s: float, measure: Measure) -> StepTimes:
    """Step times at the smallest batch that the schedule can run, a middle one and the full one."""
    full = scenario.batch.sequences
    quantum = _pipeline_quantum(scenario)
    first = _legal(scenario, math.ceil(ramp.sequences / quantum), full // quantum, quantum)
    if first == full:
        raise InputError(
            f"run.ramp: schedule {scenario.schedule} runs no batch from {ramp.sequences} to below {full} "
            "sequences on this plan, so nothing says how long their steps take; use fewer data-parallel "
            "ranks or another schedule"
        )
    middle = _legal(scenario, math.isqrt(first * full) // quantum, full // quantum, quantum)
    known = {full: full_s}
    for sequences in (first, middle):
        if sequences not in known:
            known[sequences] = measure(scenario.overridden(f"batch.sequences={sequences}")).time_s
    return StepTimes(tuple(sorted(known)), tuple(known[s] for s in sorted(known)))


def _legal(scenario: Scenario, least: int, most: int, quantum: int) -> int:
    """The smallest batch of `least` or more micro-batches a pipeline that the schedule can run."""
    plan = scenario.parallel
    for count in range(max(1, least), most):
        if scenario.schedule.lower().endswith(".csv"):
            break  # a file holds one number of micro-batches
        try:
            build(scenario.schedule, plan.pp, count, plan.vpp)
        except InputError:
            continue
        return count * quantum
    return most * quantum
