"""Closed forms of checkpoints: bytes, stall, expected time under failures and best interval (pure)."""

from __future__ import annotations

import math

from moesim.simulator.model.precision import BYTES_PER_ELEMENT, Precision


def checkpoint_bytes(parameters: int, recipe: Precision) -> float:
    """Bytes of a checkpoint, which holds master weights and both Adam moments of every parameter (eq. J2)."""
    each = BYTES_PER_ELEMENT[recipe.master_weights] + 2.0 * BYTES_PER_ELEMENT[recipe.moments]
    return parameters * each


def young_interval_s(stall_s: float, mean_time_between_s: float) -> float:
    """Young's first-order optimum of the training time between checkpoints in s (Young 1974; eq. J6)."""
    return math.sqrt(2.0 * stall_s * mean_time_between_s)


def daly_interval_s(stall_s: float, mean_time_between_s: float) -> float:
    """Daly's higher-order optimum of the time between checkpoints in s (Daly 2006, eq. 37; eq. J6)."""
    if stall_s >= 2.0 * mean_time_between_s:
        return mean_time_between_s
    ratio = stall_s / (2.0 * mean_time_between_s)
    root = math.sqrt(2.0 * stall_s * mean_time_between_s)
    return root * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - stall_s


def optimal_interval_s(stall_s: float, mean_time_between_s: float) -> float:
    """The interval that minimises the exact expectation of eq. J5: (1 - t/M) e^((t+d)/M) = 1.

    It is found by bisection on (0, M), where the left side decreases. Detection and restart scale the cost of
    every interval by the same factor, and the lag of an asynchronous write adds nearly the same to each, so
    they do not change the optimum.
    """
    if math.isinf(mean_time_between_s):
        return math.inf
    low, high = 0.0, 1.0
    ratio = stall_s / mean_time_between_s
    for _ in range(50):  # to 1e-15 of M
        middle = 0.5 * (low + high)
        if math.log1p(-middle) + middle + ratio > 0.0:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high) * mean_time_between_s


def segments(work_s: float, interval_s: float) -> tuple[int, float]:
    """(number of stretches of training between checkpoints, length of the last one in s)."""
    count = max(1, math.ceil(work_s / interval_s)) if math.isfinite(interval_s) else 1
    return count, work_s - (count - 1) * interval_s if count > 1 else work_s


def expected_seconds(
    work_s: float,
    interval_s: float,
    stall_s: float,
    mean_time_between_s: float,
    detection_s: float,
    restart_s: float,
) -> float:
    """Expected wall time of `work_s` s of training under exponential failures (Daly 2006, exact; eq. J5).

    Every stretch ends with a checkpoint for which training waits. Failures strike during training,
    checkpoints and restarts. The result is inf where a stretch practically never succeeds.
    """
    count, last_s = segments(work_s, interval_s)
    if math.isinf(mean_time_between_s):
        return work_s + count * stall_s
    rate = 1.0 / mean_time_between_s

    def attempt(length_s: float) -> float:
        return math.expm1(rate * (length_s + stall_s))

    try:
        again = math.exp(rate * restart_s) * (mean_time_between_s + detection_s)
        return ((count - 1) * attempt(interval_s) + attempt(last_s)) * again
    except OverflowError:
        return math.inf
