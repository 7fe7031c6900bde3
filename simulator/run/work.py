"""How long each phase of a run trains, from simulated steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.units import SECONDS_PER_HOUR
from moesim.simulator.layout.job import ResolvedJob
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


Measure = Callable[[ResolvedJob], StepFigures]
"""Simulates one step of a job; raises InputError for an illegal one."""


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


@dataclass(frozen=True, slots=True)
class _Stretch:
    """What a phase trains: its job, and tokens or steps."""

    name: str
    job: ResolvedJob
    tokens: float | None
    steps: int | None
    ramp: Ramp | None
    assumption: str

    @property
    def quantum(self) -> int:
        """Sequences of one micro-batch in every pipeline."""
        return self.job.layout.dp * self.job.scenario.parallel.microbatch


def phase_works(job: ResolvedJob, measure: Measure) -> list[PhaseWork]:
    """Every phase of the job's run plan, the main one first (eq. J1).

    `measure` is called once for each phase, and up to twice more for a batch ramp. Raises InputError that
    names the phase where its plan is illegal.
    """
    scenario, plan = job.scenario, job.scenario.run
    main = _Stretch("main", job, plan.tokens, None, plan.ramp, "")
    found = [_simulated(main, measure)]
    for phase in plan.phases:
        if phase.gpu_hours is not None:
            found.append(_stated(phase, job.cluster.n_gpus))
            continue
        try:
            own = job.changed_to(phase_scenario(scenario, phase))
            stretch = _Stretch(phase.name, own, phase.tokens, phase.steps, phase.ramp, phase.assumption)
            found.append(_simulated(stretch, measure))
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


def _stated(phase: RunPhase, n_gpus: int) -> PhaseWork:
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
        seconds=hours.value * SECONDS_PER_HOUR / n_gpus,
        notes=(f"{phase.name}: {hours.text} as stated ({hours.source}), not predicted",),
    )


def _simulated(stretch: _Stretch, measure: Measure) -> PhaseWork:
    name, scenario, ramp = stretch.name, stretch.job.scenario, stretch.ramp
    batch = scenario.batch
    full = measure(stretch.job)
    notes = [f"{name}: {stretch.assumption}"] if stretch.assumption else []
    if full.needed_bytes > full.capacity_bytes:
        notes.append(
            f"{name}: does not fit: {full.needed_bytes / 2**30:.1f} of {full.capacity_bytes / 2**30:.1f} GiB"
        )
    if stretch.steps is not None:
        found = [Level(batch.sequences, stretch.steps)]
    else:
        assert stretch.tokens is not None
        found = levels(stretch.tokens, batch.sequences, batch.sequence_length, ramp, stretch.quantum)
    times = StepTimes((batch.sequences,), (full.time_s,))
    if ramp is not None:
        times = _ramp_times(stretch, ramp, full.time_s, measure)
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


def _ramp_times(stretch: _Stretch, ramp: Ramp, full_s: float, measure: Measure) -> StepTimes:
    """Step times at the smallest batch that the schedule can run, a middle one and the full one."""
    scenario, quantum = stretch.job.scenario, stretch.quantum
    full = scenario.batch.sequences
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
            smaller = scenario.overridden(f"batch.sequences={sequences}")
            known[sequences] = measure(stretch.job.changed_to(smaller)).time_s
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
