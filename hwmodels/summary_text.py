"""Formats the short texts with which results and scenarios print themselves (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

MOST_ROWS = 6
"""Most rows of a table that a printed result shows."""


def short(value: float, digits: int = 3) -> str:
    """A number with a few significant digits and a letter for its thousands, such as 2.66 M."""
    for scale, letter in ((1e12, " T"), (1e9, " B"), (1e6, " M")):
        if abs(value) >= scale:
            return f"{value / scale:.{digits}g}{letter}"
    return f"{value:,.0f}"


def percent(fraction: float) -> str:
    """A fraction as a percentage."""
    return f"{100 * fraction:.1f} %"


def gib(size_bytes: float) -> str:
    """Bytes in GiB with one decimal, without the unit."""
    return f"{size_bytes / 2**30:.1f}"


def count(number: int, noun: str) -> str:
    """A number with its noun, such as "1 warning" or "3 warnings"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def titled(title: str, figures: Mapping[str, str]) -> str:
    """A title line, and one indented line for each named figure; figures without text are left out."""
    shown = {name: text for name, text in figures.items() if text}
    width = max((len(name) for name in shown), default=0) + 2
    return "\n".join([title, *(f"  {name:<{width}}{text}" for name, text in shown.items())])


def table_lines(rows: Sequence[Sequence[str]], most: int = MOST_ROWS) -> list[str]:
    """Indented lines of a table with aligned columns; `rows` begins with the header.

    Of more than `most` rows below the header, the first ones are shown, and a last line counts the others.
    """
    kept = rows[: most + 1]
    widths = [max(len(row[column]) for row in kept) for column in range(len(kept[0]))]
    lines = ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in kept]
    left = len(rows) - len(kept)
    return [*lines, f"  ... and {left:,} more"] if left else lines
