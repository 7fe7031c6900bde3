"""Legal ranges of quantities: one for every dimension, and narrower ones for the meaning of a field.

The ranges are wide on purpose. They include every existing machine and some future ones, and refuse typing
errors and values without a meaning in a step (docs/units.md).
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, NamedTuple, Protocol, TypeVar

from pydantic import AfterValidator, Field

from moesim.hwmodels.units import DIMENSIONS, format_quantity

_MOST_VALUE_CHARACTERS = 20
"""Longest value in a message; a longer one is shortened to few digits."""


class Range(NamedTuple):
    """Lowest and highest legal value, in SI units."""

    low: float
    high: float

    def problem(self, value: float, dimension: str) -> str:
        """Says why a value is illegal and which legal one is nearest; empty for a legal value."""
        if self.low <= value <= self.high:
            return ""
        low, high = (_shown(end, dimension) for end in self)
        near = low if value < self.low else high
        return f"{_shown(value, dimension)} is outside {low} to {high}; nearest: {near}"


def _shown(value: float, dimension: str) -> str:
    """A value with its unit, in few digits."""
    text = format_quantity(value, dimension)
    return text if len(text) <= _MOST_VALUE_CHARACTERS else f"{value:g} {DIMENSIONS[dimension].base}".rstrip()


BY_DIMENSION: dict[str, Range] = {
    "bytes": Range(0.0, 1e18),
    "bytes_per_s": Range(1e6, 1e16),
    "s": Range(0.0, 1e10),
    "flop_per_s": Range(1e9, 1e18),
    "hz": Range(1e6, 1e11),
    "w": Range(0.0, 1e9),
    "usd": Range(0.0, 1e12),
    "usd_per_hour": Range(0.0, 1e6),
    "usd_per_kwh": Range(0.0, 1e3),
    "usd_per_w": Range(0.0, 1e4),
    "usd_per_w_year": Range(0.0, 1e4),
    "gpu_hours": Range(0.0, 1e12),
    "kg_per_kwh": Range(0.0, 1e2),
    "per_node_day": Range(0.0, 1e6),
    "m": Range(0.0, 4.1e7),
    "count": Range(1.0, 1e9),
}
"""Range of every sourced number, by dimension; other numbers have ranges of their own."""


class _Number(Protocol):
    @property
    def value(self) -> float: ...

    @property
    def between(self) -> tuple[float, float] | None: ...

    @property
    def dimension(self) -> str: ...


NumberT = TypeVar("NumberT")


def check(number: _Number, allowed: Range) -> None:
    """Raise ValueError where a number, or an end of the range that its source states, is not allowed."""
    for value in (number.value, *(number.between or ())):
        problem = allowed.problem(value, number.dimension)
        if problem:
            raise ValueError(problem)


def within(low: float, high: float) -> AfterValidator:
    """A narrower range of one field, in SI units: `Annotated[SourcedFraction, within(0, 1)]`."""
    return AfterValidator(partial(_kept, allowed=Range(low, high)))


def _kept(number: NumberT, *, allowed: Range) -> NumberT:
    check(number, allowed)  # type: ignore[arg-type]
    return number


LATENCY = within(0.0, 1.0)
"""Latency of one message in s."""
SPEED_SPREAD = within(0.0, 0.5)
"""Relative spread of lasting speeds; beyond it some members would hardly run."""
JITTER = within(0.0, 1.0)
"""Relative spread of durations from run to run; beyond it the normal law would be cut off at 0."""
LOAD_SPREAD = within(0.0, 10.0)
"""Relative spread of expert loads; at ten, one expert of a hundred gets all rows."""
EXPONENT = within(0.0, 10.0)
"""Exponent of a power law; at ten the first member takes all."""
MAX_VIO = within(0.0, 1e4)
"""Rows of the busiest expert over the mean, less 1."""
CAPACITY = within(0.01, 1e3)
"""Multiple of the mean load above which rows are dropped."""
SHARE = within(0.0, 1.0)
"""A part of a whole."""
USE = within(0.01, 1.0)
"""The part of its life that a machine is in use."""
LIFETIME = within(86400.0, 1e10)
"""Write-off time in s, a day or more."""
POWER_USAGE = within(1.0, 10.0)
"""Energy of a site over that of its machines (PUE)."""
SLOWNESS = within(0.01, 100.0)
"""Ratio of two times for the same work."""
OVERSUBSCRIPTION = within(1.0, 1e3)
"""Bandwidth into a switch over that out of it."""

PartLeft = Annotated[float, Field(ge=0.001, lt=1.0)]
"""Part of a speed or bandwidth that a fault leaves; a component with less counts as down."""

CURVES: dict[str, Range] = {
    "ratio": Range(1e-3, 1e2),
    "share": Range(1e-3, 1.0),
    "bytes_per_s": BY_DIMENSION["bytes_per_s"],
    "flop_per_s": BY_DIMENSION["flop_per_s"],
    "s": Range(0.0, 10.0),
}
"""Ranges of measured values in a calibration profile: ratios, rates, times, and shares of a nominal rate.

Shares are the curves whose name ends in `_fraction`.
"""
