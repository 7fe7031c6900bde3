"""Reads flow collections and plain scalars of the common part of YAML, by position in a text (pure)."""

from __future__ import annotations

import json
import re
from typing import Any

MOST_DEPTH = 30
"""Most levels of collections that are read here."""
_MOST_DIGITS = 30
_FLAT = re.compile(r"\[[0-9eE.+, -]*\]")
"""A list of numbers, which JSON reads alike if it reads it at all."""
_FLOW_KEY = re.compile(r"(?:([A-Za-z_][A-Za-z0-9_.-]*)|\"([^\"\\\n]+)\"):[ \n]+")
MOST_IN_A_KEY = 100
_FLOW_PLAIN = re.compile(r"[^\n,\[\]{}\"':#?&*!|>%@`]+")
_LINE_END = re.compile(r" *\n *")
_SPACE = re.compile(r"[ \n]*")
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?")
_TEXT = re.compile(r"[0-9]{4}-[0-9]{2}(?:-[0-9]{2})?|[0-9]+\.[0-9]+\.[0-9.]*")
"""Dates and the numbers of versions, which are no numbers."""
_LIKE_A_NUMBER = re.compile(r"[-+.0-9_:eE]*|[-+]?0[bBoOxX].*")
_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_RESERVED = {"null", "~", "yes", "no", "on", "off", "y", "n", "true", "false", "=", "<<"}
QUOTED = re.compile(r"\"([^\"\\]*)\"|'([^']*)'(?!')")


class NotPlainError(Exception):
    """The text is beyond what is read here."""


def flow_value(text: str, at: int, depth: int) -> tuple[Any, int]:
    """The value at a position of the text, and the position behind it."""
    if depth > MOST_DEPTH:
        raise NotPlainError
    match text[at : at + 1]:
        case "[":
            flat = _FLAT.match(text, at)
            if flat is not None:
                try:
                    return json.loads(flat[0]), flat.end()
                except ValueError:
                    pass
            return _flow_list(text, at, depth)
        case "{":
            return _flow_mapping(text, at, depth)
        case '"' | "'":
            quoted = QUOTED.match(text, at)
            if quoted is None or "\n\n" in quoted[0].replace(" ", ""):
                raise NotPlainError
            joined = _LINE_END.sub(" ", quoted[1] if quoted[2] is None else quoted[2])
            return joined, quoted.end()
    return _flow_plain(text, at)


def _flow_plain(text: str, at: int) -> tuple[Any, int]:
    """A plain scalar, which may go on for several lines."""
    parts: list[str] = []
    while True:
        part = _FLOW_PLAIN.match(text, at)
        if part is None or (part[0][0] == "-" and not part[0][1:2].isalnum()):
            raise NotPlainError
        parts.append(part[0].rstrip(" "))
        at = _skip(text, part.end())
        if "\n" not in text[part.end() : at] or text[at] in ",]}":
            return scalar(" ".join(parts)), part.end()
        if "\n\n" in text[part.end() : at].replace(" ", ""):
            raise NotPlainError


def _flow_list(text: str, at: int, depth: int) -> tuple[list[Any], int]:
    found: list[Any] = []
    at = _skip(text, at + 1)
    if text[at] == "]":
        return found, at + 1
    while True:
        value, at = flow_value(text, at, depth + 1)
        found.append(value)
        at, ends = _separator(text, at, "]")
        if ends:
            return found, at


def _flow_mapping(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    at = _skip(text, at + 1)
    if text[at] == "}":
        return found, at + 1
    while True:
        key = _FLOW_KEY.match(text, at)
        if key is None:
            raise NotPlainError
        name = str(key[1] or key[2])
        if name in found or len(name) > MOST_IN_A_KEY or (key[1] and is_odd_key(name)):
            raise NotPlainError
        found[name], at = flow_value(text, key.end(), depth + 1)
        at, ends = _separator(text, at, "}")
        if ends:
            return found, at


def _separator(text: str, at: int, closing: str) -> tuple[int, bool]:
    """The position behind a comma and its space, or behind the closing bracket, and which it was."""
    at = _skip(text, at)
    if text[at] == closing:
        return at + 1, True
    if text[at] != ",":
        raise NotPlainError
    return _skip(text, at + 1), False


def _skip(text: str, at: int) -> int:
    """The next position that is neither a space nor the end of a line."""
    found = _SPACE.match(text, at)
    end = at if found is None else found.end()
    if end >= len(text):
        raise NotPlainError
    return end


def is_odd_key(key: str) -> bool:
    """Whether a plain key is very long or may stand for something else than text."""
    return key.lower() in _RESERVED or len(key) > MOST_IN_A_KEY or key[-1] == " "


def scalar(plain: str) -> Any:
    """A plain scalar as text, number, boolean or null."""
    first = plain[0]
    if first in "-+.0123456789":
        if " " in plain or _TEXT.fullmatch(plain):
            return plain
        if len(plain) <= _MOST_DIGITS:
            if _INTEGER.fullmatch(plain):
                return int(plain)
            if _FLOAT.fullmatch(plain) and not plain.lstrip("+-").isdigit():
                return float(plain)
        if _LIKE_A_NUMBER.fullmatch(plain) or first == ".":
            raise NotPlainError
        return plain
    if plain in _BOOLEANS:
        return _BOOLEANS[plain]
    if plain in ("null", "~"):
        return None
    if plain.lower() in _RESERVED:
        raise NotPlainError
    return plain
