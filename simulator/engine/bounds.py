"""Lower and upper bound of a step, and what it moves over links, from the programs that the engine runs."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from msgspec import Struct, field

from moesim.hwmodels.arrays import FloatArray, IntArray, distinct
from moesim.simulator.cost.evidence import EXPERTS, SENDS, SHARDS, Moved, summed
from moesim.simulator.cost.table import TransferCost
from moesim.simulator.engine.link_map import Demand
from moesim.simulator.engine.program import NS, TRANSFER_STREAMS, Program, hop_targets
from moesim.simulator.engine.task_durations import weighted_sums_ns
from moesim.simulator.engine.task_table import (
    MoveKey,
    Priced,
    TaskTable,
    TransferTable,
    by_identity,
    most_loaded,
    task_table,
)
from moesim.simulator.schedules import step_order
from moesim.simulator.schedules.template import EP_PHASES, Stream

# -- the longest time of a transfer on shared links ------------------------------------------------

Hop = tuple[int, int]
"""(source, target) pipeline rank of a send."""


class _Bytes(Struct, frozen=True):
    """Bytes of a transfer under even load on each of `links`.

    `outer` belongs to the scale-out hop, which scales with node loads, `inner` to the scale-up hop.
    """

    links: IntArray
    outer: FloatArray
    inner: FloatArray


class LinkContention(Struct):
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
    _bytes: dict[tuple[int, MoveKey], _Bytes] = field(default_factory=dict)
    _weights: dict[tuple[int, MoveKey], tuple[tuple[float, float], ...]] = field(default_factory=dict)
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
            # Sends by hop, in the order in which the hops first appear.
            targets = hop_targets(table.program, table.actions)
            hops = np.stack([np.broadcast_to(table.actions.rank[:, None], targets.shape), targets], axis=-1)
            made.sends.append(Counter(map(tuple, hops[targets >= 0].tolist())))
            links += [made._send(number, hop).links for hop in made.sends[-1]]
            made._own.append(distinct(np.concatenate([*links, np.zeros(0, dtype=np.int64)])))
        return made

    def _stream_links(self, number: int, transfers: TransferTable) -> list[IntArray]:
        """The links of every stream of every rank of a group."""
        streams: defaultdict[tuple[int, Stream], set[int]] = defaultdict(set)
        for rank, task, moved in zip(
            transfers.ranks, transfers.tasks, transfers.moved_of.tolist(), strict=True
        ):
            streams[rank, task.stream].add(moved)
        links = [self._of(number, *moved).links for moved in transfers.moved]
        return [distinct(np.concatenate([links[n] for n in moved])) for moved in streams.values()]

    def _of(self, number: int, moved: MoveKey, cost: TransferCost) -> _Bytes:
        key = (number, moved)
        if key not in self._bytes:
            program, (rank, phase, _, _) = self.programs[number], moved
            even = np.ones(program.members)
            parts = []
            for part in (
                dataclasses.replace(cost, scale_up_bytes=0.0),
                dataclasses.replace(cost, nic_bytes=0.0),
            ):
                demand = program.link_map.uniform(rank, phase, part)
                if demand is None:
                    demand = program.link_map.transfer(rank, phase, part, even, even)
                parts.append(demand)
            links = distinct(np.concatenate([part.links for part in parts]))
            amounts = np.zeros((2, len(links)))
            for amount, demand in zip(amounts, parts, strict=True):
                amount[np.searchsorted(links, demand.links)] = demand.bytes
            self._bytes[key] = _Bytes(links, amounts[0], amounts[1])
        return self._bytes[key]

    def transfer_ns(
        self, number: int, moved: MoveKey, cost: TransferCost, nodes: FloatArray, members: FloatArray
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


# -- bounds ----------------------------------------------------------------------------------------

ROUNDING_NS = 1.0
"""The engine rounds to whole nanoseconds, so a transfer may end this much earlier or later than priced."""

SUM_ERROR = 1e-9
"""Relative difference, with much room, between sums of the same durations in different orders."""


def lower_bound_s(programs: Sequence[Program], tables: Sequence[TaskTable] | None = None) -> float:
    """Seconds that the busiest resource needs at its best-case rates (docs/model.md, eq. B1).

    `programs`: the programs of all groups; `tables`: their task tables, if they exist already. The resources
    are every GPU's compute and every rank's streams of transfers, over all actions; the slowest optimizer at
    its best-case rate follows.
    """
    busiest = max(_busiest_ns(table) for table in _tables(programs, tables))
    # The norm is a barrier, so the slowest rank's optimizer starts after the busiest rank's actions.
    return (
        busiest
        + max(
            max(min(float(round(s.optimizer_s * NS)), s.best_s * NS) for s in program.costs.sync)
            for program in programs
        )
    ) / NS


def upper_bound_s(programs: Sequence[Program], tables: Sequence[TaskTable] | None = None) -> float:
    """Seconds with everything in series at worst-case rates, skew and shared links included (eq. B2 to B4).

    `programs`: the programs of all groups; `tables`: their task tables, if they exist already. An action
    lasts as long as its phases on its slowest member plus its own sends; actions keep the schedule's order
    (longest path). Every transfer includes the time that transfers of other groups occupy its links; the time
    of sends on those links is added once. The end of the step follows.
    """
    tables = _tables(programs, tables)
    contention = LinkContention.of(programs, tables)
    last = max(_in_series_ns(table, number, contention) for number, table in enumerate(tables))
    return (last + _end_ns(programs)) / NS


def _tables(programs: Sequence[Program], tables: Sequence[TaskTable] | None) -> Sequence[TaskTable]:
    return [task_table(program) for program in programs] if tables is None else tables


# -- best case ---------------------------------------------------------------------------------------


def _busiest_ns(table: TaskTable) -> float:
    """Nanoseconds of the busiest stream or member."""
    # Best-case prices are for load 1: scale the engine's durations by best price over price.
    share = table.price_figure(_share)
    transfers = table.transfers
    at = transfers.task
    payload = transfers.payload_ns() * transfers.cost_figure(_share)
    own = transfers.fastest_ns() * share[table.template_task[at]]
    busy = own + transfers.launch_ns() + np.maximum(payload - ROUNDING_NS, 0.0)
    # Sums over the tasks of each side of an action, then over the sides of a rank's actions, in their order.
    count, actions = len(TRANSFER_STREAMS), len(table.actions.steps)
    place = (2 * table.action[at] + table.side[at]) * count + transfers.stream()
    sides = np.bincount(place, busy, 2 * count * actions).reshape(actions, 2 * count)
    place = count * table.actions.rank[:, None] + np.tile(np.arange(count), 2)
    most = float(np.bincount(place.ravel(), sides.ravel(), 1).max())
    sums = member_sums_ns(table, share).max(axis=1)
    # The order of a sum matters to its last digits: repeat the largest ones in the order of the actions.
    close = np.flatnonzero(sums >= max(most, float(sums.max())) * (1.0 - SUM_ERROR))
    return max([most, *(_busiest_member_ns(table, rank, share) for rank in close.tolist())])


def member_sums_ns(table: TaskTable, share: FloatArray) -> FloatArray:
    """Compute of every member of every rank [pipeline ranks, members], summed in any order.

    `share`: by which the durations of each template task count.
    """
    total = np.zeros((len(table.program.ranks), table.program.members))
    ranks, count = len(total), table.program.schedule.microbatches
    number, phases = by_identity([task.compute for task in table.of_template])
    alone = np.array([task.transfer is None for task in table.of_template], dtype=bool)
    at = np.flatnonzero(alone[table.template_task])
    # Micro-batches of every phase on every rank, each with the share of the tasks that run it.
    template = table.template_task[at]
    pair = number[template] * ranks + table.actions.rank[table.action[at]]
    used = np.zeros(len(phases) * ranks, dtype=bool)
    used[pair] = True
    place = (np.cumsum(used) - 1)[pair] * count + table.microbatch[at]
    phase, rank = np.divmod(np.flatnonzero(used), ranks)
    weights = np.zeros((len(phase), count))
    weights += np.bincount(place, share[template], weights.size).reshape(weights.shape)
    first_use = np.searchsorted(phase, np.arange(len(phases) + 1))
    weighted_sums_ns(phases, first_use, rank, weights, total)
    return total


def _busiest_member_ns(table: TaskTable, rank: int, share: FloatArray) -> float:
    """Compute of the busiest member of a rank, summed in the order of its tasks and actions."""
    first, end = table.actions.first_action[rank : rank + 2].tolist()
    members = table.program.members
    sides = np.zeros((end - first, 2, members))
    for group in (group for group in table.groups if group[0] == rank):
        actions = group[2]
        microbatches = table.actions.microbatches[actions]
        own = np.zeros((2, len(actions), members))
        for number, task in table.compute_tasks(group):
            own[task.side] += task.rows_ns[microbatches[:, task.side]] * share[number]
        sides[actions - first] = own.transpose(1, 0, 2)
    total = np.zeros(members)
    for side in sides.reshape(-1, members):
        total += side
    return float(total.max())


def _share(price: Priced, seconds: float) -> float:
    """Best-case seconds over `seconds`."""
    return min(1.0, price.best_s / seconds) if seconds > 0.0 else 1.0


# -- worst case --------------------------------------------------------------------------------------


def _in_series_ns(table: TaskTable, number: int, contention: LinkContention) -> float:
    """End of a group's last action with everything in series, plus the time that sends occupy its links."""
    # Nanoseconds [actions, sides] of all phases in series, each on its slowest member.
    transfers = table.transfers
    # Every task adds its compute and then, if it is a transfer, its launch and payload, in this order.
    parts = np.zeros((table.actions.tasks, 2))
    parts[:, 0] = table.slowest_ns * table.price_figure(_growth)[table.template_task]
    alone = transfers.payload_ns() * transfers.cost_figure(_growth)
    shared = _shared_ns(table, number, contention)
    payload = np.where(alone > 0.0, np.maximum(alone, shared) + ROUNDING_NS, 0.0)
    parts[transfers.task, 1] = transfers.launch_ns() + payload
    place = np.repeat(2 * table.action + table.side, 2)
    actions = len(table.actions.steps)
    sides = np.asarray(np.bincount(place, parts.ravel(), 2 * actions).reshape(actions, 2), dtype=np.float64)
    targets, source = hop_targets(table.program, table.actions), table.actions.rank[:, None]
    ranks = len(table.program.ranks)
    longest = np.zeros((ranks, ranks + 1))  # the last column stands for no send
    for hop in contention.sends[number]:
        longest[hop] = contention.send_ns(number, *hop) + ROUNDING_NS
    sends = longest[source, targets]
    costs = (sides[:, 0] + sides[:, 1]) + (sends[:, 0] + sends[:, 1])
    last = max(step_order(table.program.schedule).ends(costs.tolist()), default=0.0)
    return last + contention.others_sends_ns(number)


