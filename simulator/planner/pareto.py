"""The plans that no other plan beats in everything."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moesim.hwmodels.arrays import BoolArray, FloatArray


def front(points: Sequence[Sequence[float]]) -> list[int]:
    """Positions of the points that no other is at most equal to in all and below in one; in given order.

    Of equal points the first stays.
    """
    kept: list[int] = []
    order = sorted(range(len(points)), key=lambda n: (tuple(points[n]), n))
    for n in order:
        mine = points[n]
        if not any(all(a <= b for a, b in zip(points[k], mine, strict=True)) for k in kept):
            kept.append(n)
    return sorted(kept)


def staircase(memory: FloatArray, time_s: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Memory ascending, and the least time of all plans with at most that memory."""
    order = np.lexsort((time_s, memory))
    return memory[order], np.minimum.accumulate(time_s[order])


def beaten(memory: FloatArray, bound_s: FloatArray, steps: tuple[FloatArray, FloatArray]) -> BoolArray:
    """Plans that cannot be on the front: another has no more memory and less time than their bound."""
    if not len(steps[0]):
        return np.zeros(len(memory), dtype=bool)
    at = np.searchsorted(steps[0], memory, side="right") - 1
    best = np.where(at >= 0, steps[1][np.maximum(at, 0)], np.inf)
    return np.asarray(best <= bound_s)
