"""Tables of terms of a step over one number or two, filled where they are read (pure)."""

from __future__ import annotations

from collections.abc import Callable
from math import log

from moesim.simulator.serving.terms import Total

EXACT = 64
"""Numbers up to this are tabulated one by one."""
STEPS = 12
"""Grid points for a doubling above that: neighbours differ by 6 %."""


def _below(x: float) -> tuple[int, float]:
    """Index of the grid point at or below a number, and the share of the way to the next."""
    if x <= EXACT:
        at = int(x)
        return at, x - at
    at = int(STEPS * log(x / EXACT, 2.0))
    low, high = _point(EXACT + at), _point(EXACT + at + 1)
    if x >= high:  # rounding of the logarithm
        at, low, high = at + 1, high, _point(EXACT + at + 2)
    return EXACT + at, (x - low) / (high - low)


def _point(at: int) -> float:
    return float(at) if at <= EXACT else EXACT * 2.0 ** ((at - EXACT) / STEPS)


def _between(low: Total, high: Total, share: float) -> Total:
    return Total(
        low.seconds + share * (high.seconds - low.seconds),
        low.slowed + share * (high.slowed - low.slowed),
        low.held + share * (high.held - low.held),
        low.launches if share < 0.5 else high.launches,
    )


class Row:
    """A term over one number."""

    def __init__(self, price: Callable[[float], Total]) -> None:
        """`price`: the term itself."""
        self._price = price
        self._points: dict[int, Total] = {}
        self._read: dict[float, Total] = {}

    def at(self, x: float) -> Total:
        """The term at a number of at least 0."""
        found = self._read.get(x)
        if found is None:
            if len(self._read) >= 100_000:
                self._read.clear()
            at, share = _below(x)
            found = self._point(at)
            if share:
                found = _between(found, self._point(at + 1), share)
            self._read[x] = found
        return found

    def _point(self, at: int) -> Total:
        found = self._points.get(at)
        if found is None:
            found = self._points[at] = self._price(_point(at))
        return found


class Plane:
    """A term over two numbers."""

    def __init__(self, price: Callable[[float, float], Total]) -> None:
        """`price`: the term itself."""
        self._price = price
        self._points: dict[tuple[int, int], Total] = {}

    def at(self, x: float, y: float) -> Total:
        """The term at two numbers of at least 1."""
        i, right = _below(x)
        j, up = _below(y)
        found = self._point(i, j)
        if up:
            found = _between(found, self._point(i, j + 1), up)
        if not right:
            return found
        other = self._point(i + 1, j)
        if up:
            other = _between(other, self._point(i + 1, j + 1), up)
        return _between(found, other, right)

    def _point(self, i: int, j: int) -> Total:
        found = self._points.get((i, j))
        if found is None:
            found = self._points[i, j] = self._price(_point(i), _point(j))
        return found