def _shared_ns(table: TaskTable, number: int, contention: LinkContention) -> FloatArray:
    """Longest payload of every transfer beside the transfers of all other streams."""
    transfers, count = table.transfers, table.program.schedule.microbatches
    shape = (len(transfers.loads), count)
    nodes, members = np.empty(shape), np.empty(shape)
    for number_of_load, rows in enumerate(transfers.loads):
        nodes[number_of_load] = most_loaded(rows.node_load)
        members[number_of_load] = most_loaded(rows.load)
    pairs, pair_of = np.unique(transfers.moved_of * len(nodes) + transfers.load_of, return_inverse=True)
    moved, loads = np.divmod(pairs, max(1, len(nodes)))
    bounds = np.searchsorted(moved, np.arange(len(transfers.moved) + 1)).tolist()
    longest = np.zeros((len(pairs), count))
    for (what, cost), begin, end in zip(transfers.moved, bounds, bounds[1:], strict=False):
        own = loads[begin:end]
        longest[begin:end] = contention.transfer_ns(number, what, cost, nodes[own], members[own])
    return np.asarray(longest[pair_of[transfers.place], transfers.microbatch])


def _growth(price: Priced, seconds: float) -> float:
    """Worst-case seconds over `seconds`."""
    return max(1.0, price.worst_s / seconds) if seconds > 0.0 else 1.0


