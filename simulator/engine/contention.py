"""The longest time that a transfer can take on shared links (pure).

A transfer that is slower than alone has a full link on its route, its bottleneck. There, max-min fairness
gives no other transfer more bandwidth. A communication stream has one transfer in flight at a time; any
number of sends may be in flight, but each moves its bytes once (docs/model.md, eq. B3 and B4).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.simulator.cost.table import TransferCost
from moesim.simulator.engine.demand import Demand
from moesim.simulator.engine.durations import NS
from moesim.simulator.engine.program import Program
from moesim.simulator.engine.task_table import Moved, TaskTable, TransferTable, task_table
from moesim.simulator.schedules.template import Stream

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
    sends: list[dict[Hop, int]] = field(default_factory=list)
    """Number of sends of each group, by hop."""
    _own: list[IntArray] = field(default_factory=list)
    """Links that a group uses."""
    _bytes: dict[tuple[int, Moved], _Bytes] = field(default_factory=dict)
    _weights: dict[tuple[int, Moved], tuple[tuple[float, float], ...]] = field(default_factory=dict)
    _demands: dict[tuple[int, Hop], Demand] = field(default_factory=dict)
    _sends: dict[tuple[int, Hop], float] = field(default_factory=dict)

    @classmethod
    def of(cls, programs: Sequence[Program], tables: Sequence[TaskTable] | None = None) -> LinkContention:
        """Count the streams and sends of all programs; `tables`: their task tables, if they exist already."""
        capacity = programs[0].link_map.capacity_bytes_per_ns
        made = cls(programs, capacity, np.zeros(len(capacity), dtype=np.int64))
        tables = tables or [task_table(program) for program in programs]
        for number, table in enumerate(tables):
            links = made._stream_links(number, table.transfers)
            for stream in links:
                made.streams[stream] += 1
            made.sends.append(_sends(table))
            links += [made._send(number, hop).links for hop in made.sends[-1]]
            made._own.append(np.unique(np.concatenate([*links, np.zeros(0, dtype=np.int64)])))
        return made

    def _stream_links(self, number: int, transfers: TransferTable) -> list[IntArray]:
        """The links of every stream of every rank of a group."""
        streams: defaultdict[tuple[int, Stream], set[int]] = defaultdict(set)
        for rank, task, moved in zip(
            transfers.ranks, transfers.tasks, transfers.moved_of.tolist(), strict=True
        ):
            streams[rank, task.stream].add(moved)
        links = [self._of(number, *moved).links for moved in transfers.moved]
        return [np.unique(np.concatenate([links[n] for n in moved])) for moved in streams.values()]

    def _of(self, number: int, moved: Moved, cost: TransferCost) -> _Bytes:
        key = (number, moved)
        if key not in self._bytes:
            program, (rank, phase, _, _) = self.programs[number], moved
            even = np.ones(program.members)
            parts = []
            for part in (replace(cost, scale_up_bytes=0.0), replace(cost, nic_bytes=0.0)):
                demand = program.link_map.uniform(rank, phase, part)
                if demand is None:
                    demand = program.link_map.transfer(rank, phase, part, even, even)
                parts.append(demand)
            links = np.union1d(parts[0].links, parts[1].links)
            amounts = np.zeros((2, len(links)))
            for amount, demand in zip(amounts, parts, strict=True):
                amount[np.searchsorted(links, demand.links)] = demand.bytes
            self._bytes[key] = _Bytes(links, amounts[0], amounts[1])
        return self._bytes[key]

    def transfer_ns(
        self, number: int, moved: Moved, cost: TransferCost, nodes: FloatArray, members: FloatArray
    ) -> FloatArray:
        """Longest payload in ns beside the transfers of all other streams (eq. B3).

        `nodes` and `members`: relative rows of the most loaded node and member, in any shape; the result has
        the same.
        """
        key = (number, moved)
        if key not in self._weights:
            own = self._of(number, moved, cost)
            others = self.streams[own.links] - 1
            each = np.array([(part + others * part.max(initial=0.0)) / self.capacity[own.links]
                             for part in (own.outer, own.inner)])  # fmt: skip
            self._weights[key] = tuple({(outer, inner) for outer, inner in each.T.tolist()})
        longest = np.zeros(nodes.shape)
        for outer, inner in self._weights[key]:
            np.maximum(longest, nodes * outer + members * inner, out=longest)
        return longest

    def _send(self, number: int, hop: Hop) -> Demand:
        if (number, hop) not in self._demands:
            program = self.programs[number]
            self._demands[number, hop] = program.link_map.send(*hop, program.costs.send_bytes)
        return self._demands[number, hop]

    def send_ns(self, number: int, source: int, target: int) -> float:
        """Longest time in ns of a group's pipeline send beside the transfers of all streams (eq. B3)."""
        key = (number, (source, target))
        if key not in self._sends:
            program, demand = self.programs[number], self._send(*key)
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
        for other, sends in enumerate(self.sends):
            for hop, count in sends.items():
                demand = self._send(other, hop)
                met = mine[demand.links]
                share = demand.bytes[met] / self.capacity[demand.links[met]]
                total += count * float(share.max(initial=0.0))
        return total


def hop_targets(table: TaskTable) -> IntArray:
    """Pipeline rank to which each action sends its activation and its gradient [actions, 2]; -1 for none.

    The same hops as those of `Program.hops`.
    """
    program, actions = table.program, table.actions
    schedule = program.schedule
    if program.costs.send_s == 0.0:
        return np.full((len(actions.steps), 2), -1)
    backward = np.array([code.kind != "W" for code in actions.codes], dtype=bool)[actions.code]
    stages = actions.stages + np.array([1, -1])
    held = np.stack([actions.stages[:, 0] >= 0, backward], axis=1)
    sent = held & (stages >= 0) & (stages < schedule.n_stages)
    routes = np.array(schedule.routes)
    direction = actions.microbatches * len(routes) // schedule.microbatches
    target = routes[np.where(sent, direction, 0), np.where(sent, stages, 0)]
    return np.where(sent & (target != actions.rank[:, None]), target, -1)


def _sends(table: TaskTable) -> dict[Hop, int]:
    """Number of sends by hop, in the order in which the hops first appear."""
    targets = hop_targets(table)
    hops = np.stack([np.broadcast_to(table.actions.rank[:, None], targets.shape), targets], axis=-1)
    hops = hops[targets >= 0]
    unique, first, count = np.unique(hops, axis=0, return_index=True, return_counts=True)
    order = np.argsort(first).tolist()
    return {(int(unique[at, 0]), int(unique[at, 1])): int(count[at]) for at in order}
