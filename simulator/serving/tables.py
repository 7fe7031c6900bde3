"""Tables of terms of a step over one number or two, filled where they are read (pure)."""

from __future__ import annotations

from collections.abc import Callable
from math import log
from typing import NamedTuple

from moesim.simulator.serving.terms import Total

EXACT = 16
"""Numbers up to this are tabulated one by one."""
STEPS = 5
"""Grid points for a doubling above that: neighbours differ by 15 %."""
_POINTS = [*map(float, range(EXACT + 1)), *(EXACT * 2.0 ** (k / STEPS) for k in range(1, 40 * STEPS))]
_PER_LOG = STEPS / log(2.0)
_LOG_EXACT = log(EXACT)
MOST_READ = 200_000


def _below(x: float) -> int:
    """Index of the grid point at or below a number of at least 0."""
    if x < EXACT:
        return int(x)
    at = EXACT + int((log(x) - _LOG_EXACT) * _PER_LOG)
    return at if _POINTS[at] <= x else at - 1


def _between(low: Total, high: Total, share: float) -> Total:
    a, b, c, d, launches = low
    e, f, g, h, _ = high
    return Total(a + share * (e - a), b + share * (f - b), c + share * (g - c), d + share * (h - d), launches)


class TableRow:
    """A term over one number."""

    def __init__(
        self, price: Callable[[float], Total], captured: Callable[[float], Total] | None = None
    ) -> None:
        """`price`: the term itself; `captured`: the same in a graph, where it differs."""
        self._price, self._captured = price, captured or price
        self._points: dict[int, Total] = {}
        self._read: dict[float, Total] = {}
        self._exact: dict[float, Total] = {}

    def at(self, x: float) -> Total:
        """The term at a number of at least 0."""
        found = self._read.get(x)
        if found is None:
            if len(self._read) >= MOST_READ:
                self._read.clear()
            at = _below(x)
            found, low = self._point(at), _POINTS[at]
            if x > low:
                found = _between(found, self._point(at + 1), (x - low) / (_POINTS[at + 1] - low))
            self._read[x] = found
        return found

    def exact(self, x: float) -> Total:
        """The term in a graph of so many rows, priced once."""
        found = self._exact.get(x)
        if found is None:
            found = self._exact[x] = self._captured(x)
        return found

    def _point(self, at: int) -> Total:
        found = self._points.get(at)
        if found is None:
            found = self._points[at] = self._price(_POINTS[at])
        return found


class TableReading(NamedTuple):
    """Seconds of a term, what they grow by as the second number grows by 1, and how far that law holds."""

    seconds: float
    growth: float
    room: float


class Plane:
    """A term over two numbers."""

    def __init__(self, price: Callable[[float, float], Total]) -> None:
        """`price`: the term itself."""
        self._price = price
        self._points: dict[tuple[int, int], Total] = {}

    def at(self, x: float, y: float) -> Total:
        """The term at two numbers of at least 1."""
        i, j = _below(x), _below(y)
        up = (y - _POINTS[j]) / (_POINTS[j + 1] - _POINTS[j])
        found = self._point(i, j)
        if up:
            found = _between(found, self._point(i, j + 1), up)
        if x > _POINTS[i]:
            other = _between(self._point(i + 1, j), self._point(i + 1, j + 1), up)
            found = _between(found, other, (x - _POINTS[i]) / (_POINTS[i + 1] - _POINTS[i]))
        return found

    def read(self, x: float, y: float) -> TableReading:
        """The seconds alone, with their growth."""
        i, j, points = _below(x), _below(y), self._points
        low, high = _POINTS[j], _POINTS[j + 1]
        try:
            here, there = points[i, j][0], points[i, j + 1][0]
        except KeyError:
            here, there = self._point(i, j)[0], self._point(i, j + 1)[0]
        left = _POINTS[i]
        if x > left:
            share = (x - left) / (_POINTS[i + 1] - left)
            try:
                further, furthest = points[i + 1, j][0], points[i + 1, j + 1][0]
            except KeyError:
                further, furthest = self._point(i + 1, j)[0], self._point(i + 1, j + 1)[0]
            here += share * (further - here)
            there += share * (furthest - there)
        growth = (there - here) / (high - low)
        return TableReading(here + (y - low) * growth, growth, high - y)

    def _point(self, i: int, j: int) -> Total:
        found = self._points.get((i, j))
        if found is None:
            found = self._points[i, j] = self._price(_POINTS[i], _POINTS[j])
        return found
