"""The report of a simulated run, as plain numbers that `moesim run --json` prints."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import Field

from moesim.hwmodels.frozen import Frozen, count, percent, short, titled
from moesim.hwmodels.units import SECONDS_PER_DAY, SECONDS_PER_HOUR
from moesim.simulator.common.tables import Row, TableResult
from moesim.simulator.scenario.defaults import Default
from moesim.simulator.scenario.inputs import Inputs

NOT_MODELLED = "not predicted: no failures are modelled; state run.failures, such as llama3-16k-h100"
"""What stands in the place of the goodput of a run without failures."""

HOURS_PER_DAY = SECONDS_PER_DAY / SECONDS_PER_HOUR


class RunSpread(Frozen):
    """A figure as predicted, with the 10 %, 50 % and 90 % points of its distribution.

    `predicted`: the mean over random interruptions with every input at its stated value; the tables of
    GPU-hours and the parts of the bill add up to it. The percentiles are over the replicas, which vary in
    their interruptions and, where it is uncertain, in the step time.
    """

    predicted: float
    p10: float
    p50: float
    p90: float


def per_hour(days: RunSpread, rate: float | None) -> RunSpread | None:
    """Hours of the run times a rate, for the mean and all percentiles; None without a rate."""
    if rate is None:
        return None
    return RunSpread(**{name: value * HOURS_PER_DAY * rate for name, value in days.model_dump().items()})


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


class CheckpointReport(Frozen):
    """Size, times and best intervals of checkpoints (docs/model.md, eqs. J2, J3 and J6)."""

    bytes: float
    interval_s: float
    stall_s: float
    write_s: float
    mean_time_between_interruptions_s: float | None
    young_s: float | None
    daly_s: float | None
    optimal_s: float | None
    """Interval with the least exactly expected time, but no shorter than an asynchronous write."""


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
    assumptions: tuple[str, ...]
    defaults: tuple[Default, ...] = ()
    """Failures, restart and checkpoints that the scenario left out, with the rule that chose them."""
    replicas: int
    seed: int
    step_factor: RunSpread | None = None
    """Step time of the replicas over the predicted one; None where only interruptions are uncertain."""
    outlook: tuple[OutlookRow, ...] = ()
    """21 points from 1 to 99 % of the distribution of finish and cost."""

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
