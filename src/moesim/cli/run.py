"""The command `run`: predicts phases, interruptions, finish date and cost of a whole training run."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping
from html import escape
from math import isclose
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moesim.cli.console import (
    AsJson,
    Force,
    ScenarioName,
    check_new,
    default_lines,
    print_text,
    table_lines,
    working,
)
from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.hwmodels.summary_text import percent, short

if TYPE_CHECKING:
    from moesim.simulator.run.events import RunTimeline
    from moesim.simulator.run.failures import CheckpointReport
    from moesim.simulator.run.report import FinishDates, RunReport, RunSpread

GANTT_KINDS = (".svg", ".html", ".json")


# -- run report --------------------------------------------------------------------------------------
# The report of a whole run as text.


def report_lines(report: RunReport) -> list[str]:
    """Lines of the report: a table of the phases, then finish, goodput, checkpoints, cost and energy."""
    cells = []
    for row in report.phases:
        cost = "" if row.cost_usd is None else f"${short(row.cost_usd)}"
        steps = ("as stated", "") if row.stated else (f"{row.steps:,}", f"{row.step_time_s:.2f}")
        hours = (short(row.gpu_hours), short(row.gpu_hours_with_stops))
        cells.append((row.phase, *steps, f"{row.days:.2f}", *hours, cost))
    headers = ("the whole run", "steps", "step (s)", "days", "GPU-hours", "with stops", "cost")
    lines = table_lines(headers, cells, right=range(1, 7))
    rows = {
        "finish": _finish(report),
        "how sure": _sure(report),
        "goodput": _goodput(report),
        "GPU-hours": _hours(report),
        "checkpoints": _checkpoints(report.checkpoint),
        "tiers": _tiers(report.checkpoint),
        "restart": _restart(report),
        "causes": _causes(report),
        "groups": "" if report.mean_groups is None else f"{percent(report.mean_groups)} at work in training",
        "cost": _cost(report),
        "energy": _energy(report),
    }
    lines += [f"{name:<12}{text}" for name, text in rows.items() if text]
    lines += [f"assumed: {text}" for text in report.assumptions]
    return [*lines, *default_lines(report)]


def _points(spread: RunSpread | FinishDates, form: Callable[[Any], str]) -> str:
    """The predicted value, with its percentiles if they differ, such as 3 (P10 2, P50 3, P90 5)."""
    if spread.p10 == spread.p90:
        return form(spread.predicted)
    return (
        f"{form(spread.predicted)} (P10 {form(spread.p10)}, P50 {form(spread.p50)}, P90 {form(spread.p90)})"
    )


def _dollars(value: float) -> str:
    return f"${short(value, 4)}"


def _finish(report: RunReport) -> str:
    text = f"predicted days {_points(report.days, '{:.1f}'.format)}"
    if report.finish is not None:
        text += f"; predicted date {_points(report.finish, str)}"
    return text if report.replicas == 1 else f"{text}; {report.replicas:,} runs simulated"


def _sure(report: RunReport) -> str:
    if report.step_factor is None:
        return "intervals hold stops only; `moesim run` and --uncertainty add the step time's"
    factor = report.step_factor
    chances = {0.05: "5 %", 0.25: "25 %", 0.75: "75 %", 0.95: "95 %"}
    days = ", ".join(
        f"{chances[row.share]} by {row.days:.1f}" for row in report.outlook if row.share in chances
    )
    return (
        f"step time {factor.p10:.3f} to {factor.p90:.3f} of the predicted one (P10 to P90), in all intervals "
        f"below and above; days: {days}"
    )


def _goodput(report: RunReport) -> str:
    if not report.interrupted:
        from moesim.simulator.run.report import NOT_MODELLED

        return NOT_MODELLED
    return (
        f"predicted {_points(report.goodput, percent)}; closed form {percent(report.goodput_expected)}; "
        f"interruptions {_points(report.interruptions, '{:.1f}'.format)}"
    )


def _hours(report: RunReport) -> str:
    hours = report.gpu_hours
    if hours.total == hours.billed and isclose(hours.total, hours.productive + hours.startup):
        return ""
    parts = {
        "productive": hours.productive,
        "start-up": hours.startup,
        "done again": hours.lost,
        "detection": hours.detection,
        "restart": hours.restart,
        "waiting for spares": hours.waiting_for_spares,
        "checkpoints": hours.checkpoints,
        "slow nodes": hours.slow_nodes,
        "groups away": hours.fewer_groups,
        "fault tolerance": hours.fault_tolerance,
        "maintenance": hours.planned,
    }
    shown = ", ".join(f"{short(value)} {name}" for name, value in parts.items() if value >= 0.5)
    return f"{short(hours.total, 4)}: {shown}; {short(hours.billed, 4)} billed"


def _checkpoints(saved: CheckpointReport | None) -> str:
    if saved is None:
        return ""
    text = (
        f"{saved.bytes / 1e12:.2f} TB every {_time(saved.interval_s)}, training waits "
        f"{_time(saved.stall_s)}, the write takes {_time(saved.write_s)}"
    )
    if saved.optimal_s is None or saved.young_s is None or saved.daly_s is None:
        return text
    return (
        f"{text}; best interval {_time(saved.optimal_s)} (Young {_time(saved.young_s)}, "
        f"Daly {_time(saved.daly_s)})"
    )


def _time(seconds: float) -> str:
    from moesim.hwmodels.units import SECONDS_PER_HOUR

    for unit, size in (("h", SECONDS_PER_HOUR), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.2g} s"


def _tiers(saved: CheckpointReport | None) -> str:
    rows = () if saved is None else saved.tiers
    return "; ".join(
        f"{row.tier} every {_time(row.interval_s)}, training waits {_time(row.stall_s)}, loads in "
        f"{_time(row.load_s)}" + (f", best {_time(row.optimal_s)}" if row.optimal_s is not None else "")
        for row in rows
    )


def _restart(report: RunReport) -> str:
    parts = report.restart_parts
    if not parts:
        return ""
    shown = ", ".join(f"{name.replace('_', ' ')} {_time(value)}" for name, value in parts.items() if value)
    return f"{_time(sum(parts.values()))} of a job that is queued again: {shown}"


def _causes(report: RunReport) -> str:
    """The costliest causes, with their interruptions and the GPU-hours that they take."""
    first = sorted(report.causes, key=lambda cause: -cause.gpu_hours.predicted)[:5]
    named = [
        f"{cause.cause} {cause.interruptions:.1f} ({short(cause.gpu_hours.predicted)} GPU-h, P10 "
        f"{short(cause.gpu_hours.p10)}, P90 {short(cause.gpu_hours.p90)})"
        for cause in first
        if cause.interruptions > 0.0
    ]
    more = len(report.causes) - len(first)
    shown = ", ".join(named)
    return f"{shown}, {more} more" if named and more > 0 else shown


# -- one run as a picture and as a table --------------------------------------------------------------

LANES: Mapping[str, tuple[str, str]] = {
    "start-up": ("#009e73", "start-up"),
    "training": ("#0072b2", "training"),
    "slow": ("#f0e442", "training, slow node"),
    "checkpoints": ("#cc79a7", "last checkpoint"),
    "fault": ("#000000", "faults"),
    "detection": ("#e69f00", "detection"),
    "waiting": ("#999999", "waiting for nodes"),
    "restart": ("#d55e00", "restart"),
    "planned": ("#56b4e9", "maintenance"),
    "as stated": ("#666666", "as stated"),
}
"""Colour and name of what a job can do; each has a lane in the picture."""


def gantt_svg(timeline: RunTimeline, title: str) -> str:
    """One run as an SVG: a lane for each thing that the job does, days on the axis, causes as tooltips."""
    lanes = [what for what in LANES if any(row.what == what for row in timeline.rows)]
    left, wide, high = 150, 1000, 26
    total = max(row.end_s for row in timeline.rows)
    scale, days = wide / total, total / 86400.0
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + wide + 20}" '
        f'height="{high * len(lanes) + 70}" font-family="sans-serif" font-size="12">',
        f'<text x="{left}" y="16">{escape(title)}</text>',
    ]
    for number, what in enumerate(lanes):
        out.append(f'<text x="4" y="{42 + high * number}">{escape(LANES[what][1])}</text>')
    for row in timeline.rows:
        top, length = 28 + high * lanes.index(row.what), (row.end_s - row.begin_s) * scale
        text = f"{row.phase}: {LANES[row.what][1]}{' - ' + row.why if row.why else ''}, "
        text += f"day {row.begin_s / 86400.0:.3f}, {_time(row.end_s - row.begin_s)}"
        out.append(
            f'<rect x="{left + row.begin_s * scale:.3f}" y="{top}" width="{max(length, 0.6):.3f}" '
            f'height="{high - 6}" fill="{LANES[row.what][0]}"><title>{escape(text)}</title></rect>'
        )
    step = max(1, round(days / 10))
    for day in range(0, int(days) + 1, step):
        x = left + day * 86400.0 * scale
        out.append(f'<text x="{x:.1f}" y="{high * len(lanes) + 48}">day {day}</text>')
    return "\n".join([*out, "</svg>\n"])


def gantt_trace(timeline: RunTimeline) -> str:
    """One run as Chrome/Perfetto JSON; a microsecond of the trace is one of the run."""
    lanes = {what: number for number, what in enumerate(LANES)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": LANES[what][1]}}
        for what, number in lanes.items()
    ]
    for row in timeline.rows:
        begin, end = row.begin_s * 1e6, row.end_s * 1e6
        events.append(
            {
                "ph": "X", "name": row.why or LANES[row.what][1], "cat": row.what, "pid": 0,
                "tid": lanes[row.what], "ts": begin, "dur": end - begin, "args": {"phase": row.phase},
            }
        )  # fmt: skip
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def events_csv(timeline: RunTimeline) -> str:
    """One run as CSV: what the job did from when to when, in s, and why."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("begin_s", "end_s", "what", "why", "phase"))
    table.writerows((row.begin_s, row.end_s, row.what, row.why, row.phase) for row in timeline.rows)
    return text.getvalue()


