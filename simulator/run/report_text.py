"""The text with which the report of a run prints itself (pure)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from moesim.simulator.common.summary_text import count, percent, short, titled

if TYPE_CHECKING:
    from moesim.simulator.run.report import RunReport, RunSpread


def report_text(report: RunReport) -> str:
    """The whole run in about ten lines: duration, finish, goodput, interruptions, cost and energy."""
    hours, finish = report.gpu_hours, report.finish
    steps = sum(phase.steps for phase in report.phases)
    intervals = "interruptions only" if report.step_factor is None else "interruptions and the step time"
    return titled(
        f"whole run: {count(len(report.phases), 'phase')}, {steps:,} simulated steps",
        {
            "days": spread_text(report.days, "{:.1f}".format),
            "finish": f"{finish.predicted} (P10 {finish.p10}, P90 {finish.p90})" if finish else "",
            "goodput": spread_text(report.goodput, percent),
            "interruptions": spread_text(report.interruptions, "{:.1f}".format),
            "GPU-hours": f"{short(hours.total)} of the job, {short(hours.billed)} billed",
            "cost": spread_text(report.cost_usd, _dollars) or report.price,
            "energy": spread_text(report.energy_kwh, lambda value: f"{value / 1e6:.2f} GWh"),
            "intervals": f"P10 to P90 over {count(report.replicas, 'run')}: {intervals}",
            "more": ".to_dict(), .to_pandas()",
        },
    )


def spread_text(spread: RunSpread | None, form: Callable[[float], str]) -> str:
    """The predicted value with its percentiles where they differ; empty without a value."""
    if spread is None:
        return ""
    if spread.p10 == spread.p90:
        return form(spread.predicted)
    return f"{form(spread.predicted)} (P10 {form(spread.p10)}, P90 {form(spread.p90)})"


def _dollars(value: float) -> str:
    return f"${short(value, 4)}"
