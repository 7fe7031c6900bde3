"""Reads copies of published launch files and writes a table of what the readers say about each of them.

The files are listed in docs/proof/published_launches.yaml and are not part of moesim. Unpack them as
OWNER+NAME/PATH below one folder, and run:

    python tests/proof_launches/judge_published_launches.py --copies FOLDER [--dump FOLDER] [--table FILE]

`--dump` writes all arguments of each file with their places, to be compared with the original by eye.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.yaml_io import load_mapping
from moesim.simulator.trainers.launch import LaunchFile, Unknown
from moesim.simulator.trainers.reading import read_launch

MANIFEST = Path(__file__).resolve().parents[2] / "docs" / "proof" / "published_launches.yaml"


_HEAD = """# Published launch files

What `python tests/proof_launches/judge_published_launches.py --copies FOLDER` says of the files that
`published_launches.yaml` lists. The files are not part of moesim. `unknown` counts the arguments whose value
the file does not state by itself, given the variables and parameters of the list; each is an unknown value
with its reason, never a guess.
"""


def main() -> None:
    """Read every file of the manifest that has a copy, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--copies", type=Path, required=True)
    parser.add_argument("--dump", type=Path)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    rows = [
        "| file | trainer | arguments | unknown | nodes x GPUs | notes | refused |",
        "|---|---|---|---|---|---|---|",
    ]
    for entry in load_mapping(MANIFEST)["launches"]:
        path = options.copies / entry["repository"].replace("/", "+") / entry["path"]
        rows.append(judged(entry, path, options.dump))
    table = "\n".join(rows)
    print(table)
    if options.table is not None:
        options.table.write_text(f"{_HEAD}\n{table}\n")


def judged(entry: Mapping[str, Any], path: Path, dump: Path | None) -> str:
    """One row of the table; the arguments are written below `dump` as well."""
    if not path.is_file():
        return f"| {entry['id']} | no copy | | | | | |"
    try:
        launch = read_launch(
            path, entry.get("environment", {}), entry.get("recipe"), tuple(entry.get("parameters", ()))
        )
    except InputError as error:
        return f"| {entry['id']} | | | | | | {error} |"
    unknown = sum(isinstance(argument.value, Unknown) for argument in launch.arguments)
    if dump is not None:
        dump.mkdir(parents=True, exist_ok=True)
        (dump / f"{entry['id']}.txt").write_text(described(launch))
    machine = f"{_count(launch.machine.nodes)} x {_count(launch.machine.gpus_per_node)}"
    return (
        f"| {entry['id']} | {launch.trainer} | {len(launch.arguments)} | {unknown} | {machine} | "
        f"{len(launch.notes)} | |"
    )


def _count(value: int | Unknown | None) -> str:
    return (
        value.text.replace("|", "\\|") if isinstance(value, Unknown) else "-" if value is None else str(value)
    )


def described(launch: LaunchFile) -> str:
    """All that a launch says, one line for each argument, variable and note."""
    lines = [f"program {launch.program}", f"machine {launch.machine}"]
    for argument in launch.arguments:
        value = argument.value
        shown = f"? {value.text}  <- {value.reason}" if isinstance(value, Unknown) else repr(value)
        lines.append(f"{argument.name or '(word)'} = {shown}   [{argument.place}]")
    lines += [f"environment {name} = {value}" for name, value in launch.environment.items()]
    return "\n".join([*lines, *(f"note: {note}" for note in launch.notes)]) + "\n"


if __name__ == "__main__":
    main()
