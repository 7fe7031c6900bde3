"""Expands the braces of the shell, `{a,b}` and `{1..8}`, in raw words."""

from __future__ import annotations

import itertools
import re

from moesim.simulator.trainers.reading.shell_words import ShellTextError, skip_piece

_BRACE_RANGE = re.compile(r"(-?\d{1,6})\.\.(-?\d{1,6})(?:\.\.(-?\d{1,6}))?", re.ASCII)
_MOST_BRACES = 1_000


def braces(raw: str) -> list[str]:
    """The raw words that brace expansion (`{a,b}`, `{1..8}`) makes of one raw word."""
    at = 0
    while at < len(raw):
        if raw[at] == "{":
            options, end = _brace(raw, at)
            if options is not None:
                if len(options) > _MOST_BRACES:
                    raise ShellTextError(f"braces make more than {_MOST_BRACES} words")
                tails = braces(raw[end:])
                heads = itertools.chain.from_iterable(braces(option) for option in options)
                words = [raw[:at] + head + tail for head in heads for tail in tails]
                if len(words) > _MOST_BRACES:
                    raise ShellTextError(f"braces make more than {_MOST_BRACES} words")
                return words
            at += 1
        else:
            at = skip_piece(raw, at)
    return [raw]


def _brace(raw: str, at: int) -> tuple[list[str] | None, int]:
    """The alternatives of the brace at `at` and its end, or None where it is no brace expansion."""
    options, start, level, end = [], at + 1, 0, at + 1
    while end < len(raw):
        char = raw[end]
        if char == "{":
            level += 1
            end += 1
        elif char == "}" and level:
            level -= 1
            end += 1
        elif char == "}":
            options.append(raw[start:end])
            break
        elif char == "," and not level:
            options.append(raw[start:end])
            start = end = end + 1
        else:
            end = skip_piece(raw, end)
    else:
        return None, at
    if len(options) > 1:
        return options, end + 1
    letters = re.fullmatch(r"([A-Za-z])\.\.([A-Za-z])", options[0])
    if letters and letters[1].isupper() == letters[2].isupper():
        codes = ord(letters[1]), ord(letters[2])
        way = 1 if codes[0] <= codes[1] else -1
        return [chr(code) for code in range(codes[0], codes[1] + way, way)], end + 1
    match = _BRACE_RANGE.fullmatch(options[0])
    if not match:
        return None, at
    first, last, step = int(match[1]), int(match[2]), abs(int(match[3] or 1)) or 1
    numbers = range(first, last + 1, step) if first <= last else range(first, last - 1, -step)
    if len(numbers) > _MOST_BRACES:
        raise ShellTextError(f"braces make more than {_MOST_BRACES} words")
    width = (
        max(len(match[1]), len(match[2]))
        if re.match(r"-?0\d", match[1]) or re.match(r"-?0\d", match[2])
        else 0
    )
    return [str(number).zfill(width) for number in numbers], end + 1
