"""Pauses Python's cyclic garbage collector around work that leaves no cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_cyclic_collection() -> Iterator[None]:
    """Pause the cyclic garbage collector, which would walk all prices, plans and records again and again.

    What these functions make has no cycles: it is freed as soon as nothing refers to it.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
