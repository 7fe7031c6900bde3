"""Links that concurrent transfers share at exact max-min fair rates, in SimPy."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Protocol

import numpy as np
import simpy

from moesim.hwmodels.arrays import BoolArray, FloatArray, IntArray
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


@dataclass(slots=True, eq=False)
class Flow:
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
    offered: Any = None
    """Load that the flow offers to each of its links, in units of capacity / CAPACITY_UNITS."""
    blocks: list[int] = field(default_factory=list)
    """Blocks of link numbers under which `ManyLinks` lists the flow."""


class Sharing(Protocol):
    """Tells which flows must be solved again when one starts or ends, and solves their rates."""

    def join(self, flow: Flow) -> list[list[Flow]]:
        """Put a flow on its links; return the coupled groups to solve, none if no tight link slows it."""

    def leave(self, flow: Flow) -> list[list[Flow]]:
        """Take a flow off its links; return the groups that its tight links coupled."""

    def rates(self, flows: Sequence[Flow]) -> list[float]:
        """Rate of each flow of a group, in whole transfers per nanosecond."""

    def carried(self) -> FloatArray:
        """Bytes that transfers have put on every link so far."""

    def busy(self) -> list[int]:
        """Links that a transfer is on now."""


class FewLinks:
    """`Sharing` in plain Python, the faster form for transfers on a few links each."""

    def __init__(self, capacity: FloatArray) -> None:
        """Start with every link idle; `capacity` in bytes/ns."""
        self.capacity: list[float] = capacity.tolist()
        self.unit = [CAPACITY_UNITS / c if c > 0.0 else float("inf") for c in self.capacity]
        self.load = [0] * len(self.capacity)
        self.bytes = [0.0] * len(self.capacity)
        # Flows of a link in order of their start: a dict keeps that order, so ties are reproducible.
        self.users: list[dict[Flow, None]] = [{} for _ in self.capacity]

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
        return [self._coupled(flow)] if tight else []

    def leave(self, flow: Flow) -> list[list[Flow]]:
        """Take a flow off its links; return the groups that its tight links coupled."""
        load = self.load
        freed = []
        for (link, _), part in zip(flow.demand.pairs, flow.offered, strict=True):
            if load[link] > TIGHT_LOAD:
                freed.append(link)
            load[link] -= part
            del self.users[link][flow]
        groups: list[list[Flow]] = []
        seen: set[Flow] = set()
        for link in freed:
            for user in self.users[link]:
                if user not in seen:
                    groups.append(self._coupled(user))
                    seen.update(groups[-1])
        return groups

    def _coupled(self, flow: Flow) -> list[Flow]:
        """Flows that share a tight link with `flow`, directly or through others, in order of their start."""
        seen = {flow}
        queue = [flow]
        while queue:
            for link, _ in queue.pop().demand.pairs:
                if self.load[link] > TIGHT_LOAD:
                    for other in self.users[link]:
                        if other not in seen:
                            seen.add(other)
                            queue.append(other)
        return sorted(seen, key=lambda f: f.serial)

    def rates(self, flows: Sequence[Flow]) -> list[float]:
        """Rate of each flow of a group, in whole transfers per nanosecond."""
        if len(flows) == 1 and all(self.load[link] <= TIGHT_LOAD for link, _ in flows[0].demand.pairs):
            return [1.0 / flows[0].alone_ns]
        return max_min_rates_of_few([(f.demand.pairs, f.alone_ns) for f in flows], self.capacity)

    def carried(self) -> FloatArray:
        """Bytes that transfers have put on every link so far."""
        return np.array(self.bytes)

    def busy(self) -> list[int]:
        """Links that a transfer is on now."""
        return [link for link, users in enumerate(self.users) if users]


# -- the same in arrays ----------------------------------------------------------------------------

LINKS_PER_BLOCK = 256
"""Consecutive link numbers that form one look-up block."""


class ManyLinks:
    """`Sharing` in arrays (docs/model.md, eq. E3a)."""

    def __init__(self, capacity: FloatArray) -> None:
        """Start with every link idle; `capacity` in bytes/ns."""
        self.capacity = capacity
        with np.errstate(divide="ignore"):
            self.unit = CAPACITY_UNITS / capacity
        self.load = np.zeros(len(capacity), dtype=np.int64)
        self.bytes = np.zeros(len(capacity))
        self.users: list[dict[Flow, None]] = [{} for _ in range(len(capacity) // LINKS_PER_BLOCK + 1)]
        """Flows of every block of link numbers."""
        self.number = np.zeros(len(capacity), dtype=np.int64)

    def join(self, flow: Flow) -> list[list[Flow]]:
        """Put a flow on its links; return the coupled groups to solve, none if no tight link slows it."""
        links, amounts = flow.demand.links, flow.demand.bytes
        part = np.ceil(np.minimum(amounts * self.unit[links] / flow.alone_ns, TIGHT_LOAD + 1)).astype(
            np.int64
        )
        load = self.load[links] + part
        flow.offered = part
        self.load[links] = load
        self.bytes[links] += amounts
        flow.blocks = _blocks(links)
        for block in flow.blocks:
            self.users[block][flow] = None
        tight = load > TIGHT_LOAD
        return [self._coupled(links[tight])] if tight.any() else []

    def leave(self, flow: Flow) -> list[list[Flow]]:
        """Take a flow off its links; return the flows that its tight links coupled, as one group."""
        links = flow.demand.links
        load = self.load[links]
        self.load[links] = load - flow.offered
        for block in flow.blocks:
            del self.users[block][flow]
        tight = load > TIGHT_LOAD
        coupled = self._coupled(links[tight]) if tight.any() else []
        return [coupled] if coupled else []

    def _coupled(self, links: IntArray) -> list[Flow]:
        """Flows on `links` and the flows that tight links couple to them, in order of their start."""
        reached = np.zeros(len(self.capacity), dtype=bool)
        reached[links] = True
        looked: set[int] = set()
        nearby: dict[Flow, None] = {}
        coupled: list[Flow] = []
        while not looked.issuperset(blocks := _blocks(np.flatnonzero(reached))):
            for block in blocks:
                nearby.update(self.users[block])
            looked.update(blocks)
            coupled = self._reach(list(nearby), reached) if nearby else []
        return sorted(coupled, key=lambda f: f.serial)

    def _reach(self, flows: list[Flow], reached: BoolArray) -> list[Flow]:
        """The `flows` on a reached link; marks their other tight links in `reached` as well."""
        entry, owner = _entries(flows)
        tying = reached[entry] | (self.load[entry] > TIGHT_LOAD)
        entry, owner = entry[tying], owner[tying]
        chosen = np.zeros(len(flows), dtype=bool)
        known = -1
        while (found := int(np.count_nonzero(chosen))) != known:
            known = found
            chosen[owner[reached[entry]]] = True
            reached[entry[chosen[owner]]] = True
        return [flow for flow, take in zip(flows, chosen.tolist(), strict=True) if take]

    def rates(self, flows: Sequence[Flow]) -> list[float]:
        """Rate of each flow of a group, in whole transfers per nanosecond."""
        entry, flow = _entries(flows)
        largest = np.array([f.demand.bytes.max() for f in flows])
        alone = np.array([f.alone_ns for f in flows])
        held = self.load[entry] > TIGHT_LOAD
        links, who = entry[held], flow[held]
        rates = 1.0 / alone
        if len(links):
            counts = np.bincount(who, minlength=len(flows))
            some = counts > 0
            share = np.concatenate([f.demand.bytes for f in flows])[held] / largest[who]
            # Numbering only the group's links keeps the solver's vectors short.
            mark = np.zeros(len(self.capacity), dtype=bool)
            mark[links] = True
            used = np.flatnonzero(mark)
            self.number[used] = np.arange(len(used))
            caps = (largest / alone)[some]
            starts = np.append(0, np.cumsum(counts[some]))
            x = fair_bandwidths(starts, self.number[links], share, caps, self.capacity[used])
            rates[some] = np.where(x < caps, x / largest[some], rates[some])
        result: list[float] = rates.tolist()
        return result

    def carried(self) -> FloatArray:
        """Bytes that transfers have put on every link so far."""
        return self.bytes.copy()

    def busy(self) -> list[int]:
        """Links that a transfer is on now."""
        flows = dict.fromkeys(flow for users in self.users for flow in users)
        links: list[int] = np.unique(_entries(list(flows))[0]).tolist() if flows else []
        return links


def _blocks(links: IntArray) -> list[int]:
    """Blocks of link numbers that contain `links`."""
    blocks: list[int] = np.unique(links // LINKS_PER_BLOCK).tolist()
    return blocks


def _entries(flows: Sequence[Flow]) -> tuple[IntArray, IntArray]:
    """Links of all flows concatenated, and the position of the flow that each belongs to."""
    sizes = [len(f.demand.links) for f in flows]
    return np.concatenate([f.demand.links for f in flows]), np.repeat(np.arange(len(flows)), sizes)


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
        arrays: bool | None = None,
    ) -> None:
        """Start with every link idle; `arrays` overrides the choice of representation.

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
        use_arrays = len(capacity) > MOST_LINKS_IN_STEPS if arrays is None else arrays
        self.sharing: Sharing = ManyLinks(capacity) if use_arrays else FewLinks(capacity)
        self.started = 0
        """Transfers started so far."""
        self.solved = 0
        """Groups of coupled transfers solved so far."""
        self.solved_flows = 0
        """Transfers in those groups, summed."""

    @property
    def carried_bytes(self) -> FloatArray:
        """Bytes that the transfers started so far put on every link."""
        return self.sharing.carried()

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
