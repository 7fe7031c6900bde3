"""Turns nested mappings of configuration files into arguments with dotted names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from moesim.simulator.trainers.launch import Argument, Unknown, Value


def flattened(data: Mapping[str, Any], place: Callable[[str], str], above: str = "") -> tuple[Argument, ...]:
    """The entries of a mapping as arguments; `place` says where the entry of a dotted name is written.

    A list becomes a tuple. A mapping inside a list is written as its text, since it has no dotted name.
    """
    arguments: list[Argument] = []
    for key, value in data.items():
        name = f"{above}.{key}" if above else str(key)
        if isinstance(value, Mapping) and value:
            arguments += flattened(value, place, name)
        else:
            arguments.append(Argument(name, plain(value), place(name)))
    return tuple(arguments)


def plain(value: Any) -> Value | Unknown:
    """A value of a configuration file as plain data."""
    if isinstance(value, Unknown) or value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list | tuple):
        items = [plain(item) for item in value]
        unknown = next((item for item in items if isinstance(item, Unknown)), None)
        if unknown is not None:
            text = ", ".join(item.text if isinstance(item, Unknown) else repr(item) for item in items)
            return Unknown(f"[{text}]", unknown.reason)
        return tuple(item for item in items if not isinstance(item, Unknown))
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {plain(item)}" for key, item in value.items()) + "}"
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
