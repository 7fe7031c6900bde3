"""Figures of prices, computed once for every object that many tasks share (pure)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np

from moesim.hwmodels.arrays import IntArray

Item = TypeVar("Item")


class Priced(Protocol):
    """A price with its range."""

    @property
    def best_s(self) -> float:
        """Seconds in the best case."""

    @property
    def worst_s(self) -> float:
        """Seconds in the worst case."""


Figure = Callable[[Priced, float], float]
"""A figure of a price and its expected seconds."""


def by_identity(items: Sequence[Item]) -> tuple[IntArray, list[Item]]:
    """(number of every item in the list, the different objects among the items in their order)."""
    keys = list(map(id, items))
    different = dict(zip(keys, items, strict=True))
    number = {key: at for at, key in enumerate(different)}
    return np.array([number[key] for key in keys], dtype=np.int64), list(different.values())
