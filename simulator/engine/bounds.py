"""Lower and upper bound of a step, from the same programs that the engine runs (pure).

Both bounds read the engine's inputs: the duration of every task with its member's speed, jitter, faults and
received rows, the link map with the bandwidth that faults left, and the slow-downs of sends and of the end of
the step. They therefore hold for every scenario (docs/model.md, eq. B1 to B4).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.simulator.engine.contention import LinkContention, hop_targets
from moesim.simulator.engine.durations import NS
from moesim.simulator.engine.program import TRANSFER_STREAMS, Program, TransferRows
from moesim.simulator.engine.task_table import TaskTable, over_members, task_table
from moesim.simulator.model.operator import Phase
from moesim.simulator.schedules import step_order

ROUNDING_NS = 1.0
"""The engine rounds to whole nanoseconds, so a transfer may end this much earlier or later than priced."""

SUM_ERROR = 1e-9
"""Relative error, with much room, of a sum of durations in another order."""


def lower_bound_s(programs: Sequence[Program], tables: Sequence[TaskTable] | None = None) -> float:
    """Seconds that the busiest resource needs at its best-case rates (docs/model.md, eq. B1).

    `programs`: the programs of all groups; `tables`: their task tables, if they exist already. The resources
    are every GPU's compute and every rank's streams of transfers, over all actions; the slowest optimizer at
    its best-case rate follows.
    """
    busiest = max(_busiest_ns(table) for table in _tables(programs, tables))
    return (busiest + max(_optimizer_ns(program) for program in programs)) / NS


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


class _Priced(Protocol):
    """A price with its range."""

    @property
    def best_s(self) -> float:
        """Seconds in the best case."""

    @property
    def worst_s(self) -> float:
        """Seconds in the worst case."""


# -- transfers ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Transfers:
    """The transfers of a program: `tasks` are their task numbers, and `template` their template tasks.

    `number[i]`: the transfer that template task i is, in the order of `rows`; -1 for compute.
    """

    tasks: IntArray
    template: IntArray
    number: IntArray
    rows: tuple[TransferRows, ...]

    @classmethod
    def of(cls, table: TaskTable) -> _Transfers:
        rows = [task.transfer for task in table.of_template]
        number = np.cumsum([row is not None for row in rows]) - 1
        number[[row is None for row in rows]] = -1
        tasks = np.flatnonzero(number[table.template_task] >= 0)
        return cls(tasks, table.template_task[tasks], number, tuple(row for row in rows if row is not None))

    def each(self, values: Sequence[float]) -> FloatArray:
        """One value a transfer task, from one a transfer."""
        return np.array(values, dtype=np.float64)[self.number[self.template]]

    def payload_ns(self, microbatch: IntArray) -> FloatArray:
        """Payload of the slowest member of every transfer task, alone on its links."""
        lists = {id(row.payload_ns): row.payload_ns for row in self.rows}
        place = {key: at for at, key in enumerate(lists)}
        at = np.array([place[id(row.payload_ns)] for row in self.rows], dtype=np.int64)
        values = np.array(list(lists.values()), dtype=np.float64)
        return np.asarray(values[at[self.number[self.template]], microbatch])

    def costs(self, figure: Callable[[_Priced, float], float]) -> FloatArray:
        """A figure of the price and payload seconds of every transfer task."""
        known: dict[int, float] = {}
        for row in self.rows:
            cost = row.cost
            if id(cost) not in known:
                known[id(cost)] = figure(cost, max(cost.nic_s, cost.scale_up_s))
        return self.each([known[id(row.cost)] for row in self.rows])


def _prices(table: TaskTable, figure: Callable[[_Priced, float], float]) -> FloatArray:
    """A figure of the price and seconds of compute of every template task."""
    known: dict[int, float] = {}
    values = []
    for task in table.of_template:
        price = task.price
        value = known.get(id(price))
        if value is None:
            value = known[id(price)] = figure(price, price.fixed_s + price.row_s)
        values.append(value)
    return np.array(values)


# -- best case ---------------------------------------------------------------------------------------


def _busiest_ns(table: TaskTable) -> float:
    """Nanoseconds of the busiest stream or member.

    The compute of a rank's members is summed only where even the sum of its slowest members could be the
    largest of all.
    """
    # Best-case prices are for load 1: scale the engine's durations by best price over price.
    share = _prices(table, _share)
    transfers = _Transfers.of(table)
    most = _busiest_stream_ns(table, transfers, share)
    own = table.slowest_ns * share[table.template_task]
    own[transfers.tasks] = 0.0
    at_most = np.bincount(table.actions.rank[table.action], own, len(table.program.ranks))
    for rank in np.argsort(-at_most).tolist():
        if at_most[rank] * (1.0 + SUM_ERROR) <= most:
            break
        most = max(most, _busiest_member_ns(table, rank, share))
    return most


def _busiest_stream_ns(table: TaskTable, transfers: _Transfers, share: FloatArray) -> float:
    rows, at = transfers.rows, transfers.tasks
    number, least = over_members([task for task in table.of_template if task.transfer], np.minimum)
    microbatch = table.microbatch[at]
    own = least[number[transfers.number[transfers.template]], microbatch] if len(at) else np.zeros(0)
    payload = transfers.payload_ns(microbatch) * transfers.costs(_share) if len(at) else np.zeros(0)
    payload = np.maximum(payload - ROUNDING_NS, 0.0)
    seconds = own * share[transfers.template] + transfers.each([row.launch_ns for row in rows]) + payload
    stream = np.array(
        [TRANSFER_STREAMS.index(t.stream) for t in table.of_template if t.transfer], dtype=np.int64
    )
    # Sums over the tasks of each side of an action, then over the sides of a rank's actions, in their order.
    count, actions = len(TRANSFER_STREAMS), len(table.actions.steps)
    place = (2 * table.action[at] + table.side[at]) * count + stream[transfers.number[transfers.template]]
    sides = np.bincount(place, seconds, 2 * count * actions).reshape(actions, 2 * count)
    place = count * table.actions.rank[:, None] + np.tile(np.arange(count), 2)
    return float(np.bincount(place.ravel(), sides.ravel(), 1).max())


def _busiest_member_ns(table: TaskTable, rank: int, share: FloatArray) -> float:
    """Compute of the busiest member of a rank, with the sums in the order of tasks and actions."""
    first, end = table.actions.first_action[rank : rank + 2].tolist()
    sides = np.zeros((end - first, 2, table.program.members))
    for _, code, actions in (group for group in table.groups() if group[0] == rank):
        micro = table.actions.microbatches[actions]
        own = np.zeros((2, len(actions), table.program.members))
        begin = int(table.first_of_code[code])
        for at, task in enumerate(table.actions.codes[code].tasks, start=begin):
            if task.transfer is None:
                own[task.side] += task.rows_ns[micro[:, task.side]] * share[at]
        sides[actions - first] = own.transpose(1, 0, 2)
    total = np.zeros(table.program.members)
    for part in sides.reshape(-1, table.program.members):
        total += part
    return float(total.max())


def _share(price: _Priced, seconds: float) -> float:
    """Best-case seconds over `seconds`."""
    return min(1.0, price.best_s / seconds) if seconds > 0.0 else 1.0


def _optimizer_ns(program: Program) -> float:
    """The norm is a barrier, so the slowest rank's optimizer starts after the busiest rank's actions."""
    return max(min(float(round(s.optimizer_s * NS)), s.best_s * NS) for s in program.costs.sync)


# -- worst case --------------------------------------------------------------------------------------


def _in_series_ns(table: TaskTable, number: int, contention: LinkContention) -> float:
    """End of a group's last action with everything in series, plus the time that sends occupy its links."""
    sides = _worst_ns(table, number, contention)
    targets, ranks = hop_targets(table), table.actions.rank
    sends = np.zeros(targets.shape)
    for source, target in contention.sends[number]:
        hop = (ranks[:, None] == source) & (targets == target)
        sends[hop] = contention.send_ns(number, source, target) + ROUNDING_NS
    costs = (sides[:, 0] + sides[:, 1]) + (sends[:, 0] + sends[:, 1])
    last = max(step_order(table.program.schedule).ends(costs.tolist()), default=0.0)
    return last + contention.others_sends_ns(number)


