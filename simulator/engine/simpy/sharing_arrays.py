"""Finds which flows compete, in arrays, for transfers on hundreds of links or pools of thousands of links."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moesim.hwmodels.arrays import BoolArray, FloatArray, IntArray
from moesim.simulator.engine.fair_share import CAPACITY_UNITS, TIGHT_LOAD
from moesim.simulator.engine.maxmin import fair_bandwidths
from moesim.simulator.engine.simpy.sharing import Flow

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
