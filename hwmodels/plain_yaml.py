"""Reads the common part of YAML quickly; the reader in `full_yaml` takes every other text.

The common part is what the shipped files consist of: block mappings and sequences, flow collections, plain
and simply quoted scalars, folded and literal text, comments. `read_plain_yaml` returns None for anything
beyond it, legal or not, so that the full reader decides and writes the message. It is twenty times faster.
"""

from __future__ import annotations

import re
from itertools import accumulate
from typing import Any

from moesim.hwmodels.file_limits import MAX_YAML_VALUES
from moesim.hwmodels.yaml_flow import MOST_DEPTH, QUOTED, NotPlainError, flow_value, is_odd_key, scalar

MOST_LINES = 200
"""Most lines of one scalar."""

_ODD = re.compile(r"[^\n\x20-\x7e\xa1-\xff\u0391-\u03c9\u2010-\u2027\u2030-\u205e]")
"""Characters outside this set are left to the full reader: tabs, control characters, further line breaks."""
_KEY = re.compile(r"([A-Za-z_][A-Za-z0-9_. -]*):(?: +|$)")
_REST = re.compile(r" *(?: #.*)?")
"""What may follow a value on its line: nothing, or a comment."""
_INDICATORS = frozenset(",[]{}#&*!|>'\"%@`?:-")


def read_plain_yaml(text: str) -> dict[str, Any] | None:
    """The top-level mapping of a YAML 1.2 text as plain data; None where the full reader has to read it."""
    if _ODD.search(text) or sum(map(text.count, "\n,:[{")) >= MAX_YAML_VALUES:
        return None
    reader = _Reader(text)
    try:
        found = reader.block(0, 0)
        return found if isinstance(found, dict) and reader.at_end() else None
    except NotPlainError:
        return None


