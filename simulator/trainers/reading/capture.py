"""Writes stand-ins for launchers, which note their arguments and stop, and reads what they noted."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import check_writable, read_text, write_atomically
from moesim.simulator.trainers.launch import LaunchFile
from moesim.simulator.trainers.reading.launchers import chosen_launch
from moesim.simulator.trainers.reading.script import Command, Word, inner_commands

STAND_INS = (
    "torchrun", "python", "python3", "srun", "deepspeed", "accelerate", "mpirun", "mpiexec", "sbatch", "uv",
)  # fmt: skip
"""Programs that a folder of stand-ins replaces."""
NOTED = "launches.jsonl"
"""File in the folder to which the stand-ins write."""
NOTER = "stand_in.py"
MOST_BYTES = 3_000_000
MOST_RECORDS = 500


def write_stand_ins(folder: Path, python: str = sys.executable) -> list[str]:
    """Write the stand-ins into a folder and return the names of its files; `python` runs what they call.

    Raises InputError for a folder that cannot be written, or that holds other files.
    """
    ours = {*STAND_INS, NOTER, NOTED}
    if folder.exists() and (not folder.is_dir() or any(one.name not in ours for one in folder.iterdir())):
        raise InputError(f"--capture {folder}: holds something else already; name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    check_writable(folder / NOTED, "capture file")
    (folder / NOTED).unlink(missing_ok=True)
    noter = (resources.files("moesim.simulator.trainers.reading") / NOTER).read_text("utf-8")
    write_atomically(folder / NOTER, [noter])
    for name in STAND_INS:
        words = [python, "-I", str((folder / NOTER).resolve()), str((folder / NOTED).resolve()), name]
        write_atomically(folder / name, [f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n'])
        (folder / name).chmod(0o755)
    return [*STAND_INS, NOTER]


def read_capture(path: Path, given: Mapping[str, str], run: int | None = None) -> LaunchFile:
    """The launch that stand-ins noted in a file; `given` are variables that the user adds.

    Raises InputError, naming file and line, for text that is no note, where nothing was started, where the
    script reads the output of a Python command, and where several runs were started and `run` names none.
    """
    name = f"{path.parent.name}/{path.name}"
    if not path.exists() or path.stat().st_size == 0:
        raise InputError(
            f"{name}: nothing is noted; put the folder of --capture first in PATH, run the script, and see "
            "whether it reaches its launch"
        )
    lines = read_text(path, MOST_BYTES, "capture file").splitlines()
    if len(lines) > MOST_RECORDS:
        raise InputError(f"{name}: {len(lines):,} programs are noted, above the limit of {MOST_RECORDS}")
    commands: list[Command] = []
    files: dict[str, str] = {}
    computed = ""
    for number, line in enumerate(lines, start=1):
        place = f"{name}, line {number}"
        words, environment, texts = _record(line, place)
        if words[0].startswith("python") and words[1:2] in (["-c"], ["-"], []):
            computed = computed or f"{place}: {' '.join(words)[:80]!r}"
            continue
        files |= texts
        # The command sees the variables that its words name, and those that decide the model or the number
        # of processes.
        text = " ".join(words)
        python = re.fullmatch(r"python[\d.]*", words[0].rpartition("/")[2])
        kept = {"MODEL", "MODEL_NAME"} | ({"WORLD_SIZE"} if python and "distributed" not in text else set())
        named = {key: value for key, value in environment.items() if key in kept or f"${key}" in text}
        command = Command(tuple(Word(word, place) for word in words), named, place)
        commands += inner_commands(command, name, {**environment, **given})
    launch = chosen_launch(commands, name, files=files, run=run)
    if launch is None:
        raise InputError(
            f"{name}: {len(lines)} programs are noted, and none starts a training with arguments; run the "
            "script with the folder first in PATH, and see whether it reaches its launch"
        )
    if computed and run is None:
        raise InputError(
            f"{computed} was asked for its output, which a stand-in leaves empty, so later values may be "
            "wrong; write the value into the script, or give --run 1 where the output is not an argument"
        )
    return launch


def _record(line: str, place: str) -> tuple[list[str], dict[str, str], dict[str, str]]:
    try:
        data: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise InputError(
            f"{place}: no note of a stand-in (not valid JSON); capture the script again"
        ) from None
    words = data.get("words") if isinstance(data, dict) else None
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        raise InputError(f"{place}: no note of a stand-in (`words` is missing); capture the script again")
    return words, _texts(data.get("environment")), _texts(data.get("files"))


def _texts(data: Any) -> dict[str, str]:
    given = data.items() if isinstance(data, dict) else ()
    return {key: value for key, value in given if isinstance(value, str)}