def _end_ns(programs: Sequence[Program]) -> float:
    """Reduction, norm, optimizer and gather at their worst, with the faults of every group (eq. E5).

    Because the norm is a barrier, one rank's reduction may delay the optimizer of another.
    """
    reduce_ns = rest_ns = 0.0
    for rank, sync in enumerate(programs[0].costs.sync):
        growth = _growth(sync, sync.total_s) * NS
        slow = max(program.link_map.sync_slowness(rank) for program in programs)
        reduce_ns = max(reduce_ns, sync.reduce_s * slow * growth)
        rest_ns = max(rest_ns, (sync.norm_s + sync.optimizer_s + sync.gather_s * slow) * growth)
    return reduce_ns + rest_ns + 4.0 * ROUNDING_NS


# -- moved bytes -----------------------------------------------------------------------------------


def moved_by_rank(table: TaskTable) -> tuple[tuple[Moved, ...], ...]:
    """Bytes that an average GPU of each pipeline rank sends in a step, by what moves them (eq. T4).

    Transfers and sends that an engine runs, collectives inside phases and collectives at the end of the step,
    whether anything waits for them or not. A GPU receives as many bytes as it sends.
    """
    program = table.program
    rows: list[list[tuple[Moved, float]]] = [[] for _ in program.ranks]
    for rank, moved in _transfers(table):
        rows[rank].append((moved, 1.0))
    for rank, code, actions in table.groups:
        times = float(len(actions))
        for task in table.actions.codes[code].tasks:
            rows[rank] += [(moved, times) for moved in task.price.moved]
            if task.transfer is not None:
                rows[rank] += [(moved, times) for moved in task.transfer.cost.moved_before]
    targets = hop_targets(program, table.actions)
    sent = np.bincount(table.actions.rank, (targets >= 0).sum(axis=1), len(rows))
    for own, sends, sync in zip(rows, sent.tolist(), program.costs.sync, strict=True):
        size = program.costs.send_bytes
        across = program.costs.send_across_nodes
        own.append((Moved(SENDS, size * across, size * (not across)), sends))
        own += [(moved, 1.0) for moved in sync.moved]
    return tuple(summed(own) for own in rows)