def _worst_ns(table: TaskTable, number: int, contention: LinkContention) -> FloatArray:
    """Nanoseconds [actions, sides] of all phases in series, each on its slowest member."""
    transfers = _Transfers.of(table)
    at, rows = transfers.tasks, transfers.rows
    # Every task adds its compute and then, if it is a transfer, its launch and payload, in this order.
    parts = np.zeros((table.actions.tasks, 2))
    parts[:, 0] = table.slowest_ns * _prices(table, _growth)[table.template_task]
    if len(at):
        microbatch = table.microbatch[at]
        alone = transfers.payload_ns(microbatch) * transfers.costs(_growth)
        shared = _shared_ns(table, number, contention, transfers, microbatch)
        payload = np.where(alone > 0.0, np.maximum(alone, shared) + ROUNDING_NS, 0.0)
        parts[at, 1] = transfers.each([row.launch_ns for row in rows]) + payload
    place = np.repeat(2 * table.action + table.side, 2)
    actions = len(table.actions.steps)
    return np.asarray(np.bincount(place, parts.ravel(), 2 * actions).reshape(actions, 2), dtype=np.float64)


def _shared_ns(
    table: TaskTable,
    number: int,
    contention: LinkContention,
    transfers: _Transfers,
    microbatch: IntArray,
) -> FloatArray:
    """Longest payload of every transfer task beside the transfers of all other streams."""
    microbatches = table.program.schedule.microbatches
    phases = [task.phase for task in table.of_template if task.transfer]
    ranks: dict[int, int] = {}
    for rank, code, _ in table.groups():
        ranks.setdefault(code, rank)
    of = [ranks[code] for code, c in enumerate(table.actions.codes) for _ in c.transfers]
    load, nodes, members = _most_loaded(transfers.rows, microbatches)
    costs = {id(row.cost): row.cost for row in transfers.rows}
    keys = [(r, p, id(row.cost)) for r, p, row in zip(of, phases, transfers.rows, strict=True)]
    rows: dict[tuple[tuple[int, Phase, int], int], int] = {}
    row = np.array([rows.setdefault(key, len(rows)) for key in zip(keys, load, strict=True)])
    alike: defaultdict[tuple[int, Phase, int], list[tuple[int, int]]] = defaultdict(list)
    for (key, loaded), at in rows.items():
        alike[key].append((at, loaded))
    longest = np.empty((len(rows), microbatches))
    for (rank, phase, cost), places in alike.items():
        to, loaded_rows = (list(part) for part in zip(*places, strict=True))
        each = nodes[loaded_rows], members[loaded_rows]
        longest[to] = contention.transfer_ns(number, rank, phase, costs[cost], each)
    return np.asarray(longest[row[transfers.number[transfers.template]], microbatch])


def _most_loaded(rows: Sequence[TransferRows], microbatches: int) -> tuple[list[int], FloatArray, FloatArray]:
    """(number of every transfer's load, rows of the most loaded node and member [loads, micro-batches])."""
    numbers: dict[tuple[object, ...], int] = {}
    nodes: list[FloatArray] = []
    members: list[FloatArray] = []
    load = []
    for row in rows:
        # Transfers of one block have views of the same loads.
        key = (*_place(row.load), *_place(row.node_load))
        at = numbers.setdefault(key, len(nodes))
        if at == len(nodes):
            nodes.append(np.broadcast_to(row.node_load.max(axis=1), microbatches))
            members.append(np.broadcast_to(row.load.max(axis=1), microbatches))
        load.append(at)
    return load, np.array(nodes), np.array(members)


def _place(array: FloatArray) -> tuple[object, ...]:
    """Where an array's values lie in memory."""
    return array.__array_interface__["data"][0], array.shape, array.strides


def _growth(price: _Priced, seconds: float) -> float:
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
