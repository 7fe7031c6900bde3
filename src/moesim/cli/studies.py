"""The commands of studies: `compare`, `sweep`, `sensitivity`, and the causes of `explain`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moesim.cli.console import (
    AsJson,
    EngineDraws,
    Overrides,
    ScenarioName,
    Scheduler,
    print_json,
    print_table,
    print_text,
    working,
)
from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.hwmodels.summary_text import percent

if TYPE_CHECKING:
    from moesim.simulator.predict.result import Result
    from moesim.simulator.predict.step import Prepared
    from moesim.simulator.predict.work_size import EngineBands, Uncertainty
    from moesim.simulator.studies.explain import Counterfactuals
    from moesim.simulator.studies.sweep import Sweep


# -- compare -----------------------------------------------------------------------------------------
# The command `compare`: compares scenarios and splits their difference by cause.


def compare(
    scenarios: Annotated[
        list[str], typer.Argument(metavar="SCENARIO...", help="Preset names or files; the first is the base.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="[N:]KEY=VALUE", help="Replace a key of all scenarios, or of the N-th (from 1)."
        ),
    ] = None,
    variants: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar="KEY=VALUE[;KEY=VALUE]",
            help="One more scenario: the first one with these keys replaced; repeatable.",
        ),
    ] = None,
    uncertainty: Annotated[
        bool, typer.Option("--uncertainty", help="Add intervals of the differences.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare two to four scenarios: figures, changed keys, and the seconds by cause."""
    import moesim

    common, own = _assigned(overrides or [], len(scenarios))
    sets = [[*common, *own.get(number, [])] for number in range(1, len(scenarios) + 1)]
    loaded = [moesim.load(name, *extra) for name, extra in zip(scenarios, sets, strict=True)]
    # A scenario that is given twice is told apart by the keys that differ.
    names: list[str | None] = [name if scenarios.count(name) == 1 else None for name in scenarios]
    for variant in variants or []:
        keys = [text.strip() for text in variant.split(";") if text.strip()]
        loaded.append(moesim.load(scenarios[0], *sets[0], *keys))
        names.append(variant)
    with working(f"comparing {len(loaded)} scenarios"):
        found = moesim.compare(loaded, names=names, uncertainty=uncertainty)
    if as_json:
        print_json(found.to_dict())
        return
    for number, side in enumerate(found.sides):
        changes = [f"{key}: {old} -> {new}" for key, (old, new) in side.differs.items()]
        print_text(f"{number}: {side.name}" + (f" ({'; '.join(changes)})" if changes else ""))
        print_text("\n".join(side.inputs.lines()))
        if side.delta_s is not None:
            d = side.delta_s
            print_text(
                f"   step {d.predicted:+.3f} s; P10 {d.p10:+.3f}, P50 {d.p50:+.3f}, P90 {d.p90:+.3f} s"
            )
    for title, rows in (("", found.rows()), ("critical path, seconds", found.waterfall_rows())):
        print_text("")
        columns = list(dict.fromkeys(key for row in rows for key in row))
        heads = [title, *(name.split(":")[0] if ": " in name else name for name in columns[1:])]
        cells = [tuple(_text(row.get(name), name) for name in columns) for row in rows]
        print_table(heads, cells, right=range(1, len(columns)))


def _text(value: object, column: str) -> str:
    from moesim.simulator.common.tables import cell as shown

    if column.startswith("change") and isinstance(value, float):
        return f"{value:+,.0f}" if abs(value) >= 1e4 else f"{value:+.4g}"
    return shown(value)


def _assigned(texts: list[str], count: int) -> tuple[list[str], dict[int, list[str]]]:
    """The overrides of all scenarios, and those of single scenarios by number (from 1)."""
    common: list[str] = []
    own: dict[int, list[str]] = {}
    for text in texts:
        number, colon, rest = text.partition(":")
        if not (colon and number.isascii() and number.isdigit()):
            common.append(text)
        elif 1 <= int(number) <= count:
            own.setdefault(int(number), []).append(rest)
        else:
            raise InputError(f"--set {text!r}: there are {count} scenarios, numbered from 1")
    return common, own


# -- sweep -------------------------------------------------------------------------------------------
# The command `sweep`: predicts a scenario at many points.

MOST_REASONS = 5
"""Most reasons that the message of a sweep without a possible point names."""


