"""Limits of what any YAML or JSON file may hold, so that hostile text is refused within a second (pure)."""

from __future__ import annotations

import math
from typing import Any

from moesim.hwmodels.errors import InputError

MAX_YAML_VALUES = 20_000
"""Most keys and values of one YAML file, which is read at 50 to 400 kB/s where it is unusual."""
MAX_DEPTH = 40
"""Most levels of nested mappings and lists; no shipped file has more than 6."""
_INTEGERS = 2**63


def check(data: Any, most_values: int, most_keys: int) -> None:
    """Raise InputError for too many values or keys, too deep nesting, and illegal texts or numbers."""
    left, keys = most_values, most_keys
    todo: list[tuple[Any, int]] = [(data, 0)]
    while todo:
        value, depth = todo.pop()
        if isinstance(value, dict):
            keys -= len(value)
            for key in value:
                check_text(key if isinstance(key, str) else "")
            inside = list(value.values())
        elif isinstance(value, list):
            inside = value
        else:
            _check_value(value)
            continue
        left -= len(inside)
        if left < 0 or keys < 0:
            what = f"{most_values:,} values" if left < 0 else f"{most_keys:,} keys"
            raise InputError(f"more than {what}, the limit of one file")
        if depth >= MAX_DEPTH:
            raise InputError(f"nested too deeply, more than {MAX_DEPTH} levels")
        todo.extend((item, depth + 1) for item in inside)


def _check_value(value: Any) -> None:
    if isinstance(value, str):
        check_text(value)
    elif isinstance(value, bool) or value is None:
        return
    elif isinstance(value, int):
        if not -_INTEGERS <= value < _INTEGERS:
            raise InputError(
                f"{cut(hex(value))} is out of range: whole numbers are from -2^63 to 2^63-1; nearest: "
                f"{_INTEGERS - 1 if value > 0 else -_INTEGERS}"
            )
    elif not math.isfinite(value):
        raise InputError(f"{value} is out of range: numbers are finite, below 1.8e308")


def check_text(text: str) -> None:
    """Raise InputError for a zero byte or half of a surrogate pair."""
    if text.isascii():
        if "\0" in text:
            raise InputError(f"the text {cut(repr(text))} contains a zero byte")
    else:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"character {error.start + 1} of the text {cut(ascii(text))} is half of a pair "
                "(a surrogate), which no file can hold"
            ) from None


def cut(text: str) -> str:
    """The text, shortened to 60 characters for a message."""
    return text if len(text) <= 60 else text[:57] + "..."
