"""The report of a simulated run and its bill in dollars, kWh and CO2 (pure)."""

from __future__ import annotations

import datetime
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from pydantic import Field

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.summary_text import count, percent, short, titled
from moesim.hwmodels.units import SECONDS_PER_DAY, SECONDS_PER_HOUR
from moesim.simulator.common.tables import Row, TableResult
from moesim.simulator.run.bill import HOURS_PER_DAY, BoardPower, Drawn, Rates, RunSpread, rates
from moesim.simulator.run.events import NS, RunBooks, RunTimeline, TimelineRow
from moesim.simulator.run.failures import CheckpointReport
from moesim.simulator.scenario.defaults import Default
from moesim.simulator.scenario.inputs import Inputs
from moesim.simulator.scenario.run_plan import RunPlan

# -- report ------------------------------------------------------------------------------------------
# The report of a simulated run, as plain numbers that `moesim run --json` prints.

NOT_MODELLED = "not predicted: no failures are modelled; state run.failures, such as llama3-16k-h100"
"""What stands in the place of the goodput of a run without failures."""


class PhaseReport(Frozen):
    """One phase as predicted; `days` and `gpu_hours` are of training alone, without interruptions."""

    phase: str
    stated: bool
    """Whether the plan states the GPU-hours, so that the phase was not simulated."""
    steps: int
    tokens: float
    sequences: int
    """Sequences of the full batch."""
    sequence_length: int
    step_time_s: float
    """Step time at the full batch."""
    days: float
    gpu_hours: float
    gpu_hours_with_stops: float
    cost_usd: float | None
    """Cost with interruptions and spares."""
    interpolation_error: float
    """Largest relative error of the interpolated step times of a ramp."""


class CauseReport(Frozen):
    """Predicted cost of one cause of interruption, in GPU-hours of the job's own GPUs."""

    cause: str
    interruptions: float
    lost_gpu_hours: float
    detection_gpu_hours: float
    restart_gpu_hours: float
    waiting_gpu_hours: float
    planned_gpu_hours: float
    """Planned stops, with the checkpoint before each."""
    gpu_hours: RunSpread
    """All of them together, with percentiles over the runs."""


class FinishDates(Frozen):
    """Finish dates (YYYY-MM-DD) as predicted, and by which 10 %, 50 % and 90 % of the replicas end."""

    predicted: str
    p10: str
    p50: str
    p90: str


class OutlookRow(Frozen):
    """Time and cost within which a share of the replicas ends."""

    share: float
    days: float
    finish: str | None
    """Finish date (YYYY-MM-DD); None where the plan has no start date."""
    cost_usd: float | None


class GpuHours(Frozen):
    """Predicted GPU-hours of the job by use; the parts sum to `total`.

    `billed` adds the spare nodes.
    """

    productive: float
    startup: float
    """Before the first step of a job; after an interruption it is part of `restart`."""
    checkpoints: float
    lost: float
    detection: float
    restart: float
    waiting_for_spares: float
    slow_nodes: float
    """What slow nodes add to the time of training."""
    fewer_groups: float
    """GPUs of groups that are away while the others train."""
    fault_tolerance: float
    """What fault tolerance adds to the steps, and uneven micro-batches of the groups that are left."""
    planned: float
    """Planned maintenance."""
    total: float
    billed: float


