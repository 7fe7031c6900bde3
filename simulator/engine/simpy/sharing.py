"""Finds which flows compete: tracks the load offered to each link and groups flows that share a tight link.

A link whose flows would not fill it even if each ran as fast as alone never slows any of them. All other
links are *tight*, and only they couple flows (docs/model.md, eq. E3a). `FewLinks` keeps this state in plain
Python, `sharing_arrays.ManyLinks` in arrays; both give the same groups and rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Protocol

import numpy as np
import simpy

from moesim.hwmodels.arrays import FloatArray
from moesim.simulator.engine.demand import Demand
from moesim.simulator.engine.fair_share import CAPACITY_UNITS, TIGHT_LOAD
from moesim.simulator.engine.maxmin import max_min_rates_of_few


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
