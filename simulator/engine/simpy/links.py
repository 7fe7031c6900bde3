"""Links that concurrent transfers share at exact max-min fair rates, in SimPy."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from math import ceil
from typing import Any

import numpy as np
import simpy
from msgspec import Struct, field

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.errors import InputError
from moesim.simulator.engine.link_map import Demand
from moesim.simulator.engine.maxmin import (
    CAPACITY_UNITS,
    MOST_LINKS_IN_STEPS,
    TIGHT_LOAD,
    fair_bandwidths,
    max_min_rates_of_few,
)

# -- which flows compete ---------------------------------------------------------------------------


class Flow(Struct, eq=False):
    """One transfer in flight; `alone_ns` is its duration without other transfers."""

    demand: Demand
    alone_ns: float
    serial: int
    done: simpy.Event | None = None
    """Succeeds when the last byte has arrived; created only when a process has to wait for it."""
    remaining: float = 1.0
    rate: float = 0.0
    updated_ns: float = 0.0
    version: int = 0
    offered: list[int] = field(default_factory=list)
    """Load that the flow offers to each of its links, in units of capacity / CAPACITY_UNITS."""


class Sharing:
    """Tells which flows must be solved again when one starts or ends, and solves their rates (eq. E3a)."""

    def __init__(self, capacity: FloatArray, few: bool) -> None:
        """Start with every link idle; `capacity` in bytes/ns, `few`: how to solve (`MOST_LINKS_IN_STEPS`)."""
        self.capacity, self.few = capacity, few
        self.capacities: list[float] = capacity.tolist()
        self.unit = [CAPACITY_UNITS / c if c > 0.0 else float("inf") for c in self.capacities]
        self.load = [0] * len(capacity)
        self.bytes = [0.0] * len(capacity)
        """Bytes that transfers have put on every link so far."""
        # Flows of a link in order of their start: a dict keeps that order, so ties are reproducible.
        self.users: list[dict[Flow, None]] = [{} for _ in self.capacities]

    def join(self, flow: Flow) -> list[list[Flow]]:
        """Put a flow on its links; return the coupled groups to solve, none if no tight link slows it."""
        flow.offered = offered = []
        alone, load, unit = flow.alone_ns, self.load, self.unit
        tight = False
        for link, amount in flow.demand.pairs:
            self.bytes[link] += amount
            self.users[link][flow] = None
            part = ceil(min(amount * unit[link] / alone, TIGHT_LOAD + 1))
            offered.append(part)
            load[link] += part
            tight = tight or load[link] > TIGHT_LOAD
        return [self._coupled({flow})] if tight else []

    def leave(self, flow: Flow) -> list[list[Flow]]:
        """Take a flow off its links; return the groups that its tight links coupled (many links: as one)."""
        load = self.load
        freed = []
        for (link, _), part in zip(flow.demand.pairs, flow.offered, strict=True):
            if load[link] > TIGHT_LOAD:
                freed.append(link)
            load[link] -= part
            del self.users[link][flow]
        users = dict.fromkeys(user for link in freed for user in self.users[link])
        if not self.few:
            return [self._coupled(set(users))] if users else []
        groups: list[list[Flow]] = []
        seen: set[Flow] = set()
        for user in users:
            if user not in seen:
                groups.append(self._coupled({user}))
                seen.update(groups[-1])
        return groups

    def _coupled(self, seen: set[Flow]) -> list[Flow]:
        """Flows, with those that share tight links with them or through others, in order of their start."""
        queue, looked = list(seen), set[int]()
        while queue:
            for link, _ in queue.pop().demand.pairs:
                if self.load[link] > TIGHT_LOAD and link not in looked:
                    looked.add(link)
                    queue += self.users[link].keys() - seen
                    seen.update(self.users[link])
        return sorted(seen, key=lambda f: f.serial)

    def rates(self, flows: Sequence[Flow]) -> list[float]:
        """Rate of each flow of a group, in whole transfers per nanosecond; all are then settled (eq. E3c)."""
        if self.few:
            if len(flows) == 1 and all(self.load[link] <= TIGHT_LOAD for link, _ in flows[0].demand.pairs):
                return [1.0 / flows[0].alone_ns]
            return max_min_rates_of_few([(f.demand.pairs, f.alone_ns) for f in flows], self.capacities)
        rates = [1.0 / f.alone_ns for f in flows]
        ids, caps, widest, starts = [], [], [], [0]  # of the flows on a tight link
        links: list[int] = []
        shares: list[float] = []
        for number, flow in enumerate(flows):
            held = [(link, amount) for link, amount in flow.demand.pairs if self.load[link] > TIGHT_LOAD]
            if held:
                most = max(amount for _, amount in flow.demand.pairs)
                links += [link for link, _ in held]
                shares += [amount / most for _, amount in held]
                ids.append(number)
                caps.append(most / flow.alone_ns)
                widest.append(most)
                starts.append(len(links))
        if ids:
            # Numbering only the group's links keeps the solver's vectors short.
            used, numbers = np.unique(links, return_inverse=True)
            room = self.capacity[used]
            x = fair_bandwidths(np.array(starts), numbers, np.array(shares), np.array(caps), room)
            for number, bandwidth, cap, most in zip(ids, x.tolist(), caps, widest, strict=True):
                if bandwidth < cap:
                    rates[number] = bandwidth / most
        return rates


# -- links -----------------------------------------------------------------------------------------


class LinkPool:
    """Links and the transfers on them.

    `capacity_bytes_per_ns`: one value a link. A transfer that no other slows down takes exactly `alone_ns`;
    otherwise rates are max-min fair in bytes/s (docs/model.md, eq. E3). When a transfer starts or ends, only
    the transfers that tight links couple to it are solved again (eq. E3a). Latency is not part of a rate: the
    caller waits for it before it starts a transfer (eq. E3b).
    """

    def __init__(
        self,
        env: simpy.Environment,
        capacity_bytes_per_ns: FloatArray | Iterable[float],
        few: bool | None = None,
    ) -> None:
        """Start with every link idle; `few` overrides the choice of the solver.

        Raises InputError for a bandwidth that is negative or not a number.
        """
        capacity = np.array(
            capacity_bytes_per_ns
            if isinstance(capacity_bytes_per_ns, np.ndarray)
            else list(capacity_bytes_per_ns),
            dtype=np.float64,
        )
        bad = np.flatnonzero(~(capacity >= 0.0))
        if len(bad):
            raise InputError(
                f"link {bad[0]}: a bandwidth of {capacity[bad[0]]} bytes/ns is not a rate; "
                "give zero or more, in bytes/s of one direction"
            )
        self.env = env
        self.capacity_bytes_per_ns = capacity
        self.sharing = Sharing(capacity, len(capacity) <= MOST_LINKS_IN_STEPS if few is None else few)
        self.started = 0
        """Transfers started so far."""
        self.solved = 0
        """Groups of coupled transfers solved so far."""
        self.solved_flows = 0
        """Transfers in those groups, summed."""

    @property
    def carried_bytes(self) -> FloatArray:
        """Bytes that the transfers started so far put on every link."""
        return np.array(self.sharing.bytes)

    def start(self, demand: Demand, alone_ns: float) -> simpy.Event:
        """Put a transfer on its links now; the event succeeds when its last byte has arrived."""
        flow, _ = self._begin(demand, alone_ns)
        return self._event(flow)

    def transfer(self, demand: Demand, alone_ns: float) -> Generator[simpy.Event, Any, None]:
        """Run a transfer from inside a process; return when its last byte has arrived.

        No transfer is faster than alone, so the process first waits for the first deadline; only a transfer
        that others slowed down needs an event of its own.
        """
        flow, deadline = self._begin(demand, alone_ns)
        yield deadline
        if flow.remaining > 0.0:
            yield self._event(flow)

    def _event(self, flow: Flow) -> simpy.Event:
        if flow.done is None:
            flow.done = self.env.event()
        return flow.done

    def _begin(self, demand: Demand, alone_ns: float) -> tuple[Flow, simpy.Event]:
        """Put a flow on its links; return it and the event of its end if no other flow starts."""
        flow = Flow(demand, max(alone_ns, 1.0), self.started, updated_ns=self.env.now)
        self.started += 1
        groups = self.sharing.join(flow)
        if groups:
            self._solve(groups[0])
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
        for group in self.sharing.leave(flow):
            self._solve(group)
        if flow.done is not None:
            flow.done.succeed()

    def _solve(self, flows: list[Flow]) -> None:
        """Solve the rates of a coupled group; a flow that keeps its rate keeps its deadline."""
        now = self.env.now
        self.solved += 1
        self.solved_flows += len(flows)
        for flow, rate in zip(flows, self.sharing.rates(flows), strict=True):
            if rate == flow.rate and flow.version > 0:
                continue
            if rate <= 0.0:
                self._refuse(flow)
            flow.remaining = max(0.0, flow.remaining - flow.rate * (now - flow.updated_ns))
            flow.updated_ns = now
            flow.rate = rate
            self._schedule(flow)

    def _refuse(self, flow: Flow) -> None:
        links = flow.demand.links
        dead = links[self.capacity_bytes_per_ns[links] == 0.0]
        raise InputError(
            f"a transfer of {flow.demand.bytes.max():.6g} bytes crosses link {dead[0]}, "
            "whose bandwidth is 0: give the link a bandwidth, or route around it"
        )
