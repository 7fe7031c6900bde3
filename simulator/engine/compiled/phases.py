"""Durations of one phase in one pass: the compiled form of what `task_durations` computes with NumPy."""

from __future__ import annotations

import numpy as np

from moesim.simulator.engine.compiled.jit import compiled
from moesim.simulator.engine.compiled.memory import floats_at, ints_at, singles_at
from moesim.simulator.engine.durations import LONGEST_PHASE_S, NS

LONGEST_NS = LONGEST_PHASE_S * NS


@compiled
def fill_rows(
    fixed_s: float, row_s: float, load: int, factor: int, microbatches: int, members: int, out: int
) -> int:
    """Write nanoseconds [micro-batches, members] (eq. E1), and their largest and sum by micro-batch.

    `load`, `factor`: addresses of relative rows and of factors, which are 1 for the address 0. `out`: that
    of the results, one after the other. Returns 0 where some duration is none or is too long for a phase,
    else 1.
    """
    loads, factors, results = floats_at(load), floats_at(factor), ints_at(out)
    most, sums = microbatches * members, microbatches * (members + 1)
    usual = True
    for microbatch in range(microbatches):
        first = microbatch * members
        longest = added = 0
        for place in range(first, first + members):
            seconds = fixed_s + row_s * (loads[place] if load != 0 else 1.0)
            nanoseconds = np.rint(seconds * (factors[place] if factor != 0 else 1.0) * NS)
            usual &= nanoseconds <= LONGEST_NS  # not so for NaN either
            whole = int(nanoseconds)
            results[place] = whole
            added += whole
            longest = max(longest, whole)
        results[most + microbatch] = longest
        results[sums + microbatch] = added
    return 1 if usual else 0


@compiled
def fill_noise(cv: float, draws: int, clock: int, count: int, factors: int) -> None:
    """Write factors [micro-batches, members]: clock times run-to-run noise, which is at least 0.

    `cv`: coefficient of variation. `draws`, `clock`, `factors`: addresses of `count` 32-bit draws, of a
    clock for each of them and of the result.
    """
    normal, clocks, out = singles_at(draws), floats_at(clock), floats_at(factors)
    for place in range(count):
        noise = np.float64(normal[place]) * cv + 1.0
        out[place] = (noise if noise > 0.0 else 0.0) * clocks[place]