def _transfers(table: TaskTable) -> Iterable[tuple[int, Moved]]:
    """(rank, bytes) of the transfers that an engine runs, with the rows that the members receive."""
    transfers, count = table.transfers, table.program.schedule.microbatches
    ranks = np.array(transfers.ranks, dtype=np.int64)[transfers.place]
    experts = np.array([task.phase in EP_PHASES for task in transfers.tasks], dtype=bool)[transfers.place]
    load = transfers.load_of[transfers.place], transfers.microbatch

    def loads(of_places: list[FloatArray]) -> FloatArray:
        means = [np.broadcast_to(rows.mean(axis=1), (count,)) for rows in of_places]
        return np.array(means).reshape(-1, count)[load]

    costs = [rows.cost for rows in transfers.rows]
    nic = transfers.each([c.nic_bytes for c in costs]) * loads([rows.node_load for rows in transfers.loads])
    up = transfers.each([c.scale_up_bytes for c in costs]) * loads([rows.load for rows in transfers.loads])
    totals: defaultdict[tuple[int, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for what, chosen in ((EXPERTS, experts), (SHARDS, ~experts)):
        for place, sizes in enumerate((nic, up)):
            sums = np.bincount(ranks[chosen], sizes[chosen], len(table.program.ranks))
            for rank, total in enumerate(sums.tolist()):
                totals[rank, what][place] += total
    return [(rank, Moved(what, *both)) for (rank, what), both in totals.items()]