class _Reader:
    """The lines of a text, and the number of the next one to read."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._lines = text.split("\n")
        self._starts = list(accumulate((len(line) + 1 for line in self._lines), initial=0))
        self._next = 0

    def at_end(self) -> bool:
        """Whether only blank lines and comments are left."""
        return self._indent() < 0

    def _indent(self) -> int:
        """Spaces before the next line with content, which becomes the next line; -1 at the end."""
        while self._next < len(self._lines):
            line = self._lines[self._next]
            content = line.lstrip(" ")
            if content and content[0] != "#":
                indent = len(line) - len(content)
                if not indent and content.startswith(("---", "...", "%")):
                    raise NotPlainError
                return indent
            self._next += 1
        return -1

    def block(self, least: int, depth: int) -> Any:
        """The block mapping or sequence that starts at the next line, indented by `least` spaces or more."""
        indent = self._indent()
        if indent < least or depth > MOST_DEPTH:
            raise NotPlainError
        line = self._lines[self._next]
        if line.startswith("- ", indent):
            return self._sequence(indent, depth)
        if line[indent] in "[{":
            self._next += 1
            return self._flow(line[indent:], least - 1, depth)
        return self._mapping(indent, depth)

    def _mapping(self, indent: int, depth: int, at: int = -1) -> dict[str, Any]:
        """A mapping with keys at column `indent`; `at`: number of a line whose first key is behind "- "."""
        found: dict[str, Any] = {}
        while at == self._next or self._indent() == indent:
            line = self._lines[self._next]
            key = _KEY.match(line, indent)
            if key is None or key[1] in found or is_odd_key(key[1]):
                raise NotPlainError
            found[key[1]] = self._value(line[key.end() :], indent, depth, in_mapping=True)
        if self._indent() > indent:
            raise NotPlainError
        return found

    def _sequence(self, indent: int, depth: int) -> list[Any]:
        found: list[Any] = []
        while self._indent() == indent and self._lines[self._next].startswith("- ", indent):
            line = self._lines[self._next]
            rest = line[indent + 2 :].lstrip(" ")
            column = len(line) - len(rest)
            if _KEY.match(rest):
                found.append(self._mapping(column, depth + 1, at=self._next))
            else:
                found.append(self._value(rest, indent, depth, in_mapping=False))
        if self._indent() > indent:
            raise NotPlainError
        return found

    def _value(self, rest: str, indent: int, depth: int, *, in_mapping: bool) -> Any:
        """The value that starts with `rest` on the next line and belongs to a key or "-" at `indent`."""
        self._next += 1
        if not rest or rest[0] == "#":
            inner = self._indent()
            if in_mapping and inner == indent and self._lines[self._next].startswith("- ", indent):
                return self._sequence(indent, depth + 1)
            if inner <= indent:
                raise NotPlainError
            return self.block(indent + 1, depth + 1)
        first = rest[0]
        if first in "[{":
            return self._flow(rest, indent, depth)
        if first in "|>":
            return self._block_text(rest, indent)
        return self._quoted(rest, indent) if first in "\"'" else self._plain(rest, indent)

    def _quoted(self, rest: str, indent: int) -> str:
        """A quoted scalar, which may go on for several lines."""
        for _ in range(MOST_LINES):
            quoted = QUOTED.match(rest)
            if quoted is not None:
                if not _REST.fullmatch(rest, quoted.end()):
                    raise NotPlainError
                return str(quoted[1] if quoted[2] is None else quoted[2])
            rest = f"{rest.rstrip(' ')} {self._continuation(indent)}"
        raise NotPlainError

    def _plain(self, rest: str, indent: int) -> Any:
        """A plain scalar, which may go on for several lines."""
        if rest[0] in _INDICATORS and not (rest[0] == "-" and rest[1:2].isalnum()):
            raise NotPlainError
        lines = [rest.partition(" #")[0].rstrip(" ")]
        if lines[0] == rest.rstrip(" "):
            while self._goes_on(indent):
                more = self._continuation(indent)
                if more[0] in _INDICATORS or " #" in more or len(lines) == MOST_LINES:
                    raise NotPlainError
                lines.append(more)
        plain = " ".join(lines)
        if ": " in plain or plain[-1] == ":":
            raise NotPlainError
        return scalar(plain)

    def _goes_on(self, indent: int) -> bool:
        """Whether the very next line has content that is indented by more than `indent`."""
        line = self._lines[self._next] if self._next < len(self._lines) else ""
        return line.strip(" ")[:1] not in ("", "#") and line.startswith(" " * (indent + 1))

    def _continuation(self, indent: int) -> str:
        """The next line, which continues a scalar: it is neither blank nor indented by `indent` or less."""
        if self._next == len(self._lines):
            raise NotPlainError
        line = self._lines[self._next]
        content = line.strip(" ")
        if not content or not line.startswith(" " * (indent + 1)):
            raise NotPlainError
        self._next += 1
        return content

    def _block_text(self, header: str, indent: int) -> str:
        """Folded (>) or literal (|) text whose lines are all indented alike."""
        if header not in (">-", ">", "|-", "|") or self._next == len(self._lines):
            raise NotPlainError
        lines: list[str] = []
        inner = len(self._lines[self._next]) - len(self._lines[self._next].lstrip(" "))
        while self._next < len(self._lines):
            line = self._lines[self._next]
            content = line.lstrip(" ")
            if not content:
                break
            column = len(line) - len(content)
            if column <= indent:
                break
            if column != inner or line[-1] == " ":
                raise NotPlainError
            lines.append(content)
            self._next += 1
        if not lines or self._next == len(self._lines) or self._indent() > indent:
            raise NotPlainError
        return (" " if header[0] == ">" else "\n").join(lines) + ("" if header[1:] else "\n")

    def _flow(self, rest: str, indent: int, depth: int) -> Any:
        """A flow collection, which may go on for several lines that are all indented more than `indent`."""
        first = self._next
        value, end = flow_value(self._text, self._starts[first] - 1 - len(rest), depth + 1)
        while self._starts[self._next] <= end:
            if not self._lines[self._next].startswith(" " * (indent + 1)):
                raise NotPlainError
            self._next += 1
        if not _REST.fullmatch(self._text, end, self._starts[self._next] - 1):
            raise NotPlainError
        return value
