"""Durations of tasks in whole nanoseconds, and the draws that spread them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.hwmodels.errors import InputError

SingleArray = NDArray[np.float32]

NS = 1e9
"""Nanoseconds in a second; cost functions return seconds, the engine counts integer nanoseconds."""
LONGEST_PHASE_S = 1e5
"""Longest phase in seconds; ninety thousand of them in series still fit into 64 bits of nanoseconds."""


def slowest_draws(
    generator: np.random.Generator, shape: tuple[int, int], together: int, stands_for: int
) -> SingleArray:
    """32-bit normal draws [micro-batches, members], each the largest of GPUs that meet in a layer (eq. E1a).

    `together`: neighbouring members that meet; `stands_for`: GPUs that each of them stands for.
    """
    rows, members = shape
    draws = generator.standard_normal((rows, members // together), dtype=np.float32)
    for _ in range(stands_for * together - 1):
        np.maximum(draws, generator.standard_normal(draws.shape, dtype=np.float32), out=draws)
    return draws if together == 1 else np.repeat(draws, together, axis=1)


def whole_ns(seconds: FloatArray) -> IntArray:
    """Seconds as whole nanoseconds.

    Raises InputError for a phase longer than any real one, OverflowError for values that are no durations.
    """
    longest = float(seconds.max(initial=0.0))
    if longest > LONGEST_PHASE_S:
        raise InputError(
            f"a single phase of a micro-batch takes {longest:.3g} s with these rates and sizes; a step is "
            f"counted in nanoseconds with phases of at most {LONGEST_PHASE_S:g} s (a day and a half): raise "
            "peaks, bandwidths and efficiencies, or lower batch.sequence_length and parallel.microbatch"
        )
    if not 0.0 <= float(seconds.min(initial=0.0)) <= longest:
        raise OverflowError(f"durations from {seconds.min():.6g} to {longest:.6g} s are not durations")
    return np.rint(seconds * NS).astype(np.int64)
