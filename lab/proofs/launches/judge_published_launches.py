"""Imports copies of published launch files and writes a table of what came of each of them.

The files are listed in lab/docs/proof/published_launches.yaml and are not part of moesim. Unpack them as
OWNER+NAME/PATH below one folder, and run:

    python lab/proofs/launches/judge_published_launches.py --copies FOLDER [--dump FOLDER] [--table FILE]

A script that needs a shell is run by bash in a folder of its own, with the stand-ins of `moesim import launch
--capture` first in PATH, without network where the machine allows it and without rights where root runs this.
moesim itself never runs a file. `--dump` writes all arguments of each file with their places and meanings.
The exit code is 1 if the plan of a file differs from the one that the list has for it.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch_plans import differences, plan_of, summary

from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.hwmodels.yaml_io import load_mapping
from moesim.simulator.model.counts import parameters_total
from moesim.simulator.scenario import load_scenario
from moesim.simulator.trainers.launch import LaunchFile, Unknown
from moesim.simulator.trainers.meaning.understand import Understanding, understand
from moesim.simulator.trainers.reading import read_launch
from moesim.simulator.trainers.reading.capture import NOTED, write_stand_ins

MANIFEST = Path(__file__).resolve().parents[3] / "lab" / "docs" / "proof" / "published_launches.yaml"
BASE = "deepseek-v3-2048xh800"

_HEAD = """# Published launch files

What `python lab/proofs/launches/judge_published_launches.py --copies FOLDER` says of the files that
`published_launches.yaml` lists, given the base, vocabulary, GPUs, variables and parameters of the list. The
files are not part of moesim. `way` says how a file is read: `file` as it is, or `capture` by running its
script with the stand-ins of `moesim import launch --capture` first in PATH, which note arguments and start
nothing. `unknown` counts the arguments whose value the file does not state by itself; each is an unknown
value with its reason, never a guess. `used / irrelevant / not priced` counts the rows of the import, and
`checked` the values that were compared with a plan written down by hand from the file itself. What a file
leaves to another one, such as the model of a wrapper or of a DeepSpeed configuration, is the base's.

"""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What came of one file: a row of the table, and whether it was understood, refused or wrong."""

    row: str
    kind: str
    checked: int = 0
    wrong: tuple[str, ...] = ()


