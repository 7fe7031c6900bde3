"""The command `import launch`, which turns what a trainer was told into a scenario."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moesim.cli.console import AsJson, Force, check_new, print_json, print_table, print_text, say_written
from moesim.hwmodels.errors import InputError

if TYPE_CHECKING:
    from moesim.simulator.trainers.meaning.understand import Understanding

KINDS = {
    "key": ("", "set scenario keys or the model"),
    "default": ("", "are the trainer's defaults"),
    "base": ("from the base: ", "are the base's"),
    "not priced": ("not priced: ", "are not priced"),
    "ignored": ("", "are ignored"),
    "irrelevant": ("irrelevant: ", "are irrelevant"),
}
"""Kinds of rows in the order of the table, with what stands before the meaning of each, and in the sum."""


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
    as_json: AsJson = False,
    force: Force = False,
) -> None:
    """Read what a trainer was told, say what every argument means, and write the scenario."""
    from moesim.cli.plan import scenario_yaml
    from moesim.hwmodels.files import write_atomically
    from moesim.simulator.trainers.meaning.understand import load_base, understand
    from moesim.simulator.trainers.reading import read_launch

    if capture is not None:
        _capture(capture, file)
        return
    if file is None:
        raise InputError("FILE is missing; name a log, a configuration, a script or a folder of --capture")
    check_new(output, force)
    for option, value, most in (("--vocab-size", vocab_size, 10**8), ("--gpus", gpus, 10**7)):
        if value is not None and not 0 < value <= most:
            raise InputError(f"{option} {value}: is outside the limits 1 to {most:,}")
    variables = {}
    for text in environment or []:
        name, equals, content = text.partition("=")
        if not equals or not name.isidentifier() or not name.isascii():
            raise InputError(f"--env {text[:80]!r}: is no variable; write NAME=VALUE, for example TP=8")
        variables[name] = content
    launch = read_launch(file, variables, tuple(parameters or ()), run)
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


def _print(understanding: Understanding, name: str, base: str) -> None:
    counts = Counter[str](row.kind for row in understanding.rows)
    print_text(f"what {name} says, with {base} as the base")
    rows = sorted(understanding.rows, key=lambda row: list(KINDS).index(row.kind))
    cells = [(row.argument, row.value, KINDS[row.kind][0] + row.meaning, row.place) for row in rows]
    print_table(("argument", "value", "meaning", "place"), cells)
    print_text(
        "\n" + ", ".join(f"{counts[kind]} {label}" for kind, (_, label) in KINDS.items() if counts[kind])
    )
    for note in understanding.notes:
        print_text(f"note: {note}")
