"""Compiles functions with Numba, strictly: no reordered arithmetic, no threads, a cache on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numba

from moesim.simulator.engine.compiled.cache import cache_folder

P = ParamSpec("P")
R = TypeVar("R")

numba.config.CACHE_DIR = str(cache_folder())  # read by Numba when a function is decorated


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function at its first call, or load it from the cache.

    Division by zero gives infinity, as in NumPy. `fastmath` stays off, so every sum keeps its order.
    """
    result: Callable[P, R] = numba.njit(cache=True, error_model="numpy", fastmath=False)(function)
    return result
