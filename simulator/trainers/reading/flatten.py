"""Turns nested mappings of configuration files into arguments with dotted names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from moesim.hwmodels.errors import InputError
from moesim.simulator.trainers.launch import Argument, Unknown, Value
from moesim.simulator.trainers.reading.limits import MOST_BITS, MOST_DEPTH


def flattened(
    data: Mapping[str, Any], place: Callable[[str], str], above: str = "", depth: int = 0
) -> tuple[Argument, ...]:
    """The entries of a mapping as arguments; `place` says where the entry of a dotted name is written.

    A list becomes a tuple. A mapping inside a list is written as its text, since it has no dotted name.
    Raises InputError for names of too many parts, and for numbers of too many digits.
    """
    if depth > MOST_DEPTH:
        raise InputError(
            f"{place(above)}: {above[:60]!r}... has more than {MOST_DEPTH} parts, the limit of a name; "
            "shorten it"
        )
    arguments: list[Argument] = []
    for key, value in data.items():
        name = f"{above}.{key}" if above else str(key)
        if isinstance(value, Mapping) and value:
            arguments += flattened(value, place, name, depth + 1)
        else:
            where = place(name)
            arguments.append(Argument(name, plain(value, f"{where}: {name[:80]}"), where))
    return tuple(arguments)


def check_number(value: int, place: str) -> None:
    """Raise InputError for a whole number that is too long to be written."""
    if value.bit_length() > MOST_BITS:
        raise InputError(
            f"{place}: a whole number of {value.bit_length():,} bits, above the limit of {MOST_BITS}; "
            "correct it"
        )


def plain(value: Any, place: str = "a value of the file") -> Value | Unknown:
    """A value of a configuration file as plain data; raises InputError for numbers of too many digits."""
    if isinstance(value, int):
        check_number(value, place)
    if isinstance(value, Unknown) or value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list | tuple):
        items = [plain(item, place) for item in value]
        unknown = next((item for item in items if isinstance(item, Unknown)), None)
        if unknown is not None:
            text = ", ".join(item.text if isinstance(item, Unknown) else repr(item) for item in items)
            return Unknown(f"[{text}]", unknown.reason)
        return tuple(item for item in items if not isinstance(item, Unknown))
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {plain(item, place)}" for key, item in value.items()) + "}"
    return str(value)


class YamlLines:
    """Finds the line of a dotted name in YAML or JSON text, or of what holds it."""

    def __init__(self, text: str, file: str) -> None:
        """Takes the text of a file and its name."""
        self._file = file
        self._lines = self._indented(text)

    def __call__(self, name: str) -> str:
        """File and line of the entry."""
        parts = name.split(".")
        while parts:
            line = self._lines.get(".".join(parts))
            if line is not None:
                return f"{self._file}, line {line}"
            parts.pop()
        return self._file

    @staticmethod
    def _indented(text: str) -> dict[str, int]:
        lines: dict[str, int] = {}
        stack: list[tuple[int, str]] = []
        for number, line in enumerate(text.splitlines(), start=1):
            match = re.match(r"(\s*)(?:([\"'])(.{1,200}?)\2|([\w.@/+-][^:#\n\"']{0,200}?))\s*:(?:\s|$)", line)
            if match is None:
                continue
            indent, key = len(match[1]), match[3] or match[4]
            while stack and stack[-1][0] >= indent:
                stack.pop()
            stack.append((indent, key))
            lines.setdefault(".".join(part for _, part in stack), number)
        return lines