class RunReport(TableResult):
    """The whole run, by phase and in total; its table is the outlook."""

    inputs: Inputs | None = Field(None, exclude_if=lambda value: value is None)
    """What the report is of; null inside a `Result`, which says it itself."""
    phases: tuple[PhaseReport, ...]
    days: RunSpread
    finish: FinishDates | None
    gpu_hours: GpuHours
    goodput: RunSpread
    """Productive training time over wall time, without stated phases."""
    goodput_expected: float
    """Goodput by the closed form of eq. J5; they agree without asynchronous writes and spares."""
    interruptions: RunSpread
    causes: tuple[CauseReport, ...]
    checkpoint: CheckpointReport | None
    cost_usd: RunSpread | None
    cost_parts_usd: dict[str, float]
    """Predicted cost by part."""
    price: str
    energy_kwh: RunSpread | None
    electricity_usd: float | None
    """Predicted electricity, a part of the cost of a bought cluster, or of the price of a rented one."""
    co2_kg: RunSpread | None
    mean_w_per_gpu: float | None = None
    """Mean power of a GPU with its share of the node over the run; None: the node's power under load."""
    assumptions: tuple[str, ...]
    defaults: tuple[Default, ...] = ()
    """Failures, restart and checkpoints that the scenario left out, with the rule that chose them."""
    replicas: int
    seed: int
    step_factor: RunSpread | None = None
    """Step time of the replicas over the predicted one; None where only interruptions are uncertain."""
    outlook: tuple[OutlookRow, ...] = ()
    """21 points from 1 to 99 % of the distribution of finish and cost."""
    mean_groups: float | None = Field(None, exclude_if=lambda value: value is None)
    """Share of the replica groups at work in training, where groups can be away: the batch with `shrink`."""
    restart_parts: dict[str, float] = Field({}, exclude_if=lambda value: not value)
    """Seconds of each part of a restart after a lost node, where `run.restart` has parts."""
    timeline: RunTimeline | None = Field(None, exclude_if=lambda value: value is None)
    """One run from begin to end; None where nothing random or planned happens."""

    def __str__(self) -> str:
        """The predicted figures of the whole run with their percentiles and units, in about ten lines."""
        return _text(self)

    @property
    def interrupted(self) -> bool:
        """Whether failures are part of the run."""
        return self.interruptions.p90 > 0.0 or self.interruptions.predicted > 0.0

    def rows(self) -> list[Row]:
        """One row for each point of the outlook."""
        return [row.model_dump() for row in self.outlook]


def _text(report: RunReport) -> str:
    """The whole run in about ten lines: duration, finish, goodput, interruptions, cost and energy."""
    hours, finish = report.gpu_hours, report.finish
    steps = sum(phase.steps for phase in report.phases)
    of = f" of {report.inputs.name}" if report.inputs else ""
    intervals = "interruptions only" if report.step_factor is None else "interruptions and the step time"
    return titled(
        "\n".join(
            [
                f"whole run{of}: {count(len(report.phases), 'phase')}, {steps:,} simulated steps",
                *(report.inputs.lines() if report.inputs else ()),
            ]
        ),
        {
            "days": _spread_text(report.days, "{:.1f}".format),
            "finish": f"{finish.predicted} (P10 {finish.p10}, P90 {finish.p90})" if finish else "",
            "goodput": _spread_text(report.goodput, percent) if report.interrupted else NOT_MODELLED,
            "interruptions": _spread_text(report.interruptions, "{:.1f}".format)
            if report.interrupted
            else "",
            "assumed": ", ".join(f"{item.key}={item.text}" for item in report.defaults),
            "GPU-hours": f"{short(hours.total)} of the job, {short(hours.billed)} billed",
            "cost": _spread_text(report.cost_usd, _dollars) or report.price,
            "energy": _spread_text(report.energy_kwh, lambda value: f"{value / 1e6:.2f} GWh"),
            "intervals": f"P10 to P90 over {count(report.replicas, 'run')}: {intervals}",
            "more": ".to_dict(), .to_pandas()",
        },
    )


def _spread_text(spread: RunSpread | None, form: Callable[[float], str]) -> str:
    """The predicted value with its percentiles where they differ; empty without a value."""
    if spread is None:
        return ""
    if spread.p10 == spread.p90:
        return form(spread.predicted)
    return f"{form(spread.predicted)} (P10 {form(spread.p10)}, P90 {form(spread.p90)})"


def _dollars(value: float) -> str:
    return f"${short(value, 4)}"


# -- ledger: the sum of the books of all simulated runs ------------------------------------------------

NS_PER_HOUR = 3_600 * 10**9
MOST_ROWS = 20_000
"""Rows of a timeline that a report keeps."""

OUTLOOK_SHARES = (0.01, *(round(0.05 * n, 2) for n in range(1, 20)), 0.99)
"""Shares of replicas at the points of the outlook."""


class PhaseWork(Struct, frozen=True):
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


