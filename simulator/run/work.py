"""Computes the training time of each phase of a run from simulated steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.units import SECONDS_PER_HOUR
from moesim.simulator.layout.job import ResolvedJob
from moesim.simulator.run.phases import Level, StepTimes, levels, work_seconds
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.run_plan import Ramp, RunPhase
from moesim.simulator.schedules import build


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Time and memory of one simulated step, for the simulation of a run."""

    time_s: float
    needed_bytes: float
    capacity_bytes: float


Measure = Callable[[ResolvedJob], StepFigures]
"""Simulates one step of a job; raises InputError for an illegal one."""


@dataclass(frozen=True, slots=True)
class PhaseWork:
    """A phase with its steps and its training time in seconds, without interruptions."""

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
    starts: bool = False
    """Whether a job starts with it: the first phase, and every later one with another plan."""


@dataclass(frozen=True, slots=True)
class _Stretch:
    """The work of a simulated phase: its job, and its tokens or steps."""

    name: str
    job: ResolvedJob
    tokens: float | None
    steps: int | None
    ramp: Ramp | None
    assumption: str

    @property
    def quantum(self) -> int:
        """Sequences of one micro-batch in all pipelines together."""
        return self.job.layout.dp * self.job.scenario.parallel.microbatch


def phase_works(job: ResolvedJob, measure: Measure) -> list[PhaseWork]:
    """Every phase of the job's run plan, the main one first (eq. J1).

    `measure` is called once for each phase, and up to twice more for a batch ramp. Raises InputError with the
    name of a phase whose plan is illegal.
    """
    scenario, plan = job.scenario, job.scenario.run
    main = _Stretch("main", job, plan.tokens, None, plan.ramp, "")
    works = [replace(_simulated(main, measure), starts=True)]
    for phase in plan.phases:
        if phase.gpu_hours is not None:
            works.append(_stated(phase, job.cluster.n_gpus))
            continue
        try:
            own = job.changed_to(phase_scenario(scenario, phase))
            stretch = _Stretch(phase.name, own, phase.tokens, phase.steps, phase.ramp, phase.assumption)
            works.append(replace(_simulated(stretch, measure), starts=bool(phase.override)))
        except InputError as error:
            raise InputError(f"run.phases {phase.name!r}: {error}") from None
    return works


def phase_scenario(scenario: Scenario, phase: RunPhase) -> Scenario:
    """The scenario with the batch, the sequence length and the overrides of a phase."""
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
        steps = [Level(batch.sequences, stretch.steps)]
    else:
        assert stretch.tokens is not None
        steps = levels(stretch.tokens, batch.sequences, batch.sequence_length, ramp, stretch.quantum)
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
        steps=sum(level.steps for level in steps),
        tokens=float(sum(level.steps * level.sequences * batch.sequence_length for level in steps)),
        sequences=batch.sequences,
        sequence_length=batch.sequence_length,
        step_time_s=full.time_s,
        seconds=work_seconds(steps, times),
        interpolation_error=times.error,
        notes=tuple(notes),
    )


def _ramp_times(stretch: _Stretch, ramp: Ramp, full_s: float, measure: Measure) -> StepTimes:
    """Step times at the smallest batch that the schedule can run, at a middle batch and at the full one."""
    scenario, quantum = stretch.job.scenario, stretch.quantum
    full = scenario.batch.sequences
    first = _legal(scenario, math.ceil(ramp.sequences / quantum), full // quantum, quantum)
    if first == full:
        raise InputError(
            f"run.ramp: schedule {scenario.schedule} runs no batch from {ramp.sequences} to below {full} "
            "sequences on this plan, so the times of their steps are not known; use fewer data-parallel "
            "ranks or another schedule"
        )
    middle = _legal(scenario, math.isqrt(first * full) // quantum, full // quantum, quantum)
    seconds = {full: full_s}
    for sequences in (first, middle):
        if sequences not in seconds:
            smaller = scenario.overridden(f"batch.sequences={sequences}")
            seconds[sequences] = measure(stretch.job.changed_to(smaller)).time_s
    return StepTimes(tuple(sorted(seconds)), tuple(seconds[s] for s in sorted(seconds)))


def _legal(scenario: Scenario, least: int, most: int, quantum: int) -> int:
    """Sequences of the smallest batch, with `least` or more micro-batches, that the schedule can run."""
    plan = scenario.parallel
    for count in range(max(1, least), most):
        if scenario.schedule.lower().endswith(".csv"):
            break  # a file is written for one number of micro-batches
        try:
            build(scenario.schedule, plan.pp, count, plan.vpp)
        except InputError:
            continue
        return count * quantum
    return most * quantum
