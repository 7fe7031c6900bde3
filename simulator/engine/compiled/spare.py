"""Keeps the memory of the last run's clocks, because fresh memory takes the operating system long."""

from __future__ import annotations

import sys

import numpy as np

from moesim.hwmodels.arrays import IntArray

MOST_BYTES = 64_000_000
"""Largest memory that is kept; a larger run, such as full resolution, takes and returns its own."""


class SpareMemory:
    """One block of integers, handed out again when nothing refers to it any more."""

    def __init__(self) -> None:
        """Nothing is kept before the first run."""
        self._block: IntArray | None = None

    def take(self, rows: int, columns: int) -> IntArray:
        """An array of arbitrary numbers [rows, columns], in the kept block if it is free and large enough."""
        size = rows * columns
        if size * 8 > MOST_BYTES:
            return np.empty((rows, columns), dtype=np.int64)
        block, self._block = self._block, None
        # Every view of a block refers to it, so a block with one name left (and the argument) is free.
        if block is None or len(block) < size or sys.getrefcount(block) > 2:
            block = np.empty(size, dtype=np.int64)
        self._block = block
        return block[:size].reshape(rows, columns)


SPARE = SpareMemory()
