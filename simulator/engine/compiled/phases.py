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
    """Write nanoseconds [micro-batches, members] (eq. E1), and their largest, sum and mean by micro-batch.

    `load`, `factor`: addresses of relative rows and of factors, which are 1 for the address 0. `out`: that
    of the results, one after the other; the mean is a floating-point number. Returns 0 where some duration
    is none, or is too long for a phase even as the sum of the members, else 1.
    """
    loads, factors, results, means = floats_at(load), floats_at(factor), ints_at(out), floats_at(out)
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
        means[sums + microbatches + microbatch] = np.float64(added) / np.float64(members)
        usual &= added <= LONGEST_NS
    return 1 if usual else 0


@compiled
def fill_payloads(
    nic_s: float, scale_up_s: float, node_load: int, load: int, microbatches: int, members: int, out: int
) -> int:
    """Write nanoseconds [micro-batches, members] of a payload (eq. E2), and its longest by micro-batch.

    `node_load`, `load`: addresses of relative rows through both hops, which are 1 for the address 0. `out`:
    that of the results, one after the other; the longest are floating-point numbers that are not rounded.
    Returns 0 where some duration is none or is too long for a phase, else 1.
    """
    outer, inner = floats_at(node_load), floats_at(load)
    results, longest = ints_at(out), floats_at(out)
    usual = True
    for microbatch in range(microbatches):
        first = microbatch * members
        most = 0.0
        for place in range(first, first + members):
            out_s = nic_s * outer[place] if node_load != 0 else nic_s
            up_s = scale_up_s * inner[place] if load != 0 else scale_up_s
            usual &= out_s <= LONGEST_PHASE_S and up_s <= LONGEST_PHASE_S  # not so for NaN either
            seconds = max(out_s, up_s)
            results[place] = int(np.rint(seconds * NS))
            most = max(most, seconds)
        longest[microbatches * members + microbatch] = most * NS
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