def _write_files(report: RunReport, title: str, gantt: Path | None, events: Path | None) -> None:
    timeline = report.timeline
    if timeline is None:
        raise InputError(
            "nothing stops this run, so there is nothing to draw: leave out --gantt and --events, or do not "
            "set run.failures=none"
        )
    title = f"{title}, run {timeline.replica} of {report.replicas}, of median length"
    if timeline.omitted:
        title += f"; {timeline.omitted:,} rows at the end left out"
    if gantt is not None:
        kind = gantt.suffix.lower()
        text = gantt_trace(timeline) if kind == ".json" else gantt_svg(timeline, title)
        if kind == ".html":
            head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
            text = f"{head}{text}</html>\n"
        gantt.write_text(text, encoding="utf-8")
    if events is not None:
        events.write_text(events_csv(timeline), encoding="utf-8")


def _cost(report: RunReport) -> str:
    if report.cost_usd is None:
        return report.price
    parts = report.cost_parts_usd
    shown = f" ({', '.join(f'{k} ${short(v)}' for k, v in parts.items())})" if len(parts) > 1 else ""
    return f"predicted {_points(report.cost_usd, _dollars)}{shown}; {report.price}"


def _energy(report: RunReport) -> str:
    if report.energy_kwh is None or report.co2_kg is None:
        return ""
    paid = "" if report.electricity_usd is None else f", ${short(report.electricity_usd)} of electricity"
    energy, co2 = report.energy_kwh.predicted / 1e6, report.co2_kg.predicted / 1e3
    return f"predicted {energy:.2f} GWh{paid}, {co2:,.0f} t CO2e"


