"""The command `sensitivity`: shows how far each uncertain input moves the step time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from moesim.cli.options import AsJson, EngineDraws, Overrides, ScenarioName
from moesim.hwmodels.errors import InputError

if TYPE_CHECKING:
    from moesim.simulator.predict.band import EngineBands, Uncertainty


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(sensitivity)


def sensitivity(
    scenario: ScenarioName,
    overrides: Overrides = None,
    ranges: Annotated[
        list[str] | None,
        typer.Option("--range", metavar="KEY=LOW,HIGH", help="A scenario key that is uncertain; repeatable."),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Further seeds of load and jitter to run.", min=0, max=1000)] = 0,
    exact: Annotated[
        int, typer.Option(help="Number of calibration entries to simulate again.", min=0, max=1000)
    ] = 0,
    engine_draws: EngineDraws = 0,
    top: Annotated[int, typer.Option(help="Rows of the table.", min=1)] = 20,
    as_json: AsJson = False,
) -> None:
    """Show the step time with every uncertain input alone at its low and high end, largest effect first."""
    from moesim.cli.console import print_json, print_table, print_text, working
    from moesim.simulator.scenario import load_scenario
    from moesim.simulator.studies.sensitivity import sensitivity as run

    between = dict(map(_range, ranges or []))
    with working(f"varying the inputs of {scenario}") as say:
        found = run(
            load_scenario(scenario, overrides or []),
            between,
            seeds=seeds,
            exact=exact,
            engine_draws=engine_draws,
            say=draws_done(say),
        )
    if as_json:
        print_json(found.to_dict())
        return
    step = found.step
    print_text(
        f"{found.scenario}: step {step.predicted:.3f} s; P10 {step.p10:.3f}, P50 {step.p50:.3f}, "
        f"P90 {step.p90:.3f} s"
    )
    print_text("\n".join(found.inputs.lines()))
    if found.by_engine is not None:
        print_engine_bands(found.by_engine)
    headers = ("source", "low", "high", "change at low", "at high", "step at low", "step at high", "from")
    rows = [
        (
            row["source"],
            row["low"],
            row["high"],
            f"{row['change_low']:+.2%}",
            f"{row['change_high']:+.2%}",
            f"{row['step_low_s']:.3f}",
            f"{row['step_high_s']:.3f}",
            row["from"],
        )
        for row in found.rows()[:top]
    ]
    print_table(headers, rows, right=(1, 2, 3, 4, 5, 6))
    if len(found.effects) > top:
        print_text(f"{len(found.effects) - top} smaller ones: --top {len(found.effects)}")


def _range(text: str) -> tuple[str, tuple[object, object]]:
    from moesim.simulator.common.key_values import key_and_text
    from moesim.simulator.common.lists import parse_values

    form = "KEY=LOW,HIGH, for example communication.sms=8,32"
    key, ends = key_and_text(text, "--range", form)
    values = parse_values(ends, f"--range {key}")
    if len(values) != 2:
        raise InputError(f"--range {text!r}: write {form}")
    return key, (values[0], values[1])


def print_bands(bands: Uncertainty) -> None:
    """Print the intervals of a prediction and its largest sources of uncertainty."""
    from moesim.cli.console import print_table, print_text
    from moesim.simulator.common.tables import cell

    print_text("\nhow sure: 80 % lie between P10 and P90 (docs/model.md, section 16)")
    names = ("predicted", "p10", "p50", "p90")
    rows = [(row["figure"], *(cell(row[name]) for name in names)) for row in bands.rows()]
    print_table(("", "predicted", "P10", "P50", "P90"), rows, right=(1, 2, 3, 4))
    first = "; ".join(f"{e.source} {e.low_s:.2f} to {e.high_s:.2f} s" for e in bands.sources[:3])
    print_text(f"most of it: {first}")
    print_text(bands.note)
    if bands.by_engine is not None:
        print_engine_bands(bands.by_engine)


def draws_done(say: Callable[[str], None]) -> Callable[[int, int], None]:
    """A function that shows how many engine runs are done."""
    return lambda done, draws: say(f"{done} of {draws} engine runs")


def print_engine_bands(found: EngineBands) -> None:
    """Print the intervals by the engine itself, and the error of the first-order ones over the same draws."""
    from moesim.cli.console import print_table, print_text
    from moesim.simulator.common.tables import cell

    print_text(f"\nby {found.draws:,} engine runs with all uncertain inputs off together (eq. U7)")
    rows = [
        (name, cell(band.predicted), cell(band.p10), cell(band.p50), cell(band.p90))
        for name, band in found.bands.items()
    ]
    print_table(("", "predicted", "P10", "P50", "P90"), rows, right=(1, 2, 3, 4))
    print_text(
        "over these draws the first-order step time differs from the engine's by "
        f"{found.first_order_mean:+.2%} in the mean and {found.first_order_rms:.2%} rms"
    )
