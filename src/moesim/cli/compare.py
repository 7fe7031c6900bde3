"""The command `compare`: compares scenarios and splits their difference by cause."""

from __future__ import annotations

from typing import Annotated

import typer

from moesim.cli.options import AsJson
from moesim.hwmodels.errors import InputError


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(compare)


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
    from moesim.cli.console import print_json, print_table, print_text, working

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
