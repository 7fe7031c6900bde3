"""Simulates a run from start to end: its phases, steps, interruptions, finish date and bill."""

from __future__ import annotations

import datetime
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.units import SECONDS_PER_DAY, SECONDS_PER_HOUR
from moesim.simulator.layout.job import ResolvedJob
from moesim.simulator.run.failures import Interruptions, RunOutcome, simulate_failures
from moesim.simulator.run.report import (
    HOURS_PER_DAY,
    CauseReport,
    Drawn,
    FinishDates,
    GpuHours,
    OutlookRow,
    PhaseReport,
    Rates,
    RunReport,
    RunSpread,
    per_hour,
    rates,
)
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.run_plan import Ramp, RunPhase, RunPlan
from moesim.simulator.schedules import build

# -- phases ------------------------------------------------------------------------------------------
# Divides a run plan into whole steps with batch ramps; interpolates step times between batches (pure).


@dataclass(frozen=True, slots=True)
class Level:
    """Steps at one batch size."""

    sequences: int
    steps: int


def steps_for(tokens: float, sequences: int, sequence_length: int) -> int:
    """Number of whole steps that cover a number of tokens (eq. F6)."""
    return math.ceil(tokens / (sequences * sequence_length))


def levels(
    tokens: float, sequences: int, sequence_length: int, ramp: Ramp | None, increment: int
) -> list[Level]:
    """Batch sizes in order, each with its steps (eq. J1).

    The ramp's increments share its tokens evenly; a step belongs to the increment in which it starts.
    `increment` (sequences) applies where the ramp states none. Raises InputError for a ramp that decreases,
    and for an increment that does not divide it.
    """
    if ramp is None:
        return [Level(sequences, steps_for(tokens, sequences, sequence_length))]
    by = ramp.increment or increment
    if ramp.sequences >= sequences:
        raise InputError(
            f"run.ramp.sequences={ramp.sequences} must be below the full batch of {sequences}; leave the "
            "ramp out for a constant batch"
        )
    if (sequences - ramp.sequences) % by:
        raise InputError(
            f"run.ramp: from {ramp.sequences} to {sequences} sequences is not a whole number of increments "
            f"of {by}; state run.ramp.increment, for example {math.gcd(sequences - ramp.sequences, by)}"
        )
    count = (sequences - ramp.sequences) // by
    sizes, done = [], 0
    for number in range(count):
        batch = ramp.sequences + number * by
        boundary = ramp.tokens * (number + 1) / count
        steps = max(0, math.ceil((boundary - done) / (batch * sequence_length)))
        sizes.append(Level(batch, steps))
        done += steps * batch * sequence_length
    rest = max(0, math.ceil((tokens - done) / (sequences * sequence_length)))
    return [*sizes, Level(sequences, rest)]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Step time (s) over batch size (sequences), linear between a few simulated batches (eq. J1).

    A step takes the fill and end of the pipeline plus a time for each micro-batch, so it is nearly linear.
    `error` is the largest relative error at an inner point that the interpolation leaves out.
    """

    sequences: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, sequences: int) -> float:
        """Step time at a batch size; below the smallest simulated batch the first line is extended."""
        if len(self.sequences) == 1:
            return self.seconds[0]
        right = min(max(bisect_right(self.sequences, sequences), 1), len(self.sequences) - 1)
        return _line(
            sequences,
            (self.sequences[right - 1], self.seconds[right - 1]),
            (self.sequences[right], self.seconds[right]),
        )

    @property
    def error(self) -> float:
        """Largest relative error at an inner point of the line between its neighbours; 0 without one."""
        points = list(zip(self.sequences, self.seconds, strict=True))
        misses = [
            abs(_line(points[i][0], points[i - 1], points[i + 1]) / points[i][1] - 1.0)
            for i in range(1, len(points) - 1)
        ]
        return max(misses, default=0.0)


def _line(x: int, first: tuple[int, float], second: tuple[int, float]) -> float:
    slope = (second[1] - first[1]) / (second[0] - first[0])
    return first[1] + slope * (x - first[0])


def work_seconds(levels: Sequence[Level], times: StepTimes) -> float:
    """Seconds of all steps of a phase."""
    return math.fsum(level.steps * times.at(level.sequences) for level in levels)


# -- work --------------------------------------------------------------------------------------------
# Computes the training time of each phase of a run from simulated steps.


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
            hours = phase.gpu_hours
            note = f"{phase.name}: {hours.text} as stated ({hours.source}), not predicted"
            seconds = hours.value * SECONDS_PER_HOUR / job.cluster.n_gpus
            works.append(PhaseWork(phase.name, True, 0, 0.0, 0, 0, 0.0, seconds, notes=(note,)))
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


# -- simulate run ------------------------------------------------------------------------------------
# Simulates a run from start to end and reports its phases, interruptions, finish date and bill.

OUTLOOK_SHARES = (0.01, *(round(0.05 * n, 2) for n in range(1, 20)), 0.99)
"""Shares of replicas at the points of the outlook."""


def simulate_run(
    plan: RunPlan,
    cluster: Cluster,
    phases: Sequence[PhaseWork],
    interruptions: Interruptions,
    seed: int,
    factors: FloatArray | None = None,
    power: BoardPower | None = None,
) -> RunReport:
    """Simulate a run and report it; `phases` comes from `run.work.phase_works`.

    `factors`: relative step times of the replicas where the step time is uncertain ([replicas], about 1). A
    factor scales all phases of its replica, with the same random interruptions (docs/model.md, eq. J9).
    `power`: of a GPU while it trains and while it waits; absent: always that of a node under load.
    Percentiles and outlook use the factors; predicted figures and tables use the predicted step. Raises
    InfeasibleError where the run practically never ends, InputError for illegal prices and plans.
    """
    work = [phase.seconds for phase in phases if not phase.stated]
    interruptions.check_feasible(work)
    replicas = len(factors) if factors is not None else plan.replicas
    alike = 1 if interruptions.certain else replicas  # without interruptions all replicas are equal
    outcome = simulate_failures(work, interruptions.model, alike, seed)
    interruptions.check_waiting(mean(outcome.work.sum(axis=0)), mean(outcome.waiting.sum(axis=0)))
    bare = _Book(phases, outcome, cluster.n_gpus, plan.start_s(cluster.n_gpus))
    book = wide = bare.billed(plan, cluster, power)
    bill = book.bill
    if factors is not None:
        varied = simulate_failures(work, interruptions.model, replicas, seed, factors)
        wide = replace(book, outcome=varied)
    days = _spread(wide.wall_s / SECONDS_PER_DAY, mean(book.wall_s / SECONDS_PER_DAY))
    hours = days.predicted * HOURS_PER_DAY
    ends = _spread(wide.wall_s, mean(book.wall_s)).model_dump()
    return RunReport(
        phases=tuple(book.rows()),
        days=days,
        finish=FinishDates(**{name: _date(plan.start, seconds) for name, seconds in ends.items()})
        if plan.start
        else None,
        gpu_hours=book.gpu_hours(),
        goodput=_spread(wide.goodput(), mean(book.goodput())),
        goodput_expected=book.goodput_expected(work, interruptions),
        interruptions=_spread(wide.interruptions(), mean(book.interruptions())),
        causes=tuple(book.causes(interruptions.causes)),
        checkpoint=interruptions.checkpoint,
        cost_usd=bill.of_run(days),
        cost_parts_usd=bill.parts_of_run(hours),
        price=bill.described,
        energy_kwh=per_hour(days, bill.kwh_per_hour),
        electricity_usd=None
        if bill.electricity_usd_per_hour is None
        else bill.electricity_usd_per_hour * hours,
        co2_kg=per_hour(days, bill.kg_co2_per_hour),
        mean_w_per_gpu=book.mean_w,
        assumptions=(*(n for p in phases for n in p.notes), *interruptions.notes, *bill.notes),
        replicas=alike if factors is None else replicas,
        seed=seed,
        step_factor=None if factors is None else _spread(factors, 1.0),
        outlook=tuple(_outlook(plan.start, wide.wall_s, bill)),
    )


def mean(values: FloatArray) -> float:
    """Mean with an exact sum, so that all platforms give the same digits."""
    return math.fsum(values.ravel().tolist()) / values.size


def _spread(values: FloatArray, predicted: float) -> RunSpread:
    """Percentiles of `values` beside the predicted value."""
    ordered = sorted(values.tolist())
    p10, p50, p90 = (_percentile(ordered, share) for share in (0.1, 0.5, 0.9))
    return RunSpread(predicted=predicted, p10=p10, p50=p50, p90=p90)


def _percentile(ordered: Sequence[float], share: float) -> float:
    """Percentile, linear between neighbours and written out so that every NumPy gives the same bytes."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _date(start: datetime.date, seconds: float) -> str:
    latest = (datetime.date.max - start).days
    return (start + datetime.timedelta(days=min(int(seconds / SECONDS_PER_DAY), latest))).isoformat()


