"""Compiles functions with Numba, strictly: no reordered arithmetic and no threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numba

P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function with the first one that calls it.

    Division by zero gives infinity, as in NumPy. `fastmath` stays off, so every sum keeps its order.
    """
    result: Callable[P, R] = numba.njit(error_model="numpy", fastmath=False)(function)
    return result
