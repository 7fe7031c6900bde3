"""The command `sweep`: predicts a scenario at many points."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moesim.cli.options import AsJson, Overrides, ScenarioName
from moesim.hwmodels.errors import InfeasibleError, InputError

MOST_REASONS = 5
"""Most reasons that the message of a sweep without a possible point names."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(sweep)


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
    scheduler: Annotated[
        str | None, typer.Option(metavar="tcp://HOST:PORT", help="A Dask cluster instead of local processes.")
    ] = None,
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
    from moesim.cli.console import print_json, print_table, print_text, working
    from moesim.simulator.common.key_values import key_and_text
    from moesim.simulator.common.tables import cell

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