def _outlook(start: datetime.date | None, wall_s: FloatArray, bill: Rates) -> Iterator[OutlookRow]:
    ordered = sorted(wall_s.tolist())
    for share in OUTLOOK_SHARES:
        seconds = _percentile(ordered, share)
        yield OutlookRow(
            share=share,
            days=seconds / SECONDS_PER_DAY,
            finish=None if start is None else _date(start, seconds),
            cost_usd=bill.usd_of_run(seconds / SECONDS_PER_DAY * HOURS_PER_DAY),
        )


@dataclass(frozen=True, slots=True)
class BoardPower:
    """W of a GPU with its share of the node, while it trains and while it waits."""

    training_w: float
    waiting_w: float


NO_RATES = Rates(0, None, None, None, None, "", ())


@dataclass(frozen=True, slots=True)
class _Book:
    """Sums over phases, causes and replicas in GPU-hours and dollars."""

    phases: Sequence[PhaseWork]
    outcome: RunOutcome
    gpus: int
    start_s: float
    """Seconds of one start of the job."""
    bill: Rates = NO_RATES
    mean_w: float | None = None
    """Mean W of a billed GPU with its share of the node; None where no power by use is known."""

    @property
    def startup_s(self) -> float:
        """Seconds of all starts that no interruption causes (eq. J10)."""
        return self.start_s * sum(phase.starts for phase in self.phases)

    @property
    def stated_s(self) -> float:
        return math.fsum(phase.seconds for phase in self.phases if phase.stated)

    @property
    def wall_s(self) -> FloatArray:
        """Seconds of the whole run, [replicas]."""
        return np.asarray(self.outcome.wall.sum(axis=0) + self.stated_s + self.startup_s)

    def interruptions(self) -> FloatArray:
        """Number of interruptions [replicas]."""
        return np.asarray(self.outcome.interruptions.sum(axis=(0, 1)), dtype=np.float64)

    def goodput(self) -> FloatArray:
        wall = self.outcome.wall.sum(axis=0) + self.startup_s
        return np.asarray(
            np.where(wall > 0.0, self.outcome.work.sum(axis=0) / np.where(wall > 0, wall, 1.0), 1.0)
        )

    def goodput_expected(self, work: Sequence[float], interruptions: Interruptions) -> float:
        """Goodput by the closed form (eq. J5); 1 without simulated work."""
        if not work:
            return 1.0
        return math.fsum(work) / (interruptions.expected_seconds(work) + self.startup_s)

    def _hours(self, seconds: FloatArray) -> float:
        """GPU-hours of `seconds` [..., replicas], averaged over replicas and summed over other axes."""
        return mean(seconds.reshape(-1, seconds.shape[-1]).sum(axis=0)) * self.gpus / SECONDS_PER_HOUR

    def rows(self) -> list[PhaseReport]:
        reports, simulated = [], 0
        for phase in self.phases:
            if phase.stated:
                wall_s = work_s = phase.seconds
            else:
                wall_s, work_s = mean(self.outcome.wall[simulated]), mean(self.outcome.work[simulated])
                wall_s += self.start_s * phase.starts
                simulated += 1
            reports.append(
                PhaseReport(
                    phase=phase.name,
                    stated=phase.stated,
                    steps=phase.steps,
                    tokens=phase.tokens,
                    sequences=phase.sequences,
                    sequence_length=phase.sequence_length,
                    step_time_s=phase.step_time_s,
                    days=work_s / SECONDS_PER_DAY,
                    gpu_hours=work_s * self.gpus / SECONDS_PER_HOUR,
                    gpu_hours_with_stops=wall_s * self.gpus / SECONDS_PER_HOUR,
                    cost_usd=self.bill.usd(wall_s / SECONDS_PER_HOUR),
                    interpolation_error=phase.interpolation_error,
                )
            )
        return reports

    def billed(self, plan: RunPlan, cluster: Cluster, power: BoardPower | None) -> _Book:
        """The book with its bill and the mean power of a billed GPU, whose spares wait (eq. J8)."""
        spare_nodes = plan.spares.count if plan.spares else 0
        mean_w = None
        if power is not None:
            hours = self.gpu_hours()
            busy = (hours.productive + hours.lost) / (hours.total * (1.0 + spare_nodes / cluster.nodes))
            mean_w = power.waiting_w + (power.training_w - power.waiting_w) * busy
        drawn = Drawn(mean_w, mean(self.wall_s) / SECONDS_PER_HOUR, plan.start)
        return replace(self, bill=rates(cluster, plan.price, spare_nodes, drawn), mean_w=mean_w)

    def gpu_hours(self) -> GpuHours:
        o = self.outcome
        stated = self.stated_s * self.gpus / SECONDS_PER_HOUR
        total = mean(self.wall_s) * self.gpus / SECONDS_PER_HOUR
        return GpuHours(
            productive=self._hours(o.work) + stated,
            startup=self.startup_s * self.gpus / SECONDS_PER_HOUR,
            checkpoints=self._hours(o.checkpoints),
            lost=self._hours(o.lost),
            detection=self._hours(o.detection),
            restart=self._hours(o.restart),
            waiting_for_spares=self._hours(o.waiting),
            total=total,
            billed=total / self.gpus * self.bill.gpus,
        )

    def causes(self, names: Sequence[str]) -> list[CauseReport]:
        o = self.outcome
        return [
            CauseReport(
                cause=name,
                interruptions=mean(o.interruptions[:, i].sum(axis=0).astype(np.float64)),
                lost_gpu_hours=self._hours(o.lost[:, i]),
                detection_gpu_hours=self._hours(o.detection[:, i]),
                restart_gpu_hours=self._hours(o.restart[:, i]),
            )
            for i, name in enumerate(names)
        ]
