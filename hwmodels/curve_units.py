"""Units of measured curves, with their factors to SI and the dimensions of the values."""

from __future__ import annotations

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.units import DIMENSIONS, parse_quantity

COUNT_UNITS = frozenset({"1", "SMs", "GPUs", "nodes", "tokens", "rows", "CTAs", "ranks"})


def si_factor(unit: str) -> float:
    """The factor from a unit name of a curve ("TFLOP/s", "MB", "us", "SMs") to SI.

    Raises InputError for an unknown unit.
    """
    if unit in COUNT_UNITS:
        return 1.0
    for name, table in DIMENSIONS.items():
        if unit and unit in table.units:
            return parse_quantity(f"1 {unit}", name)
    known = sorted(COUNT_UNITS | {u for t in DIMENSIONS.values() for u in t.units if u})
    raise InputError(f"unknown unit {unit!r} in a calibration profile; known: {', '.join(known)}")


def dimension_of(unit: str) -> str:
    """The dimension that a unit belongs to; "ratio" for ratios and counts."""
    return next((name for name, table in DIMENSIONS.items() if unit and unit in table.units), "ratio")
