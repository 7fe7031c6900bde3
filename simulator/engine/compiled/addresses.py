"""The table of addresses through which compiled code finds the arrays of a run (see `memory`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from moesim.hwmodels.arrays import IntArray
from moesim.simulator.engine.compiled.state import RunState
from moesim.simulator.engine.compiled.tables import Tables

FIELDS = (*Tables._fields, *RunState._fields)


def addresses(tables: Tables, state: RunState) -> IntArray:
    """The address of every array, in the order of `FIELDS`; the arrays must outlive the table.

    Raises TypeError for an array that is not contiguous or has another type of number than its field.
    """
    for name, array in zip(FIELDS, (*tables, *state), strict=True):
        wanted = np.float64 if name in FLOATS else np.int64
        if array.dtype != wanted or not array.flags.c_contiguous:
            raise TypeError(f"{name} is {array.dtype}; it must be contiguous, of {wanted.__name__}")
    return np.array([address_of(a) for a in (*tables, *state)], dtype=np.int64)


FLOATS = frozenset(
    name
    for fields in (Tables.__annotations__, RunState.__annotations__)
    for name, kind in fields.items()
    if "Float" in str(kind)
)
"""Fields of floating-point numbers; all others hold integers."""


def address_of(array: np.ndarray[Any, Any]) -> int:
    """Where an array begins."""
    return int(array.__array_interface__["data"][0])