def run(
    scenario: ScenarioName,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Replace a scenario key, such as run.start=2026-12-01; repeatable.",
        ),
    ] = None,
    as_json: AsJson = False,
    seed: Annotated[int | None, typer.Option(help="Seed of every draw; short for --set seed=N.")] = None,
    gantt: Annotated[
        Path | None,
        typer.Option(help="Draw the run of median length: .svg or .html, or .json for Perfetto."),
    ] = None,
    events: Annotated[Path | None, typer.Option(help="Write the events of the same run as CSV.")] = None,
    force: Force = False,
) -> None:
    """Predict the whole run: phases, failures and restarts, finish date, cost, energy.

    A run that does not mention failures has published ones of its accelerator, chosen by rule and listed in
    the report; --set run.failures=none leaves them out.
    """
    check_new(gantt, force)
    check_new(events, force)
    if gantt is not None and gantt.suffix.lower() not in GANTT_KINDS:
        raise InputError(f"--gantt {gantt}: the file must end in {', '.join(GANTT_KINDS)}")
    with working(f"simulating {scenario}") as say:
        from moesim.simulator.predict.step import execute, prepare
        from moesim.simulator.scenario import load_scenario
        from moesim.simulator.scenario.inputs import inputs_of
        from moesim.simulator.studies.whole_run import uncertain_report, with_default_stops

        extra = [] if seed is None else [f"seed={seed}"]
        loaded = load_scenario(scenario, [*(overrides or []), *extra])
        try:
            with_stops, assumed = with_default_stops(loaded)
            prepared = prepare(with_stops)
            say(f"{loaded.name}: steps, phases and interruptions")
            report = uncertain_report(prepared, execute(prepared).executions)
            report = report.model_copy(update={"inputs": inputs_of(loaded), "defaults": assumed})
        except (InputError, InfeasibleError) as error:
            raise type(error)(f"{scenario}: {error}") from None
    if gantt is not None or events is not None:
        _write_files(report, f"{loaded.name} on {prepared.cluster.n_gpus:,} GPUs", gantt, events)
    if as_json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        title = f"{loaded.name}, the whole run on {prepared.cluster.n_gpus:,} GPUs"
        print_text("\n".join([title, *(report.inputs.lines() if report.inputs else ()), ""]))
        print_text("\n".join(report_lines(report)))
    if not prepared.memory.fits:
        raise InfeasibleError(f"{loaded.name}: {prepared.memory.shortage}")
