"""Reads TOML of torchtitan and JSON of DeepSpeed into arguments with dotted names."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import read_text
from moesim.hwmodels.yaml_io import parse_mapping
from moesim.simulator.trainers.launch import LaunchFile
from moesim.simulator.trainers.reading.flatten import flattened
from moesim.simulator.trainers.reading.limits import MOST_BYTES
from moesim.simulator.trainers.reading.trainer_names import trainer_of_keys
from moesim.simulator.trainers.reading.yaml_launch import configuration

_MOST_BRACKETS = 40


def read_toml(path: Path) -> LaunchFile:
    """The launch of a TOML file; raises InputError for text that is no TOML, too deep, or empty."""
    text = read_text(path, MOST_BYTES, "TOML launch file")
    if _deepest(text) > _MOST_BRACKETS:
        raise InputError(
            f"{path.name}: more than {_MOST_BRACKETS} brackets are open at once; write the lists out"
        )
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path.name}: not valid TOML: {error}") from None
    except (RecursionError, ValueError) as error:
        raise InputError(f"{path.name}: cannot be read: {str(error)[:200]}") from None
    arguments = flattened(data, _Lines(text, path.name))
    if not arguments:
        raise InputError(f"{path.name}: holds no entry; give the file that configures the training")
    trainer = trainer_of_keys([argument.name for argument in arguments], text)
    return LaunchFile(trainer or "torchtitan", None, arguments)


def _deepest(text: str) -> int:
    """The most brackets that are open at once."""
    level = deepest = 0
    for char in text:
        if char in "[{":
            level += 1
            deepest = max(deepest, level)
        elif char in "]}":
            level = max(0, level - 1)
    return deepest


def read_json(path: Path, environment: Mapping[str, str]) -> LaunchFile:
    """The launch of a JSON file, such as the configuration of DeepSpeed."""
    text = read_text(path, MOST_BYTES, "JSON launch file")
    return configuration(parse_mapping(text, str(path)), text, path.name, environment)


class _Lines:
    """Finds the line of a dotted name in TOML text."""

    def __init__(self, text: str, file: str) -> None:
        self._file = file
        self._lines: dict[str, int] = {}
        section = ""
        for number, line in enumerate(text.splitlines(), start=1):
            header = re.match(r"\s*\[\[?\s*([\w.\"'-]+)\s*\]", line)
            key = re.match(r"\s*([\w.\"'-]+)\s*=", line)
            if header:
                section = header[1].replace('"', "").replace("'", "") + "."
                self._lines.setdefault(section[:-1], number)
            elif key:
                self._lines.setdefault(section + key[1].replace('"', "").replace("'", ""), number)

    def __call__(self, name: str) -> str:
        """File and line of the entry, or of what holds it."""
        parts = name.split(".")
        while parts:
            if ".".join(parts) in self._lines:
                return f"{self._file}, line {self._lines['.'.join(parts)]}"
            parts.pop()
        return self._file
