"""The command `run`: predicts phases, interruptions, finish date and cost of a whole training run."""

from __future__ import annotations

from collections.abc import Callable
from math import isclose
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moesim.cli.console import AsJson, ScenarioName, default_lines, print_text, table_lines, working
from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.hwmodels.summary_text import percent, short

if TYPE_CHECKING:
    from moesim.simulator.run.report import CheckpointReport, FinishDates, RunReport, RunSpread


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
        "causes": _causes(report),
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


def _causes(report: RunReport) -> str:
    first = sorted(report.causes, key=lambda cause: -cause.interruptions)[:5]
    named = [f"{cause.cause} {cause.interruptions:.1f}" for cause in first if cause.interruptions > 0.0]
    more = len(report.causes) - len(first)
    shown = ", ".join(named)
    return f"{shown}, {more} more" if named and more > 0 else shown


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
    assumptions: Annotated[
        Path | None,
        typer.Option(
            help="CSV or YAML of the figures behind the bill: written if it does not exist, else applied."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of every draw; short for --set seed=N.")] = None,
) -> None:
    """Predict the whole run: phases, failures and restarts, finish date, cost, energy.

    A run that does not mention failures has published ones of its accelerator, chosen by rule and listed in
    the report; --set run.failures=none leaves them out.
    """
    with working(f"simulating {scenario}") as say:
        from moesim.simulator.predict.step import execute, prepare
        from moesim.simulator.scenario import load_scenario
        from moesim.simulator.scenario.inputs import inputs_of
        from moesim.simulator.studies.whole_run import (
            uncertain_report,
            with_assumptions,
            with_default_stops,
            write_assumptions,
        )

        extra = [] if seed is None else [f"seed={seed}"]
        loaded, told = load_scenario(scenario, [*(overrides or []), *extra]), ""
        if assumptions is not None and assumptions.exists():
            loaded, changed = with_assumptions(loaded, assumptions)
            told = f"assumptions: {assumptions}: {', '.join(changed) or 'no row differs'}"
        elif assumptions is not None:
            count = write_assumptions(loaded, assumptions)
            told = f"assumptions: {count} rows written to {assumptions}; edit them and run this again"
        try:
            with_stops, assumed = with_default_stops(loaded)
            prepared = prepare(with_stops)
            say(f"{loaded.name}: steps, phases and interruptions")
            report = uncertain_report(prepared, execute(prepared).executions)
            report = report.model_copy(update={"inputs": inputs_of(loaded), "defaults": assumed})
        except (InputError, InfeasibleError) as error:
            raise type(error)(f"{scenario}: {error}") from None
    if as_json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        title = f"{loaded.name}, the whole run on {prepared.cluster.n_gpus:,} GPUs"
        print_text("\n".join([title, *(report.inputs.lines() if report.inputs else ()), ""]))
        print_text("\n".join([*report_lines(report), *([told] if told else [])]))
    if not prepared.memory.fits:
        raise InfeasibleError(f"{loaded.name}: {prepared.memory.shortage}")