def main() -> None:
    """Import every file of the manifest that has a copy, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--copies", type=Path, required=True)
    parser.add_argument("--dump", type=Path)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    entries = load_mapping(MANIFEST)["launches"]
    judgements = [
        judged(entry, options.copies / entry["repository"].replace("/", "+") / entry["path"], options.dump)
        for entry in entries
    ]
    text = table(judgements)
    print(text)
    wrong = [sentence for one in judgements for sentence in one.wrong]
    print("\n".join(wrong))
    if options.table is not None:
        options.table.write_text(f"{_HEAD}\n{text}\n")
    sys.exit(1 if wrong else 0)


def table(judgements: list[Judgement]) -> str:
    """The summary and the table."""
    kinds = Counter(one.kind for one in judgements)
    compared = [one for one in judgements if one.checked]
    wrong = sum(bool(one.wrong) for one in judgements)
    return "\n".join(
        [
            f"{len(judgements)} files: {kinds['understood']} understood, {kinds['refused']} refused with the "
            f"reason, {kinds['no copy']} without a copy. Silently wrong: {wrong} of the "
            f"{len(compared)} files whose plan was written down by hand.",
            "",
            "| file | way | trainer | arguments | unknown | used / irrelevant / not priced | model | plan "
            "| checked |",
            "|---|---|---|---|---|---|---|---|---|",
            *(one.row for one in judgements if one.kind == "understood"),
            "",
            "| file | trainer | arguments | refused, because |",
            "|---|---|---|---|",
            *(one.row for one in judgements if one.kind != "understood"),
        ]
    )


def judged(entry: Mapping[str, Any], path: Path, dump: Path | None) -> Judgement:
    """What comes of one file; its arguments and their meanings are written below `dump` as well."""
    name, expected = entry["id"], entry.get("expected", {})
    if not path.is_file():
        return Judgement(f"| {name} | | | no copy |", "no copy")
    try:
        launch = (
            captured(entry, path)
            if entry.get("capture")
            else read_launch(
                path, entry.get("environment", {}), tuple(entry.get("parameters", ())), entry.get("run")
            )
        )
    except InputError as error:
        return _refused(entry, "", "", error)
    count, trainer = str(len(launch.arguments)), launch.trainer or ""
    try:
        base = load_scenario(entry.get("base", BASE), entry.get("set", ()))
        options = (entry.get("vocab"), entry.get("gpus"), tuple(entry.get("ignore", ())))
        understanding = understand(launch, base, path.name, *options)
    except (InputError, InfeasibleError) as error:
        if dump is not None:
            _write(dump, name, described(launch))
        return _refused(entry, trainer, count, error)
    plan = plan_of(understanding.scenario)
    if dump is not None:
        _write(dump, name, described(launch) + meanings(understanding, plan))
    rows = Counter(row.kind for row in understanding.rows)
    unknown = sum(isinstance(argument.value, Unknown) for argument in launch.arguments)
    wrong = tuple(f"{name}: {sentence}" for sentence in differences(expected, plan))
    if "refused" in entry:
        wrong += (f"{name}: is understood and should be refused",)
    shape = understanding.scenario.shape
    used = rows["key"] + rows["default"] + rows["base"]
    way = "capture" if entry.get("capture") else "file"
    counts = f"{used} / {rows['irrelevant'] + rows['ignored']} / {rows['not priced']}"
    model = f"{shape.name} ({parameters_total(shape) / 1e9:.1f} B)"
    cells = (name, way, trainer, count, unknown, counts, model, summary(plan), len(expected))
    row = f"| {' | '.join(map(str, cells))} |"
    return Judgement(row, "understood", len(expected), wrong)


def captured(entry: Mapping[str, Any], path: Path) -> LaunchFile:
    """The launch that the stand-ins note where bash runs a copy of the script.

    `{HERE}` in a variable is the folder of the copy; `files` of the entry are made in it before, with their
    texts, and `placeholders` says that its `<PATH TO DATA>` are replaced, as a user has to do.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, noted = Path(name) / "here", Path(name) / "stand-ins"
        folder.mkdir()
        write_stand_ins(noted, sys.executable if os.geteuid() else "/usr/bin/python3")
        (noted / NOTED).touch()
        for one in entry.get("files", ()):
            (folder / one).parent.mkdir(parents=True, exist_ok=True)
            (folder / one).write_text(entry["files"][one] or "")
        text = path.read_text("utf-8")
        filled = re.sub(r"<[A-Za-z][^<>\n]*>", "x", text) if entry.get("placeholders") else text
        (folder / path.name).write_text(filled)
        for one in (Path(name), folder, noted / NOTED, *folder.rglob("*")):
            one.chmod(0o777)
        variables = {
            key: str(value).replace("{HERE}", str(folder))
            for key, value in entry.get("environment", {}).items()
        }
        settings = {"HOME": str(folder), "TERM": "xterm", "PATH": f"{noted}:/usr/bin:/bin", **variables}
        words = ["bash", path.name, *entry.get("parameters", ())]
        nobody: dict[str, Any] = (
            {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
        )
        apart = ["unshare", "--user", "--net"]
        if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode == 0:
            words = [*apart, *words]
        done = subprocess.run(
            words, cwd=folder, env=settings, capture_output=True, text=True, timeout=60, check=False, **nobody
        )
        if os.environ.get("SHOW_STDERR"):
            print(entry["id"], done.returncode, done.stderr[-1500:])
        return read_launch(noted, run=entry.get("run"))


def _refused(entry: Mapping[str, Any], trainer: str, count: str, error: Exception) -> Judgement:
    reason = re.split(r"; and \d+ more|; (?=[\w.-]+, line )", str(error))[0].replace("|", "\\|")
    wrong: tuple[str, ...] = ()
    if entry.get("expected"):
        wrong = (f"{entry['id']}: is refused and has a plan: {reason}",)
    elif entry.get("refused", "") not in str(error):
        wrong = (f"{entry['id']}: is refused for another reason: {reason}",)
    return Judgement(f"| {entry['id']} | {trainer} | {count} | {reason} |", "refused", 0, wrong)


def _write(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.txt").write_text(text)


def meanings(understanding: Understanding, plan: Mapping[str, Any]) -> str:
    """The plan and the meaning of every argument, one line for each."""
    lines = [f"plan {name} = {value}" for name, value in plan.items()]
    lines += [
        f"{row.kind}: {row.argument} {row.value} -> {row.meaning} [{row.place}]" for row in understanding.rows
    ]
    return "\n".join(lines) + "\n"


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
