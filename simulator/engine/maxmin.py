"""Max-min fair rates of flows that cross links, without a clock (docs/model.md, eqs. E3 and E3a) (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np

from moesim.hwmodels.arrays import FloatArray, IntArray

# -- constants of sharing that every engine obeys --------------------------------------------------

CAPACITY_UNITS = 1 << 44
"""A link's capacity in the integer unit of offered loads. Integers do not drift over any number of starts
and ends, and their sum does not depend on the order."""
TIGHT_LOAD = CAPACITY_UNITS + 17
"""Offered load above which a link may slow flows: its capacity plus 1e-12 of it for rounding."""

MOST_LINKS_IN_STEPS = 256
"""Pools with at most this many links raise all rates of a group step by step (`max_min_rates_of_few`); larger
ones settle links by rounds (`fair_bandwidths`). Both are exact; they differ in the last digits of a rate, so
engines must choose alike. Measured in lab/docs/performance-notes.md."""


# -- rates -----------------------------------------------------------------------------------------

LEVEL_TOLERANCE = 1e-12
"""Relative tolerance at which two levels count as one."""


def fair_bandwidths(
    indptr: IntArray, links: IntArray, share: FloatArray, caps: FloatArray, capacity: FloatArray
) -> FloatArray:
    """Max-min fair bandwidth of every flow; a flow uses `share` times its bandwidth on each of its links.

    Every flow has at least one link, every link has a finite capacity, and shares are positive. Each round
    settles all links whose own level is the lowest that any of their flows meets. Levels only rise while
    other links settle, so no later round can undercut a settled one (docs/model.md, eq. E3).
    """
    x = np.zeros(len(caps))
    ids = np.arange(len(caps))
    counts = np.diff(indptr)
    flow = np.repeat(ids, counts)
    used, reach = np.zeros(len(capacity)), np.zeros(len(capacity))
    while len(ids):
        slope = np.bincount(links, share, minlength=len(capacity))
        # Levels never fall, so rounding errors in a link's remaining capacity must not lower them.
        some = slope > 0.0
        np.maximum(reach, np.divide(capacity - used, slope, out=reach.copy(), where=some), out=reach)
        at = reach[links]
        starts = np.cumsum(counts) - counts
        level = np.minimum(np.minimum.reduceat(at, starts), caps)
        held = np.zeros(len(capacity), dtype=bool)
        held[links[at > (level * (1.0 + LEVEL_TOLERANCE))[flow]]] = True
        done = np.logical_or.reduceat(~held[links], starts) | (caps <= level)
        x[ids[done]] = level[done]
        gone = done[flow]
        used += np.bincount(links[gone], (share * level[flow])[gone], minlength=len(capacity))
        stay = ~gone
        links, share = links[stay], share[stay]
        flow = (np.cumsum(~done) - 1)[flow[stay]]
        ids, caps, counts = ids[~done], caps[~done], counts[~done]
    return x


def max_min_rates_of_few(
    flows: Sequence[tuple[Sequence[tuple[int, float]], float]], capacity: Sequence[float]
) -> list[float]:
    """Max-min fair rate of each of a handful of flows, in whole transfers per unit of time.

    A flow is given as ((link, bytes) pairs, duration alone).
    The bandwidths of all active flows, each measured on the link where the flow has most bytes, rise together
    until a link is full or a flow reaches its cap (docs/model.md, eq. E3).
    """
    largest = [max((b for _, b in demand), default=0.0) for demand, _ in flows]
    cap = [big / alone for big, (_, alone) in zip(largest, flows, strict=True)]
    rate = [0.0] * len(flows)
    active = [i for i, big in enumerate(largest) if big > 0.0]
    used: dict[int, float] = {}
    while active:
        slope: dict[int, float] = {}
        for i in active:
            for link, amount in flows[i][0]:
                slope[link] = slope.get(link, 0.0) + amount / largest[i]
        room = min(max(0.0, capacity[link] - used.get(link, 0.0)) / s for link, s in slope.items() if s > 0.0)
        step = min([room, *(cap[i] - rate[i] for i in active)])
        for link, s in slope.items():
            used[link] = used.get(link, 0.0) + s * step
        full = {
            link for link in slope if capacity[link] - used[link] <= LEVEL_TOLERANCE * capacity[link] < inf
        }
        left = []
        for i in active:
            rate[i] += step
            blocked = any(link in full and amount > 0.0 for link, amount in flows[i][0])
            if not blocked and rate[i] < cap[i] * (1.0 - LEVEL_TOLERANCE):
                left.append(i)
        active = left
    return [rate[i] / largest[i] if largest[i] > 0.0 else 1.0 / flows[i][1] for i in range(len(flows))]
