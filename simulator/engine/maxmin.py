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
engines must choose alike. Measured in docs/performance.md."""


# -- rates -----------------------------------------------------------------------------------------

LEVEL_TOLERANCE = 1e-12
"""Relative tolerance at which two levels count as one."""


def max_min_rates(
    indptr: IntArray, links: IntArray, weights: FloatArray, caps: FloatArray, capacity: FloatArray
) -> FloatArray:
    """Max-min fair rate of every flow, in whole transfers per unit of time.

    Flow i puts `weights[indptr[i]:indptr[i+1]]` bytes on `links[indptr[i]:indptr[i+1]]` per transfer; the
    bytes of a repeated link are added. `caps`: 1 / duration alone. `capacity`: bytes per unit of time of
    every link, which may be infinite. A flow without bytes runs at its cap. Raises ValueError for shapes that
    do not match, negative numbers, and a flow without any limit. Source: Bertsekas and Gallager, Data
    Networks, section 6.5.2; docs/model.md, eq. E3.
    """
    n = len(caps)
    if len(indptr) != n + 1 or len(links) != len(weights) or int(indptr[-1]) != len(links):
        raise ValueError(f"{n} caps need {n + 1} row starts that end at {len(links)} links and weights")
    if not ((weights >= 0).all() and (caps >= 0).all() and (capacity >= 0).all()):
        raise ValueError("weights, caps and capacity must be numbers, and not negative")
    flow = np.repeat(np.arange(n), np.diff(indptr))
    bounded = (weights > 0) & np.isfinite(capacity[links])
    free = np.bincount(flow[bounded], minlength=n) == 0
    if not np.isfinite(caps[free]).all():
        raise ValueError("a flow without a finite cap or link would never take any time")
    largest = np.zeros(n)
    flow, links, weights = _merged(flow, links, weights, len(capacity))
    np.maximum.at(largest, flow, weights)
    bounded = (weights > 0) & np.isfinite(capacity[links])
    flow, links, weights = flow[bounded], links[bounded], weights[bounded]
    ids = np.flatnonzero(~free)
    place = np.cumsum(~free) - 1
    starts = np.searchsorted(flow, ids)
    rates = caps.astype(np.float64)
    wide = largest[ids]
    x = fair_bandwidths(
        np.append(starts, len(flow)), links, weights / wide[place[flow]], caps[ids] * wide, capacity
    )
    rates[ids] = np.minimum(x / wide, caps[ids])
    return rates


def _merged(
    flow: IntArray, links: IntArray, weights: FloatArray, n_links: int
) -> tuple[IntArray, IntArray, FloatArray]:
    """Entries in which each flow has each link once, with the weights of repeated links added."""
    key = flow * n_links + links
    order = np.argsort(key, kind="stable")
    fresh = np.append(True, np.diff(key[order]) > 0)[: len(key)]
    if fresh.all():
        return flow, links, weights
    first = order[fresh]
    total: FloatArray = np.bincount(np.cumsum(fresh) - 1, weights[order]).astype(np.float64)
    return flow[first], links[first], total


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
    """`max_min_rates` for a handful of flows, each given as ((link, bytes) pairs, duration alone).

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
