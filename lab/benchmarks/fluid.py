"""Simulates point-to-point flows as fluids, exactly and event by event, without SimPy.

Between two events every rate is max-min fair (docs/model.md, eq. E3). At an event the solver first updates
the flows that share a link with it. It then checks that every flow on the changed links still has its
bottleneck: flows that lost theirs are solved as well, and the others keep their rates (eq. E3c).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from moesim.hwmodels.arrays import BoolArray, FloatArray, IntArray
from moesim.simulator.engine.maxmin import fair_bandwidths

RATE_TOLERANCE = 1e-11
"""Relative tolerance for a full link, and for the highest rate on a link."""
TIME_TOLERANCE = 1e-13
"""Relative tolerance at which two ends count as one event."""


@dataclass(slots=True)
class FluidReport:
    """Work of a simulation: moments with a start or end, solver calls, and flows solved in total."""

    events: int = 0
    solves: int = 0
    solved: int = 0


def simulate_flows(
    start_s: FloatArray,
    indptr: IntArray,
    links: IntArray,
    bytes: FloatArray,
    cap_bytes_per_s: FloatArray,
    capacity: FloatArray,
    latency_s: float | FloatArray = 0.0,
    report: FluidReport | None = None,
) -> FloatArray:
    """Return when the last byte of every flow arrives, in seconds.

    Flow i crosses `links[indptr[i]:indptr[i+1]]` with `bytes[i]` on each, starts moving `latency_s` after
    `start_s[i]` (docs/model.md, eq. E3b) and never moves faster than its cap, which may be infinite.
    `capacity`: bytes/s of every link. Raises ValueError for shapes that do not match, numbers out of range, a
    flow over a link without bandwidth, and a flow without any limit.
    """
    flows = _Flows.checked(start_s + latency_s, indptr, links, bytes, cap_bytes_per_s, capacity)
    return flows.run(FluidReport() if report is None else report)


@dataclass(slots=True)
class _Rows:
    """Rows of different lengths in one vector: row i is `values[indptr[i]:indptr[i+1]]`."""

    indptr: IntArray
    values: IntArray

    def of(self, ids: IntArray) -> tuple[IntArray, IntArray]:
        """The rows `ids` concatenated, and the length of each."""
        begin = self.indptr[ids]
        counts = self.indptr[ids + 1] - begin
        ends = np.cumsum(counts)
        total = int(ends[-1]) if len(ends) else 0
        return self.values[np.arange(total) + np.repeat(begin - ends + counts, counts)], counts


@dataclass(slots=True)
class _Flows:
    start: FloatArray
    path: _Rows
    users: _Rows
    """Flows of every link, including flows that have not started or have ended."""
    left: FloatArray
    cap: FloatArray
    capacity: FloatArray
    rate: FloatArray = field(init=False)
    since: FloatArray = field(init=False)
    finish: FloatArray = field(init=False)
    active: BoolArray = field(init=False)
    bottleneck: IntArray = field(init=False)
    """A full link on which no flow is faster; -1 for a flow at its own cap."""
    full: BoolArray = field(init=False)
    top: FloatArray = field(init=False)
    """Highest rate on every link."""
    lowest: FloatArray = field(init=False)
    number: IntArray = field(init=False)
    member: BoolArray = field(init=False)

    @classmethod
    def checked(
        cls,
        start: FloatArray,
        indptr: IntArray,
        links: IntArray,
        amounts: FloatArray,
        cap: FloatArray,
        capacity: FloatArray,
    ) -> _Flows:
        n = len(start)
        if not n == len(indptr) - 1 == len(amounts) == len(cap) or int(indptr[-1]) != len(links):
            raise ValueError(f"{n} starts, {len(indptr)} row starts, {len(amounts)} sizes, {len(cap)} caps")
        if not (np.isfinite(start).all() and np.isfinite(amounts).all() and (amounts >= 0).all()):
            raise ValueError("starts and bytes must be finite, bytes not negative")
        if not ((cap > 0).all() and (capacity[links] > 0).all()):
            raise ValueError("a cap or a link under a flow has no bandwidth")
        owner = np.repeat(np.arange(n), np.diff(indptr))
        bounded = np.isfinite(capacity[links])  # an infinite link limits no flow
        owner, links = owner[bounded], links[bounded]
        key = np.unique(owner * len(capacity) + links)  # a path that visits a link twice counts once
        owner, links = key // len(capacity), key % len(capacity)
        counts = np.bincount(owner, minlength=n)
        if not np.isfinite(cap[counts == 0]).all():
            raise ValueError("a flow without a finite cap or link would never take any time")
        order = np.argsort(links, kind="stable")
        path = _Rows(np.append(0, np.cumsum(counts)), links)
        sizes = np.bincount(links, minlength=len(capacity))
        users = _Rows(np.append(0, np.cumsum(sizes)), owner[order])
        return cls(start, path, users, amounts.astype(np.float64), cap, capacity)

    def __post_init__(self) -> None:
        n, n_links = len(self.start), len(self.capacity)
        self.rate, self.since, self.finish = np.zeros(n), np.zeros(n), np.full(n, np.inf)
        self.active, self.member = np.zeros(n, dtype=bool), np.zeros(n, dtype=bool)
        self.bottleneck = np.full(n, -1)
        self.full, self.top = np.zeros(n_links, dtype=bool), np.zeros(n_links)
        self.lowest, self.number = np.full(n_links, np.inf), np.zeros(n_links, dtype=np.int64)

    def run(self, report: FluidReport) -> FloatArray:
        result = np.full(len(self.start), np.nan)
        empty = self.left == 0.0
        result[empty] = self.start[empty]
        order = np.argsort(self.start, kind="stable")
        order = order[~empty[order]]
        begins = np.append(self.start[order], np.inf)
        next_start = 0
        while True:
            first_end = float(self.finish.min()) if len(self.finish) else np.inf
            now = min(first_end, float(begins[next_start]))
            if not np.isfinite(now):
                return result
            until = int(np.searchsorted(begins, now, side="right"))
            fresh, next_start = order[next_start:until], until
            ended = (
                np.flatnonzero(self.finish <= now + abs(now) * TIME_TOLERANCE)
                if first_end <= now
                else fresh[:0]
            )
            result[ended] = self.finish[ended]
            self.finish[ended] = np.inf
            report.events += 1
            self._change(now, fresh, ended, report)

    def _change(self, now: float, fresh: IntArray, ended: IntArray, report: FluidReport) -> None:
        """Update the rates after flows started and ended at `now`."""
        self.active[ended] = False
        self.rate[ended] = 0.0
        self.active[fresh] = True
        self.since[fresh] = now
        touched = np.unique(np.concatenate([self.path.of(fresh)[0], self.path.of(ended)[0]]))
        on_full, counts = self.users.of(touched[self.full[touched]])
        live = self.active[on_full]
        links = np.repeat(touched[self.full[touched]], counts)[live]
        on_full = on_full[live]
        highest = on_full[self.rate[on_full] >= self.top[links] * (1.0 - RATE_TOLERANCE)]
        flows = np.unique(np.concatenate([fresh, highest]))
        rates = self.rate[flows]
        while True:
            report.solves += 1
            report.solved += len(flows)
            more = self._solve(flows, touched)
            if len(more) == 0:
                break
            flows = np.concatenate([flows, more])
            rates = np.concatenate([rates, self.rate[more]])
        changed = self.rate[flows] != rates
        flows, rates = flows[changed], rates[changed]
        self.left[flows] = np.maximum(0.0, self.left[flows] - rates * (now - self.since[flows]))
        self.since[flows] = now
        self.finish[flows] = now + self.left[flows] / self.rate[flows]

    def _solve(self, chosen: IntArray, touched: IntArray) -> IntArray:
        """Solve the rates of `chosen` with all others fixed; return the flows to solve as well."""
        entry, counts = self.path.of(chosen)
        links = np.unique(np.concatenate([entry, touched]))
        self.number[links] = np.arange(len(links))
        self.member[chosen] = True
        user, sizes = self.users.of(links)
        at = np.repeat(np.arange(len(links)), sizes)
        live = self.active[user]
        user, at = user[live], at[live]
        others = np.where(self.member[user], 0.0, self.rate[user])
        room = np.maximum(self.capacity[links] - np.bincount(at, others, minlength=len(links)), 0.0)
        if len(chosen):
            self._fill(chosen, entry, counts, room)
        # Update the state of these links.
        rate = self.rate[user]
        load = np.bincount(at, rate, minlength=len(links))
        full = load >= self.capacity[links] * (1.0 - RATE_TOLERANCE)
        top = np.zeros(len(links))
        np.maximum.at(top, at, rate)
        self.full[links], self.top[links] = full, top
        more = self._unsettled(chosen, entry, counts, user, at, links)
        self.member[chosen] = False
        return more

    def _fill(self, chosen: IntArray, entry: IntArray, counts: IntArray, room: FloatArray) -> None:
        bound = counts > 0
        self.rate[chosen[~bound]] = self.cap[chosen[~bound]]
        ids = chosen[bound]
        starts = np.append(0, np.cumsum(counts[bound]))
        self.rate[ids] = fair_bandwidths(starts, self.number[entry], np.ones(len(entry)), self.cap[ids], room)

    def _unsettled(
        self,
        chosen: IntArray,
        entry: IntArray,
        counts: IntArray,
        user: IntArray,
        at: IntArray,
        links: IntArray,
    ) -> IntArray:
        """Flows outside `chosen` that lost their bottleneck, or outrun a chosen flow that its link limits."""
        # A chosen flow is settled at its cap, or on a full link where no flow is faster.
        who = np.repeat(np.arange(len(chosen)), counts)
        rate = self.rate[chosen]
        best = self.full[entry] & (rate[who] >= self.top[entry] * (1.0 - RATE_TOLERANCE))
        self.bottleneck[chosen] = -1
        self.bottleneck[chosen[who[best]]] = entry[best]
        settled = (self.bottleneck[chosen] >= 0) | (rate >= self.cap[chosen])
        # The bottleneck of another flow may have room now, or carry a faster flow.
        other = user[~self.member[user]]
        place = links[at[~self.member[user]]]
        mine = self.bottleneck[other] == place
        lost = mine & ~(self.full[place] & (self.rate[other] >= self.top[place] * (1.0 - RATE_TOLERANCE)))
        if settled.all():
            return np.unique(other[lost])
        held = ~settled[who] & self.full[entry]
        np.minimum.at(self.lowest, entry[held], rate[who[held]])
        faster = self.rate[other] > self.lowest[place] * (1.0 + RATE_TOLERANCE)
        self.lowest[entry[held]] = np.inf
        return np.unique(other[lost | faster])


# -- all flows at once ---------------------------------------------------------------------------------


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