def sweep(
    scenario: ScenarioName,
    vary: Annotated[
        list[str],
        typer.Option(
            metavar="KEY=VALUES",
            help="A scenario key and its values: 8,16,24 or [8,16,24] or 0..48:4 or 8..256:x2; repeatable. "
            "Values that are lists are a list of lists: [[1,2],[2,1]].",
        ),
    ],
    overrides: Overrides = None,
    design: Annotated[str, typer.Option(help="grid, list, random or sobol.")] = "grid",
    points: Annotated[int | None, typer.Option(help="Points, for random and sobol.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of random and sobol.", min=0)] = 0,
    workers: Annotated[int | None, typer.Option(help="Local processes; default: processor cores.")] = None,
    scheduler: Scheduler = None,
    store: Annotated[
        Path | None,
        typer.Option(
            help="SQLite file that keeps every point; started again, only missing ones are computed."
        ),
    ] = None,
    uncertainty: Annotated[bool, typer.Option("--uncertainty", help="Add P10, P50 and P90.")] = False,
    as_json: AsJson = False,
) -> None:
    """Predict a scenario at every point of a space; --store keeps each point as soon as it is known."""
    import moesim
    from moesim.simulator.common.tables import cell
    from moesim.simulator.common.texts import key_and_text

    space: dict[str, str] = {}
    for text in vary:
        key, values = key_and_text(text, "--vary", "KEY=VALUES, for example communication.sms=0..48:4")
        if key in space:
            raise InputError(f"--vary {key} is given twice; put all values into one")
        space[key] = values
    base = moesim.load(scenario, *(overrides or []))
    told = -1

    def tell(now: moesim.Progress) -> None:
        nonlocal told
        if 100 * now.done // now.total > told:  # a log has a hundred lines at most
            told = 100 * now.done // now.total
            say(str(now))

    with working(f"sweeping {scenario}") as say:
        found = moesim.sweep(
            base,
            space,
            design=design,
            count=points,
            seed=seed,
            workers=workers,
            scheduler=scheduler,
            store=store,
            uncertainty=uncertainty,
            progress=tell,
        )
    if as_json:
        print_json(found.to_dict())
    else:
        print_text("\n".join([found.scenario, *found.inputs.lines()]))
        columns = ("step_time_s", "mfu_causal", "memory_bytes", "days", "cost_usd")
        headers = (*space, "status", "step (s)", "MFU", "GiB/GPU", "days", "cost ($)")
        refused = any(point.reason for point in found.points)
        rows = []
        for point in found.points:
            shown = dict(point.figures)
            if shown.get("memory_bytes") is not None:
                shown["memory_bytes"] = float(shown["memory_bytes"] or 0.0) / 2**30
            cells = [cell(shown.get(name)) for name in columns]
            why = (point.reason,) if refused else ()
            rows.append((*(str(v) for v in point.values.values()), point.status, *cells, *why))
        headers += ("why not",) if refused else ()
        print_table(headers, rows, right=range(len(space) + 1, len(space) + 6))
        kept = "" if store is None else f", {found.reused} from {store}"
        print_text(f"{len(found.points)} points, {found.computed} computed{kept}")
    check_possible(found)


def check_possible(found: Sweep) -> None:
    """Exit with 1 where a point failed; raise InfeasibleError or InputError where no point is possible."""
    failed = [point for point in found.points if point.status == "failed"]
    if failed:
        typer.echo(f"{len(failed)} points failed, first: {failed[0].reason}", err=True)
        raise typer.Exit(1)
    if not any(point.status == "ok" for point in found.points):
        fits_not = any(point.status == "does not fit" for point in found.points)
        first = found.reasons()[:MOST_REASONS]
        listed = "; ".join(f"{number} {status}: {why}" for (status, why), number in first)
        more = len(found.reasons()) - len(first)
        raise (InfeasibleError if fits_not else InputError)(
            f"none of the {len(found.points)} points is possible: {listed}"
            f"{f'; and {more} more reasons' if more else ''}"
        )


# -- sensitivity -------------------------------------------------------------------------------------
# The command `sensitivity`: shows how far each uncertain input moves the step time.


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
    scheduler: Scheduler = None,
    top: Annotated[int, typer.Option(help="Rows of the table.", min=1)] = 20,
    as_json: AsJson = False,
) -> None:
    """Show the step time with every uncertain input alone at its low and high end, largest effect first."""
    from moesim.simulator.scenario import load_scenario
    from moesim.simulator.studies.uncertainty import sensitivity as run

    between = dict(map(_range, ranges or []))
    with working(f"varying the inputs of {scenario}") as say:
        found = run(
            load_scenario(scenario, overrides or []),
            between,
            seeds=seeds,
            exact=exact,
            engine_draws=engine_draws,
            scheduler=scheduler,
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
    from moesim.simulator.common.texts import key_and_text, parse_values

    form = "KEY=LOW,HIGH, for example communication.sms=8,32"
    key, ends = key_and_text(text, "--range", form)
    values = parse_values(ends, f"--range {key}")
    if len(values) != 2:
        raise InputError(f"--range {text!r}: write {form}")
    return key, (values[0], values[1])


def print_bands(bands: Uncertainty) -> None:
    """Print the intervals of a prediction and its largest sources of uncertainty."""
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


def print_engine_bands(engine: EngineBands) -> None:
    """Print the intervals by the engine itself, and the error of the first-order ones over the same draws."""
    from moesim.simulator.common.tables import cell

    print_text(f"\nby {engine.draws:,} engine runs with all uncertain inputs off together (eq. U7)")
    rows = [
        (name, cell(band.predicted), cell(band.p10), cell(band.p50), cell(band.p90))
        for name, band in engine.bands.items()
    ]
    print_table(("", "predicted", "P10", "P50", "P90"), rows, right=(1, 2, 3, 4))
    print_text(
        "over these draws the first-order step time differs from the engine's by "
        f"{engine.first_order_mean:+.2%} in the mean and {engine.first_order_rms:.2%} rms"
    )


# -- counterfactuals ---------------------------------------------------------------------------------
# Runs a step without each of its causes for `explain`, and prints what every cause costs.


def run_counterfactuals(prepared: Prepared, result: Result) -> Counterfactuals:
    """Run the step without each of its causes; a run that takes long is named on stderr."""
    with working("running the step without its causes") as say:
        from moesim.simulator.studies.explain import counterfactuals

        return counterfactuals(
            prepared,
            result.step.time_s,
            lambda number, most, cause: say(f"{number + 1} of {most}: the step without {cause}"),
        )


def print_counterfactuals(runs: Counterfactuals) -> None:
    """Print the causes, the most expensive first, then all of them together."""
    print_text("\nwhat each cause costs: the step without it, one engine run each, seconds")
    rows = [
        (row.cause, f"{row.without_s:.3f}", f"{row.cost_s:.3f}", percent(row.share))
        for row in (*runs.causes, runs.together)
    ]
    print_table(("cause", "step without it", "cost", "of step"), rows, right=(1, 2, 3))
    print_text(runs.sentence)
