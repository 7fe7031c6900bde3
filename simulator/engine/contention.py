"""The longest time that a transfer can take on shared links (pure).

A transfer that is slower than alone has a full link on its route, its bottleneck. There, max-min fairness
gives no other transfer more bandwidth. A communication stream has one transfer in flight at a time; any
number of sends may be in flight, but each moves its bytes once (docs/model.md, eq. B3 and B4).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.simulator.cost.table import TransferCost
from moesim.simulator.engine.durations import NS
from moesim.simulator.engine.program import TRANSFER_STREAMS, Program, TransferRows
from moesim.simulator.model.operator import Phase

Hop = tuple[int, int]
"""(source, target) pipeline rank of a send."""


@dataclass(frozen=True, slots=True)
class _Bytes:
    """Bytes of a transfer under even load on each of `links`.

    `outer` belongs to the scale-out hop, which scales with node loads, `inner` to the scale-up hop.
    """

    links: IntArray
    outer: FloatArray
    inner: FloatArray


@dataclass(slots=True)
class LinkContention:
    """Counts the communication streams of all groups on every link, and bounds how long transfers take."""

    programs: Sequence[Program]
    capacity: FloatArray
    """Bytes per nanosecond of every link."""
    streams: IntArray
    """Number of streams (up to two a rank and group) that have transfers on each link."""
    sends: list[Counter[Hop]] = field(default_factory=list)
    """Number of sends of each group, by hop."""
    _own: list[IntArray] = field(default_factory=list)
    """Links that a group uses."""
    _bytes: dict[tuple[int, int, Phase, TransferCost], _Bytes] = field(default_factory=dict)
    _weights: dict[tuple[int, int, Phase, TransferCost], FloatArray] = field(default_factory=dict)
    _sends: dict[tuple[int, Hop], float] = field(default_factory=dict)

    @classmethod
    def of(cls, programs: Sequence[Program]) -> LinkContention:
        """Count the streams and sends of all programs."""
        capacity = programs[0].link_map.capacity_bytes_per_ns
        made = cls(programs, capacity, np.zeros(len(capacity), dtype=np.int64))
        for number, program in enumerate(programs):
            used = np.zeros(len(capacity), dtype=bool)
            for rank, steps in enumerate(program.ranks):
                streams = {name: np.zeros(len(capacity), dtype=bool) for name in TRANSFER_STREAMS}
                for code in {id(step.code): step.code for step in steps}.values():
                    for task in code.tasks:
                        if task.transfer is not None:
                            links = made._of(number, rank, task.phase, task.transfer.cost).links
                            streams[task.stream][links] = True
                for stream in streams.values():
                    made.streams += stream
                    used |= stream
            made.sends.append(
                Counter(
                    hop
                    for rank, steps in enumerate(program.ranks)
                    for s in steps
                    for hop in program.hops(rank, s)
                )
            )
            for source, target in made.sends[-1]:
                used[program.link_map.send(source, target, program.costs.send_bytes).links] = True
            made._own.append(np.flatnonzero(used))
        return made

    def _of(self, number: int, rank: int, phase: Phase, cost: TransferCost) -> _Bytes:
        key = (number, rank, phase, cost)
        if key not in self._bytes:
            program = self.programs[number]
            amounts = np.zeros((2, len(self.capacity)))
            even = np.ones(program.members)
            parts = replace(cost, scale_up_bytes=0.0), replace(cost, nic_bytes=0.0)
            for part, amount in zip(parts, amounts, strict=True):
                demand = program.link_map.uniform(rank, phase, part)
                if demand is None:
                    demand = program.link_map.transfer(rank, phase, part, even, even)
                amount[demand.links] = demand.bytes
            links = np.flatnonzero(amounts.any(axis=0))
            self._bytes[key] = _Bytes(links, amounts[0, links], amounts[1, links])
        return self._bytes[key]

    def transfer_ns(self, number: int, rank: int, phase: Phase, rows: TransferRows) -> FloatArray:
        """Longest payload in ns by micro-batch beside the transfers of all other streams (eq. B3).

        The result has one entry where the payload does not depend on routing.
        """
        key = (number, rank, phase, rows.cost)
        if key not in self._weights:
            moved = self._of(*key)
            others = self.streams[moved.links] - 1
            each = [(part + others * part.max(initial=0.0)) / self.capacity[moved.links]
                    for part in (moved.outer, moved.inner)]  # fmt: skip
            self._weights[key] = np.unique(np.array(each), axis=1)
        outer, inner = self._weights[key]
        if not len(outer):
            return np.zeros(1)
        nodes, members = rows.node_load.max(axis=1), rows.load.max(axis=1)
        return np.asarray((np.outer(nodes, outer) + np.outer(members, inner)).max(axis=1))

    def send_ns(self, number: int, source: int, target: int) -> float:
        """Longest time in ns of a group's pipeline send beside the transfers of all streams (eq. B3)."""
        key = (number, (source, target))
        if key not in self._sends:
            program = self.programs[number]
            demand = program.link_map.send(source, target, program.costs.send_bytes)
            alone = program.costs.send_s * NS * float(np.max(program.link_map.send_slowness(source, target)))
            crowd = self.streams[demand.links] * demand.bytes.max(initial=0.0)
            shared = (demand.bytes + crowd) / self.capacity[demand.links]
            self._sends[key] = max(alone, float(shared.max(initial=0.0)))
        return self._sends[key]

    def others_sends_ns(self, number: int) -> float:
        """Longest time in ns that the sends of all groups can occupy the links of group `number` (eq. B4)."""
        mine = np.zeros(len(self.capacity), dtype=bool)
        mine[self._own[number]] = True
        total = 0.0
        for program, sends in zip(self.programs, self.sends, strict=True):
            for (source, target), count in sends.items():
                demand = program.link_map.send(source, target, program.costs.send_bytes)
                met = mine[demand.links]
                share = demand.bytes[met] / self.capacity[demand.links[met]]
                total += count * float(share.max(initial=0.0))
        return total
