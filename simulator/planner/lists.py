"""List expressions of a plan space, such as "1..16:2x", read by a small grammar (never evaluated)."""

from __future__ import annotations

import re

from moesim.hwmodels.errors import InputError

MOST_VALUES = 10_000
"""Most values that one expression may stand for."""

_RANGE = re.compile(r"(\d{1,9})\.\.(\d{1,9})(?::(?:(\d{1,9})x|\+(\d{1,9})))?")
_FORMS = 'write numbers and ranges separated by commas: "1,2,8", "1..8", "8..32:+4" or "1..16:2x"'


def parse_integers(text: str, key: str) -> tuple[int, ...]:
    """The integers of an expression, ascending and without repeats.

    Parts are separated by commas: "7", "1..8" (each one), "8..32:+4" (steps of four), "1..16:2x" (doubling).
    Raises InputError, naming `key`, for anything else and for more than `MOST_VALUES` values.
    """
    found: set[int] = set()
    for part in (piece.strip() for piece in text.split(",")):
        if re.fullmatch(r"\d{1,9}", part):
            found.add(int(part))
            continue
        match = _RANGE.fullmatch(part)
        if match is None:
            raise InputError(f"{key}={text!r}: cannot read {part!r}; {_FORMS}")
        found.update(_range(match, text, key))
        if len(found) > MOST_VALUES:
            raise InputError(f"{key}={text!r} stands for more than {MOST_VALUES:,} values; {_FORMS}")
    return tuple(sorted(found))


def _range(match: re.Match[str], text: str, key: str) -> list[int]:
    first, last = int(match[1]), int(match[2])
    factor, step = int(match[3] or 0), int(match[4] or 0)
    if first > last:
        raise InputError(f"{key}={text!r}: {match[0]!r} runs backwards; write the smaller number first")
    if match[3] is not None:
        if factor < 2 or first < 1:
            raise InputError(
                f"{key}={text!r}: {match[0]!r} never ends; multiply by 2 or more, from 1 or more"
            )
        values = [first]
        while values[-1] * factor <= last:
            values.append(values[-1] * factor)
        return values
    if match[4] is not None and step < 1:
        raise InputError(f"{key}={text!r}: {match[0]!r} never ends; step by 1 or more")
    step = step or 1
    if (last - first) // step >= MOST_VALUES:
        raise InputError(f"{key}={text!r} stands for more than {MOST_VALUES:,} values; {_FORMS}")
    return list(range(first, last + 1, step))
