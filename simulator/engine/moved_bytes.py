"""The list of what a step moves over the links of every pipeline rank's GPUs (pure)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from moesim.hwmodels.arrays import FloatArray
from moesim.simulator.cost.moved import EXPERTS, SENDS, SHARDS, Moved, summed
from moesim.simulator.engine.contention import hop_targets
from moesim.simulator.engine.task_table import TaskTable
from moesim.simulator.schedules.template import EP_PHASES


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
    sent = np.bincount(table.actions.rank, (hop_targets(table) >= 0).sum(axis=1), len(rows))
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
