"""Compiles functions with Numba, strictly: no reordered arithmetic, no threads, a private cache on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numba

from moesim.simulator.engine.compiled.cache import cache_folder

P = ParamSpec("P")
R = TypeVar("R")

_folder = cache_folder()
if _folder is not None:
    setattr(numba.config, "CACHE_DIR", str(_folder))  # noqa: B010 (made at run time; read by decorators)


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function with the first one that calls it.

    Division by zero gives infinity, as in NumPy. `fastmath` stays off, so every sum keeps its order.
    """
    result: Callable[P, R] = numba.njit(error_model="numpy", fastmath=False)(function)
    return result


def entry(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function that Python calls, with all that it calls, or load it from disk."""
    stored = _folder is not None
    result: Callable[P, R] = numba.njit(cache=stored, error_model="numpy", fastmath=False)(function)
    return result