def mean(values: FloatArray) -> float:
    """Mean with an exact sum, so that all platforms give the same digits."""
    return math.fsum(values.ravel().tolist()) / values.size


def spread(values: FloatArray, predicted: float) -> RunSpread:
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


def date_text(start: datetime.date, seconds: float) -> str:
    """The day (YYYY-MM-DD) so many seconds after a date."""
    latest = (datetime.date.max - start).days
    return (start + datetime.timedelta(days=min(int(seconds / SECONDS_PER_DAY), latest))).isoformat()


def outlook(start: datetime.date | None, wall_s: FloatArray, bill: Rates) -> Iterator[OutlookRow]:
    """Points of the distribution of end and bill."""
    ordered = sorted(wall_s.tolist())
    for share in OUTLOOK_SHARES:
        seconds = _percentile(ordered, share)
        yield OutlookRow(
            share=share,
            days=seconds / SECONDS_PER_DAY,
            finish=None if start is None else date_text(start, seconds),
            cost_usd=bill.usd_of_run(seconds / SECONDS_PER_DAY * HOURS_PER_DAY),
        )


class Ledger(Struct, frozen=True, dict=True):
    """Sums over phases, causes and runs in GPU-hours and dollars."""

    phases: Sequence[PhaseWork]
    runs: Sequence[RunBooks]
    gpus: int
    bill: Rates
    start_s: float
    """Seconds of one start of the job."""
    mean_w: float | None = None
    """Mean W of a billed GPU with its share of the node; None where no power by use is known."""

    def __post_init__(self) -> None:
        """The books balance, or this program is wrong."""
        assert all(run.balanced for run in self.runs), "every nanosecond is booked once"

    @property
    def startup_s(self) -> float:
        """Seconds of all starts that no interruption causes (eq. J10)."""
        return self.start_s * sum(phase.starts for phase in self.phases)

    @property
    def stated_s(self) -> float:
        """Seconds of the phases that the plan states."""
        return math.fsum(phase.seconds for phase in self.phases if phase.stated)

    @cached_property
    def wall_s(self) -> FloatArray:
        """Seconds of the whole run, [runs]."""
        fixed = self.stated_s + self.startup_s
        return np.array([sum(run.wall_ns) / NS + fixed for run in self.runs])

    def interruptions(self) -> FloatArray:
        """Number of interruptions [runs]."""
        return np.array([float(sum(run.stops.values())) for run in self.runs])

    def goodput(self) -> FloatArray:
        """Training over wall time [runs], without stated phases."""
        walls = [sum(run.wall_ns) / NS + self.startup_s for run in self.runs]
        trained = [run.seconds("productive") for run in self.runs]
        return np.array([a / b if b > 0.0 else 1.0 for a, b in zip(trained, walls, strict=True)])

    @cached_property
    def totals(self) -> dict[tuple[int, str, int], int]:
        """Group-nanoseconds of all runs by phase, part and cause."""
        sums: defaultdict[tuple[int, str, int], int] = defaultdict(int)
        for run in self.runs:
            for key, ns in run.ns.items():
                sums[key] += ns
        return dict(sums)

    def hours(self, *parts: str, cause: int | None = None) -> float:
        """GPU-hours of some parts, the mean over the runs; the sum of nanoseconds is exact."""
        ns = sum(n for (_, part, c), n in self.totals.items() if part in parts and cause in (None, c))
        return ns * self.gpus / (self.runs[0].groups * len(self.runs) * NS_PER_HOUR)

    def rows(self) -> list[PhaseReport]:
        """One row for each phase."""
        reports, simulated = [], 0
        for phase in self.phases:
            wall_s = work_s = phase.seconds
            if not phase.stated:
                wall_s = sum(run.wall_ns[simulated] for run in self.runs) / len(self.runs) / NS
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

    def gpu_hours(self) -> GpuHours:
        """GPU-hours by use; their exactly rounded sum is the total."""
        parts = {
            "productive": self.hours("productive") + self.stated_s * self.gpus / SECONDS_PER_HOUR,
            "startup": self.startup_s * self.gpus / SECONDS_PER_HOUR,
            "waiting_for_spares": self.hours("waiting"),
        }
        for part in ("checkpoints", "lost", "detection", "restart", "slow nodes", "fewer groups",
                     "fault tolerance", "planned"):  # fmt: skip
            parts[part.replace(" ", "_")] = self.hours(part)
        total = math.fsum(parts.values())
        return GpuHours(**parts, total=total, billed=total / self.gpus * self.bill.gpus)

    def billed(self, plan: RunPlan, cluster: Cluster, power: BoardPower | None) -> Ledger:
        """The ledger with its bill and the mean power of a billed GPU; spares wait (eq. J8)."""
        spare_nodes, mean_w = plan.spares.count if plan.spares else 0, None
        if power is not None:
            hours = self.gpu_hours()
            busy = math.fsum((hours.productive, hours.lost, hours.slow_nodes, hours.fault_tolerance))
            share = busy / (hours.total * (1.0 + spare_nodes / cluster.nodes))
            mean_w = power.waiting_w + (power.training_w - power.waiting_w) * share
        drawn = Drawn(mean_w, mean(self.wall_s) / SECONDS_PER_HOUR, plan.start)
        return replace(self, bill=rates(cluster, plan.price, spare_nodes, drawn), mean_w=mean_w)

    def causes(self, names: Sequence[str]) -> list[CauseReport]:
        """The cost of each cause."""
        unit = self.gpus / (self.runs[0].groups * NS_PER_HOUR)
        taken: list[dict[int, int]] = []
        counts: defaultdict[int, int] = defaultdict(int)
        for run in self.runs:
            sums: defaultdict[int, int] = defaultdict(int)
            for (_, _, cause), ns in run.ns.items():
                sums[cause] += ns
            taken.append(sums)
            for (_, cause), number in run.stops.items():
                counts[cause] += number
        rows = []
        for i, name in enumerate(names):
            each = [sums.get(i, 0) * unit for sums in taken]
            rows.append(
                CauseReport(
                    cause=name,
                    interruptions=counts[i] / len(self.runs),
                    lost_gpu_hours=self.hours("lost", cause=i),
                    detection_gpu_hours=self.hours("detection", cause=i),
                    restart_gpu_hours=self.hours("restart", cause=i),
                    waiting_gpu_hours=self.hours("waiting", cause=i),
                    planned_gpu_hours=self.hours("planned", "checkpoints", cause=i),
                    gpu_hours=spread(np.array(each), math.fsum(each) / len(each)),
                )
            )
        return rows

    def mean_groups(self) -> float | None:
        """Share of the groups at work while training."""
        groups, trained = self.runs[0].groups, sum(run.trained_ns for run in self.runs)
        return (
            sum(run.active_ns for run in self.runs) / (groups * trained) if groups > 1 and trained else None
        )

    def median(self) -> int:
        """Number of the run whose length is the median."""
        walls = self.wall_s.tolist()
        return sorted(range(len(walls)), key=lambda i: (walls[i], i))[(len(walls) - 1) // 2]

    def timeline(self, run: RunBooks, replica: int) -> RunTimeline:
        """The rows of a run that kept its timeline, with start-ups and stated phases in their places."""
        rows: list[TimelineRow] = []
        shift, simulated, end = 0.0, 0, 0.0
        for phase in self.phases:
            if phase.starts and self.start_s:
                rows.append(
                    TimelineRow(
                        begin_s=end, end_s=end + self.start_s, what="start-up", why="", phase=phase.name
                    )
                )
                shift += self.start_s
            if phase.stated:
                rows.append(
                    TimelineRow(
                        begin_s=end, end_s=end + phase.seconds, what="as stated", why="", phase=phase.name
                    )
                )
                shift += phase.seconds
                end += phase.seconds
                continue
            rows += [
                TimelineRow(
                    begin_s=row.begin_s + shift, end_s=row.end_s + shift, what=row.what, why=row.why,
                    phase=phase.name,
                )
                for row in run.timeline
                if row.phase == simulated
            ]  # fmt: skip
            simulated += 1
            end = rows[-1].end_s if rows else 0.0
        return RunTimeline(
            replica=replica, rows=tuple(rows[:MOST_ROWS]), omitted=max(0, len(rows) - MOST_ROWS)
        )
