"""Lower and upper bound of a step, from the same programs that the engine runs (pure).

Both bounds read the engine's inputs: the duration of every task with its member's speed, jitter, faults and
received rows, the link map with the bandwidth that faults left, and the slow-downs of sends and of the end of
the step. They therefore hold for every scenario (docs/model.md, eq. B1 to B4).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moesim.hwmodels.arrays import FloatArray
from moesim.simulator.engine.contention import LinkContention, hop_targets
from moesim.simulator.engine.durations import NS
from moesim.simulator.engine.figures import Priced
from moesim.simulator.engine.member_durations import member_sums_ns, most_loaded, rows_of
from moesim.simulator.engine.program import TRANSFER_STREAMS, Program
from moesim.simulator.engine.task_table import TaskTable, task_table
from moesim.simulator.schedules import step_order

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


# -- best case ---------------------------------------------------------------------------------------


def _busiest_ns(table: TaskTable) -> float:
    """Nanoseconds of the busiest stream or member."""
    # Best-case prices are for load 1: scale the engine's durations by best price over price.
    share = table.price_figure(_share)
    most = _busiest_stream_ns(table, share)
    sums = _member_sums_ns(table, share).max(axis=1)
    # The order of a sum matters to its last digits: repeat the largest ones in the order of the actions.
    close = np.flatnonzero(sums >= max(most, float(sums.max())) * (1.0 - SUM_ERROR))
    return max([most, *(_busiest_member_ns(table, rank, share) for rank in close.tolist())])


def _busiest_stream_ns(table: TaskTable, share: FloatArray) -> float:
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
    return float(np.bincount(place.ravel(), sides.ravel(), 1).max())


def _member_sums_ns(table: TaskTable, share: FloatArray) -> FloatArray:
    """Compute of every member of every rank [pipeline ranks, members], summed in any order."""
    total = np.zeros((len(table.program.ranks), table.program.members))
    for group in table.groups:
        rank, _, actions = group
        sides = [rows_of(side) for side in table.actions.microbatches[actions].T]
        tasks = list(table.compute_tasks(group))
        if tasks:
            sums = np.array([member_sums_ns(task.rows_ns, sides[task.side]) for _, task in tasks])
            total[rank] += share[[number for number, _ in tasks]] @ sums
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


def _optimizer_ns(program: Program) -> float:
    """The norm is a barrier, so the slowest rank's optimizer starts after the busiest rank's actions."""
    return max(min(float(round(s.optimizer_s * NS)), s.best_s * NS) for s in program.costs.sync)


# -- worst case --------------------------------------------------------------------------------------


def _in_series_ns(table: TaskTable, number: int, contention: LinkContention) -> float:
    """End of a group's last action with everything in series, plus the time that sends occupy its links."""
    sides = _worst_ns(table, number, contention)
    targets, source = hop_targets(table), table.actions.rank[:, None]
    ranks = len(table.program.ranks)
    longest = np.zeros((ranks, ranks + 1))  # the last column stands for no send
    for hop in contention.sends[number]:
        longest[hop] = contention.send_ns(number, *hop) + ROUNDING_NS
    sends = longest[source, targets]
    costs = (sides[:, 0] + sides[:, 1]) + (sends[:, 0] + sends[:, 1])
    last = max(step_order(table.program.schedule).ends(costs.tolist()), default=0.0)
    return last + contention.others_sends_ns(number)


def _worst_ns(table: TaskTable, number: int, contention: LinkContention) -> FloatArray:
    """Nanoseconds [actions, sides] of all phases in series, each on its slowest member."""
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
    return np.asarray(np.bincount(place, parts.ravel(), 2 * actions).reshape(actions, 2), dtype=np.float64)


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
