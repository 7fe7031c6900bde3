"""The command `import launch`, which turns what a trainer was told into a scenario."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moesim.hwmodels.errors import InputError

if TYPE_CHECKING:
    from moesim.simulator.trainers.meaning.understand import Understanding

ORDER = ("key", "default", "base", "not priced", "ignored", "irrelevant")
"""Order of the kinds of rows in the table."""

PREFIX = {"irrelevant": "irrelevant: ", "not priced": "not priced: ", "base": "from the base: "}
"""What stands before the meaning of a row of each kind."""


def register(importers: typer.Typer) -> None:
    """Add the command to the group `import`, also under its former name."""
    importers.command(name="launch")(import_launch)
    importers.command(name="megatron", hidden=True)(import_launch)


def import_launch(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            help="A log in which the trainer prints its arguments, its configuration (YAML, JSON, TOML), a "
            "plain script, or a folder of --capture.",
        ),
    ] = None,
    base: Annotated[
        str,
        typer.Option(help="Scenario that gives cluster, profile, prices and run; parallel may be left out."),
    ] = "deepseek-v3-2048xh800",
    environment: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="NAME=VALUE", help="An environment variable that the file reads."),
    ] = None,
    parameters: Annotated[
        list[str] | None,
        typer.Option("--parameter", metavar="TEXT", help="A parameter of the script: $1, then $2, ..."),
    ] = None,
    run: Annotated[
        int | None, typer.Option(metavar="N", help="Which launch, where the file holds several.")
    ] = None,
    capture: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write stand-ins for torchrun, python, srun, ... into a folder to be put first in PATH.",
        ),
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(help="Vocabulary, where the file names a tokenizer only.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(help="Number of GPUs, in the place of what the file asks for.")
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(metavar="ARGUMENT", help="An argument of the file that is to be skipped."),
    ] = None,
    ignore_unknown: Annotated[
        bool, typer.Option("--ignore-unknown", help="Pass over arguments that nobody knows, and list them.")
    ] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write a scenario file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Read what a trainer was told, say what every argument means, and write the scenario."""
    from moesim.cli.console import print_json, say_written
    from moesim.cli.plan import scenario_yaml
    from moesim.hwmodels.files import write_atomically
    from moesim.simulator.trainers.meaning.understand import load_base, understand
    from moesim.simulator.trainers.reading import read_launch

    if capture is not None:
        _capture(capture, file)
        return
    if file is None:
        raise InputError("FILE is missing; name a log, a configuration, a script or a folder of --capture")
    if output is not None:
        _check_new(output, force)
    _check_limits({"--vocab-size": (vocab_size, 10**8), "--gpus": (gpus, 10**7)})
    launch = read_launch(file, _variables(environment or []), tuple(parameters or ()), run)
    understanding = understand(
        launch, load_base(base), file.name, vocab_size, gpus, tuple(ignore or ()), ignore_unknown
    )
    if as_json:
        print_json(understanding.to_dict())
    else:
        _print(understanding, file.name, base)
    if output is not None:
        write_atomically(output, [scenario_yaml(understanding.scenario)])
        say_written(str(output), "simulate it, or let `moesim plan` look for a better one")


def _capture(folder: Path, file: Path | None) -> None:
    """Write the stand-ins and say how they are used."""
    from moesim.cli.console import print_text, say_written
    from moesim.simulator.trainers.reading.capture import write_stand_ins

    if file is not None:
        raise InputError(
            f"{file}: --capture writes stand-ins and reads nothing; leave the file out, run it with the "
            f"folder first in PATH, and then import {folder}"
        )
    names = write_stand_ins(folder)
    say_written(str(folder), f"stand-ins for {', '.join(names[:-1])}, which note their arguments and stop")
    print_text(
        f"1. PATH={folder.resolve()}:$PATH bash YOUR_SCRIPT   (starts no training, but runs all else of it)\n"
        f"2. moesim import launch {folder}"
    )


def _check_new(output: Path, force: bool) -> None:
    """Raise InputError for a file that cannot be written, or that exists and is not to be replaced."""
    from moesim.hwmodels.files import check_writable

    check_writable(output, "output file")
    if output.exists() and not force:
        raise InputError(f"output file {output}: exists already; give another name, or --force to replace it")


def _check_limits(options: Mapping[str, tuple[int | None, int]]) -> None:
    """Raise InputError for a number below 1 or above its limit; None stands for an option left out."""
    for option, (value, most) in options.items():
        if value is not None and not 0 < value <= most:
            raise InputError(f"{option} {value}: is outside the limits 1 to {most:,}")


def _variables(texts: list[str]) -> dict[str, str]:
    variables = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier() or not name.isascii():
            raise InputError(f"--env {text[:80]!r}: is no variable; write NAME=VALUE, for example TP=8")
        variables[name] = value
    return variables


def _print(understanding: Understanding, name: str, base: str) -> None:
    from moesim.cli.console import print_table, print_text

    counts = Counter[str](row.kind for row in understanding.rows)
    print_text(f"what {name} says, with {base} as the base")
    rows = sorted(understanding.rows, key=lambda row: ORDER.index(row.kind))
    cells = [(row.argument, row.value, PREFIX.get(row.kind, "") + row.meaning, row.place) for row in rows]
    print_table(("argument", "value", "meaning", "place"), cells)
    print_text("\n" + ", ".join(f"{counts[kind]} {_LABELS[kind]}" for kind in ORDER if counts[kind]))
    for note in understanding.notes:
        print_text(f"note: {note}")


_LABELS = {
    "key": "set scenario keys or the model",
    "default": "are the trainer's defaults",
    "base": "are the base's",
    "not priced": "are not priced",
    "ignored": "are ignored",
    "irrelevant": "are irrelevant",
}
