"""Links shared by the transfers that are on them at the same moment: exact max-min fair rates."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import simpy

IntVector = npt.NDArray[np.int64]
FloatVector = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """Links that a transfer uses, and the bytes that it puts on each."""

    links: IntVector
    bytes: FloatVector


@dataclass(slots=True, eq=False)
class Flow:
    """One transfer in flight.

    `demand`: (link, bytes) on every link it crosses; `alone_ns`: its duration with no other transfer
    around (software and SM limits included), so its own cap on any link is bytes / alone_ns.
    """

    demand: tuple[tuple[int, float], ...]
    alone_ns: float
    serial: int
    done: simpy.Event | None = None
    """Succeeds when the last byte arrived; made only once somebody needs to wait for it."""
    remaining: float = 1.0
    rate: float = 0.0
    updated_ns: float = 0.0
    version: int = 0


@dataclass(slots=True)
class LinkPool:
    """Every link of the folded cluster and the flows on it.

    `capacity_bytes_per_ns`: one figure a link. A flow that meets no other finishes after `alone_ns`
    exactly; where flows meet, rates are max-min fair in bytes/s (docs/model.md, eq. E3).
    """

    env: simpy.Environment
    capacity_bytes_per_ns: FloatVector
    on_link: list[dict[Flow, None]] = field(init=False)
    """Flows on each link in order of their start: a dict keeps that order, so ties are reproducible."""
    carried_bytes: FloatVector = field(init=False)
    started: int = field(init=False)

    def __post_init__(self) -> None:
        """Start with every link idle."""
        self.on_link = [{} for _ in self.capacity_bytes_per_ns]
        self.started = 0
        self.carried_bytes = np.zeros(len(self.capacity_bytes_per_ns))

    def start(self, demand: Demand, alone_ns: float) -> simpy.Event:
        """Put a transfer on its links now; the event succeeds when its last byte arrived."""
        flow, _ = self._begin(demand, alone_ns)
        return self._event(flow)

    def transfer(
        self, demand: Demand, alone_ns: float
    ) -> Generator[simpy.Event, Any, None]:
        """Run a transfer from inside a process; returns when its last byte arrived.

        Nothing makes a transfer faster than it is alone, so its first deadline serves as the wait; only
        one that met others on the way needs an event of its own.
        """
        flow, deadline = self._begin(demand, alone_ns)
        yield deadline
        if flow.remaining > 0.0:
            yield self._event(flow)

    def _event(self, flow: Flow) -> simpy.Event:
        if flow.done is None:
            flow.done = self.env.event()
        return flow.done

    def _begin(self, wanted: Demand, alone_ns: float) -> tuple[Flow, simpy.Event]:
        """The flow on its links, and the deadline it would meet if nobody else came."""
        demand = tuple(zip(wanted.links.tolist(), wanted.bytes.tolist(), strict=True))
        flow = Flow(demand, max(alone_ns, 1.0), self.started, updated_ns=self.env.now)
        self.started += 1
        shared = False
        for link, amount in demand:
            self.carried_bytes[link] += amount
            users = self.on_link[link]
            shared = shared or bool(users)
            users[flow] = None
        if shared:
            self._rebalance(flow)
            return flow, self._event(flow)
        flow.rate = 1.0 / flow.alone_ns
        return flow, self._schedule(flow)

    def _schedule(self, flow: Flow) -> simpy.Event:
        flow.version += 1
        delay = max(0, round(flow.remaining / flow.rate))
        timeout = self.env.timeout(delay, value=(flow, flow.version))
        assert timeout.callbacks is not None
        timeout.callbacks.append(self._expire)
        return timeout

    def _expire(self, event: simpy.Event) -> None:
        value: Any = event.value
        flow, version = value
        if version != flow.version:
            return  # rescheduled since
        flow.remaining = 0.0
        for link, _ in flow.demand:
            self.on_link[link].pop(flow, None)
        for link, _ in flow.demand:
            # Leaving may split the component: each link it was on is solved from its own neighbours.
            if self.on_link[link]:
                self._rebalance(next(iter(self.on_link[link])))
        if flow.done is not None:
            flow.done.succeed()

    def _component(self, flow: Flow) -> list[Flow]:
        """Flows that share a link with `flow`, directly or through others, in a reproducible order."""
        seen = {flow}
        queue = [flow]
        while queue:
            for link, _ in queue.pop().demand:
                for other in self.on_link[link]:
                    if other not in seen:
                        seen.add(other)
                        queue.append(other)
        return sorted(seen, key=lambda f: f.serial)

    def _rebalance(self, flow: Flow) -> None:
        flows = self._component(flow)
        now = self.env.now
        for f in flows:
            f.remaining = max(0.0, f.remaining - f.rate * (now - f.updated_ns))
            f.updated_ns = now
        rates = max_min_rates([(f.demand, f.alone_ns) for f in flows], self.capacity_bytes_per_ns)
        for f, rate in zip(flows, rates, strict=True):
            if rate != f.rate or f.version == 0:
                f.rate = rate
                self._schedule(f)


def max_min_rates(
    flows: Sequence[tuple[tuple[tuple[int, float], ...], float]],
    capacity_bytes_per_ns: Sequence[float],
) -> list[float]:
    """Return each flow's progress per nanosecond (1 = the whole transfer) under max-min fairness.

    `flows`: (demand, alone_ns). Progressive filling: the bandwidth of all unfrozen flows rises together
    (measured on the link where each flow has most bytes) until a link is full or a flow reaches its own
    cap. Source: Bertsekas and Gallager, Data Networks, section 6.5.2; docs/model.md, eq. E3.
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
        room = min(
            (
                max(0.0, capacity_bytes_per_ns[link] - used.get(link, 0.0)) / s
                for link, s in slope.items()
                if s > 0.0
            ),
        )
        step = min([room, *(cap[i] - rate[i] for i in active)])
        for link, s in slope.items():
            used[link] = used.get(link, 0.0) + s * step
        full = {
            link
            for link in slope
            if capacity_bytes_per_ns[link] - used[link] <= 1e-12 * capacity_bytes_per_ns[link]
        }
        left = []
        for i in active:
            rate[i] += step
            blocked = any(link in full and amount > 0.0 for link, amount in flows[i][0])
            if not blocked and rate[i] < cap[i] * (1.0 - 1e-12):
                left.append(i)
        active = left
    return [rate[i] / largest[i] if largest[i] > 0.0 else 1.0 / flows[i][1] for i in range(len(flows))]
