"""Every transfer of a program as vectors (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.simulator.cost.table import TransferCost
from moesim.simulator.engine.figures import Figure, by_identity
from moesim.simulator.engine.member_durations import fastest_ns
from moesim.simulator.engine.program import TRANSFER_STREAMS, CompiledTask, TransferRows
from moesim.simulator.model.operator import Phase

if TYPE_CHECKING:
    from moesim.simulator.engine.task_table import TaskTable

Moved = tuple[int, Phase, float, float]
"""What decides a transfer's links and bytes under even load: rank, phase, NIC and scale-up bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class TransferTable:
    """The transfers among the tasks of a table, and the places at which its templates have them.

    `ranks`, `tasks` and `rows` have one entry a place. `moved_of[p]` is the number of its entry in `moved`,
    and `load_of[p]` that of its load among `loads`, which are the durations of one place with that load.
    `task[i]`: the task of transfer i; `place[i]`: its place; `microbatch[i]`: its micro-batch.
    """

    ranks: tuple[int, ...]
    tasks: tuple[CompiledTask, ...]
    rows: tuple[TransferRows, ...]
    moved: tuple[tuple[Moved, TransferCost], ...]
    moved_of: IntArray
    loads: tuple[TransferRows, ...]
    load_of: IntArray
    task: IntArray
    place: IntArray
    microbatch: IntArray

    def each(self, values: Sequence[float] | FloatArray) -> FloatArray:
        """One value a transfer, from one a place."""
        return np.asarray(np.array(values, dtype=np.float64)[self.place])

    def payload_ns(self) -> FloatArray:
        """Payload of the slowest member of every transfer, alone on its links."""
        number, payloads = by_identity([rows.payload_ns for rows in self.rows])
        if not payloads:
            return np.zeros(0)
        values = np.array(payloads, dtype=np.float64)
        return np.asarray(values[number[self.place], self.microbatch])

    def fastest_ns(self) -> IntArray:
        """Compute of the fastest member before every transfer."""
        number, rows = by_identity([task.rows_ns for task in self.tasks])
        if not rows:
            return np.zeros(0, dtype=np.int64)
        values = np.array([fastest_ns(row) for row in rows])
        return np.asarray(values[number[self.place], self.microbatch])

    def launch_ns(self) -> FloatArray:
        """Launch of every transfer."""
        return self.each([rows.launch_ns for rows in self.rows])

    def stream(self) -> IntArray:
        """Number of the stream of every transfer in `TRANSFER_STREAMS`."""
        streams = [TRANSFER_STREAMS.index(task.stream) for task in self.tasks]
        return np.asarray(np.array(streams, dtype=np.int64)[self.place])

    def cost_figure(self, figure: Figure) -> FloatArray:
        """A figure of the payload of every transfer."""
        number, costs = by_identity([rows.cost for rows in self.rows])
        values = [figure(cost, max(cost.nic_s, cost.scale_up_s)) for cost in costs]
        return self.each(np.array(values, dtype=np.float64)[number])


def transfer_table(table: TaskTable) -> TransferTable:
    """The transfers of a program."""
    number = np.full(len(table.of_template), -1)
    ranks: list[int] = []
    tasks: list[CompiledTask] = []
    rows: list[TransferRows] = []
    costs: dict[tuple[int, Phase, int], int] = {}
    moved: dict[Moved, tuple[int, TransferCost]] = {}
    loads: dict[tuple[int, int, int, int], tuple[int, TransferRows]] = {}
    moved_of: list[int] = []
    load_of: list[int] = []
    for rank, code, actions in table.groups:
        template, first = table.actions.codes[code], int(table.first_of_code[code])
        stages = table.actions.stages[actions[0]].tolist()
        for transfer in template.transfers:
            task = template.tasks[transfer]
            own = task.transfer
            assert own is not None
            number[first + transfer] = len(tasks)
            ranks.append(rank)
            tasks.append(task)
            rows.append(own)
            key = (rank, task.phase, id(own.cost))
            if key not in costs:
                what = (rank, task.phase, own.cost.nic_bytes, own.cost.scale_up_bytes)
                costs[key] = moved.setdefault(what, (len(moved), own.cost))[0]
            moved_of.append(costs[key])
            # Places in one block have views of the same loads, or an even load.
            load = (id(own.load.base), len(own.load), stages[task.side], task.block)
            load_of.append(loads.setdefault(load, (len(loads), own))[0])
    place = number[table.template_task]
    at = np.flatnonzero(place >= 0)
    return TransferTable(
        tuple(ranks),
        tuple(tasks),
        tuple(rows),
        tuple((what, cost) for what, (_, cost) in moved.items()),
        np.array(moved_of, dtype=np.int64),
        tuple(own for _, own in loads.values()),
        np.array(load_of, dtype=np.int64),
        at,
        place[at],
        table.microbatch[at],
    )
