"""Board power of classes of kernels against the clock, and the clock that a mix of them leaves (eq. C33)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import fsum
from typing import Annotated, Literal

from pydantic import Field

from moesim.hwmodels.calibration_entry import Entry, PlainPart

LoadClass = Literal["gemm", "attention", "memory"]
"""Kernels whose power differs: GEMMs of any format, core attention, and all others."""

_STEPS = 40
"""Halvings of the interval in which the clock is searched."""

Exponent = Annotated[float, Field(ge=0.0, le=6.0)]


class ClassPower(PlainPart):
    """Power of one class of kernels over the board's limit, and how its rate follows the clock."""

    power: Annotated[float, Field(gt=0.0, le=3.0)]
    """Power at the reference clock."""
    power_exponent: Exponent
    """Exponent of the clock in the power above that of waiting."""
    rate_exponent: Exponent
    """Exponent of the clock in the rate."""
    alone_clock: Annotated[float, Field(gt=0.1, le=10.0)] = 1.0
    """Clock at which sustained rates of this class alone were measured, over the reference."""


class PowerLaw(Entry):
    """Power and clock of a GPU at its limit; the reference clock is that of GEMMs back to back."""

    most_clock: Annotated[float, Field(ge=1.0, le=10.0)]
    """Highest clock over the reference."""
    wait: Annotated[float, Field(ge=0.0, lt=1.0)]
    """Power while nothing computes, over the limit."""
    collective: Annotated[float, Field(ge=0.0, lt=1.0)]
    """Power while only kernels of collectives run, over the limit."""
    classes: Mapping[LoadClass, ClassPower]

    def power(self, of: LoadClass, clock: float) -> float:
        """Power of a class over the limit, at a clock over the reference."""
        own = self.classes[of]
        return float(self.wait + (own.power - self.wait) * clock**own.power_exponent)


def load_clock(
    law: PowerLaw,
    seconds: Callable[[float], Mapping[LoadClass, float]],
    *,
    wait: float = 0.0,
    collective: float = 0.0,
    beside: float = 0.0,
) -> float:
    """Clock over the reference at which the mean power is the limit, or the highest clock (eq. C33).

    `seconds`: time of each class at a clock. `wait`, `collective`: seconds without compute, alone and beside
    kernels of collectives. `beside`: seconds of compute beside which collectives run. The clock may be below
    the reference.
    """

    def above(clock: float) -> bool:
        parts = seconds(clock)
        total = fsum(parts.values()) + wait + collective
        spent = fsum(law.power(of, clock) * s for of, s in parts.items())
        drawn = law.wait * wait + law.collective * collective + (law.collective - law.wait) * beside
        return spent + drawn > total

    low, high = 0.3, law.most_clock
    if not above(high):
        return high
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if above(middle) else (middle, high)
    return low
