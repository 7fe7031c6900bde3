"""Units of measured curves: their factors to SI, and the dimension of their values."""

from __future__ import annotations

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.units import DIMENSIONS, parse_quantity

COUNT_UNITS = frozenset({"1", "SMs", "GPUs", "nodes", "tokens", "rows", "CTAs", "ranks"})


def si_factor(unit: str) -> float:
    """The factor from a unit name of a curve ("TFLOP/s", "MB", "us", "SMs") to SI.

    Raises InputError for a unit that no dimension knows.
    """
    if unit in COUNT_UNITS:
        return 1.0
    for name, table in DIMENSIONS.items():
        if unit and unit in table.units:
            return parse_quantity(f"1 {unit}", name)
    known = sorted(COUNT_UNITS | {u for t in DIMENSIONS.values() for u in t.units if u})
    raise InputError(f"unknown unit {unit!r} in a calibration profile; known: {', '.join(known)}")


def dimension_of(unit: str) -> str:
    """The dimension of the values of a curve with this unit; ratios and numbers of things are "ratio"."""
    return next((name for name, table in DIMENSIONS.items() if unit and unit in table.units), "ratio")
