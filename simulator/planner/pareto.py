"""Pareto fronts: the plans that no other plan dominates."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moesim.hwmodels.arrays import BoolArray, FloatArray


def front(points: Sequence[Sequence[float]]) -> list[int]:
    """Positions, ascending, of the points that no other point dominates; of equal points the first stays.

    A point dominates another if it is smaller in one value and no larger in any.
    """
    kept: list[int] = []
    order = sorted(range(len(points)), key=lambda n: (tuple(points[n]), n))
    for n in order:
        mine = points[n]
        if not any(all(a <= b for a, b in zip(points[k], mine, strict=True)) for k in kept):
            kept.append(n)
    return sorted(kept)


def staircase(memory: FloatArray, time_s: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Memory in ascending order, and the least time of all plans with at most that memory."""
    order = np.lexsort((time_s, memory))
    return memory[order], np.minimum.accumulate(time_s[order])


def dominated(memory: FloatArray, bound_s: FloatArray, steps: tuple[FloatArray, FloatArray]) -> BoolArray:
    """Whether each plan is dominated: another has no more memory and a time no longer than its bound.

    `steps` is the staircase of the estimated plans.
    """
    if not len(steps[0]):
        return np.zeros(len(memory), dtype=bool)
    at = np.searchsorted(steps[0], memory, side="right") - 1
    best = np.where(at >= 0, steps[1][np.maximum(at, 0)], np.inf)
    return np.asarray(best <= bound_s)
