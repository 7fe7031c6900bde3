"""Reads list expressions such as "8..256:x2" and `key=value` texts, without evaluating code."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.yaml_io import parse_mapping

# -- texts `key=value`, which override keys of a scenario ----------------------------------------------


def split_key_value(text: str) -> tuple[str, str | None]:
    """Split a text at the first `=` into its key, stripped of spaces, and the rest (None without a `=`)."""
    key, equals, value = text.partition("=")
    return key.strip(), value if equals else None


def overridden_key(text: str) -> str:
    """Return the dotted key of a `key=value` text."""
    return split_key_value(text)[0]


def key_and_text(text: str, option: str, form: str) -> tuple[str, str]:
    """Return the key and the text of the value.

    Raises InputError, with `option` and the `form` to write, if either is missing.
    """
    key, value = split_key_value(text)
    if value is None or not key:
        raise InputError(f"{option} {text!r}: write {form}")
    return key, value


def value_of(text: str, place: str) -> Any:
    """Read the text after the `=` as YAML. Raises InputError, naming `place`, for an invalid value."""
    return parse_mapping(f"value: {split_key_value(text)[1] or ''}", place)["value"]


# -- list expressions such as "8..256:x2" or "bf16,fp8", by a small grammar that evaluates no code -----

MOST_VALUES = 10_000
"""Most values that one expression may stand for."""

_NUMBER = r"-?\d{1,15}(?:\.\d{1,15})?(?:[eE][+-]?\d{1,2})?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(?::(?:x({_NUMBER})|({_NUMBER})x|\+?({_NUMBER})))?")
_FORMS = 'write values and ranges separated by commas: "1,2,8", "1..8", "0..48:4" or "8..256:x2"'
_PAIRS = {"(": ")", "[": "]", "{": "}"}


def parse_values(text: str, key: str) -> tuple[Any, ...]:
    """Return the values of an expression, in the order given and without repeats.

    Parts are separated by commas. A part is a value as in a scenario file ("7", "fp8", "50 GB/s",
    "{kind: uniform}") or a range: "1..8" (every whole number), "0..48:4" or "0..48:+4" (in steps of four),
    "8..256:x2" or "8..256:2x" (doubling). Steps are added in decimals, so "0..1:0.1" has eleven values.
    One list in brackets, as YAML writes it, is the list of the values: "[8, 16]" is "8,16". The values of a
    key whose values are lists are a list of lists: "[[1, 2], [2, 1]]". Raises InputError, naming `key`, for
    anything else and for more than `MOST_VALUES` values.
    """
    all_values: list[Any] = []
    for part in _parts(text, key):
        match = _RANGE.fullmatch(part)
        if match is None and ".." in part and re.match(r"-?\d", part):
            raise InputError(f"{key}={text!r}: cannot read {part!r}; {_FORMS}")
        if match is not None:
            all_values.extend(_range(match, text, key))
        else:
            try:
                all_values.append(parse_mapping(f"value: {part}", key)["value"])
            except InputError as error:
                raise InputError(f"{key}={text!r}: cannot read {part!r} ({error}); {_FORMS}") from None
        if len(all_values) > MOST_VALUES:
            raise InputError(f"{key}={text!r} stands for more than {MOST_VALUES:,} values; {_FORMS}")
    unique: dict[str, Any] = {}
    for value in all_values:
        unique.setdefault(f"{type(value).__name__} {value!r}", value)
    return tuple(unique.values())


def parse_integers(text: str, key: str) -> tuple[int, ...]:
    """Return the whole numbers (0 or more) of an expression, sorted, without repeats; see `parse_values`."""
    values = parse_values(text, key)
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise InputError(f"{key}={text!r}: {value!r} is not a whole number of 0 or more; {_FORMS}")
    return tuple(sorted(values))


def parse_interval(text: str, key: str) -> tuple[float, float] | None:
    """Return the two ends of "a..b", or None where the text is not an interval.

    Raises InputError, naming `key`, unless a is below b.
    """
    match = _RANGE.fullmatch(text.strip())
    if match is None or match[3] or match[4] or match[5]:
        return None
    low, high = float(match[1]), float(match[2])
    if low >= high:
        raise InputError(f"{key}={text!r} runs backwards; write the smaller number first")
    return low, high


def split(text: str, key: str) -> list[str]:
    """Split a text at the commas outside brackets and quotes. Raises InputError for an empty part."""
    parts, open_, quote = [""], [], ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in _PAIRS:
            open_.append(_PAIRS[char])
        elif open_ and char == open_[-1]:
            open_.pop()
        elif char == "," and not open_:
            parts.append("")
            continue
        parts[-1] += char
    parts = [part.strip() for part in parts]
    if open_ or quote:
        raise InputError(f"{key}={text!r}: {(quote or open_[-1])!r} is missing; {_FORMS}")
    if not all(parts):
        raise InputError(f"{key}={text!r} has an empty part; {_FORMS}")
    return parts


def _parts(text: str, key: str) -> list[str]:
    """The parts of an expression, also where one pair of brackets surrounds them."""
    parts = split(text, key)
    if len(parts) > 1 or not (parts[0].startswith("[") and parts[0].endswith("]")):
        return parts
    if not parts[0][1:-1].strip():
        raise InputError(f"{key}={text!r} is an empty list of values; {_FORMS}")
    return split(parts[0][1:-1], key)


def _range(match: re.Match[str], text: str, key: str) -> list[int | float]:
    first, last = Decimal(match[1]), Decimal(match[2])
    factor = match[3] or match[4]
    step = Decimal(match[5] or 1)
    if first > last:
        raise InputError(f"{key}={text!r}: {match[0]!r} runs backwards; write the smaller number first")
    if factor is None and match[5] is None and first != first.to_integral_value():
        raise InputError(f"{key}={text!r}: {match[0]!r} needs a step, such as {match[0]}:0.1")
    if factor is not None and (Decimal(factor) <= 1 or first <= 0):
        raise InputError(f"{key}={text!r}: {match[0]!r} never ends; multiply by more than 1, from above 0")
    if factor is None and step <= 0:
        raise InputError(f"{key}={text!r}: {match[0]!r} never ends; step by more than 0")
    values: list[int | float] = []
    now = first
    while now <= last:
        values.append(int(now) if now == now.to_integral_value() else float(now))
        if len(values) > MOST_VALUES:
            raise InputError(f"{key}={text!r} stands for more than {MOST_VALUES:,} values; {_FORMS}")
        now = now * Decimal(factor) if factor is not None else now + step
    return values
