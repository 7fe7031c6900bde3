"""Every task of a program as vectors (pure)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.simulator.cost.table import PhaseCost
from moesim.simulator.engine.action_table import ActionTable, action_table
from moesim.simulator.engine.figures import Figure, by_identity
from moesim.simulator.engine.member_durations import slowest_ns
from moesim.simulator.engine.program import CompiledTask, Program
from moesim.simulator.engine.transfer_table import TransferTable, transfer_table


@dataclass(frozen=True, eq=False)
class TaskTable:
    """The tasks of a program in the order of its `ActionTable`, which is that of `ActionTimes.ends`.

    The tasks of all templates, one template after another, are its template tasks: `of_template[i]` is
    template task i, and `first_of_code[c]` the first one of template c of `actions.codes`.
    """

    program: Program
    actions: ActionTable
    of_template: tuple[CompiledTask, ...]
    first_of_code: IntArray

    @cached_property
    def action(self) -> IntArray:
        """The action of every task."""
        return np.repeat(np.arange(len(self.actions.steps)), np.diff(self.actions.first_task))

    @cached_property
    def template_task(self) -> IntArray:
        """The template task of every task."""
        shift = self.first_of_code[self.actions.code] - self.actions.first_task[:-1]
        return np.arange(self.actions.tasks) + shift[self.action]

    @cached_property
    def side(self) -> IntArray:
        """The side of every task: 0 forward, 1 backward."""
        sides = np.array([task.side for task in self.of_template], dtype=np.int64)
        return np.asarray(sides[self.template_task])

    @cached_property
    def microbatch(self) -> IntArray:
        """The micro-batch of every task."""
        return np.asarray(self.actions.microbatches[self.action, self.side])

    @cached_property
    def slowest_ns(self) -> IntArray:
        """Compute in nanoseconds of the slowest member of every task."""
        number, rows = by_identity([task.rows_ns for task in self.of_template])
        if not rows:
            return np.zeros(0, dtype=np.int64)
        slowest = np.array([slowest_ns(row) for row in rows])
        return np.asarray(slowest[number[self.template_task], self.microbatch])

    @cached_property
    def groups(self) -> tuple[tuple[int, int, IntArray], ...]:
        """(pipeline rank, template, actions) of each template of a rank, in the order of their first use."""
        table = self.actions
        key = table.rank * len(table.codes) + table.code
        order = np.argsort(key, kind="stable")
        bounds = np.flatnonzero(np.diff(key[order], prepend=-1)).tolist()
        parts = [order[begin:end] for begin, end in pairwise([*bounds, len(order)])]
        parts.sort(key=lambda part: int(part[0]))
        return tuple((int(table.rank[part[0]]), int(table.code[part[0]]), part) for part in parts)

    @cached_property
    def transfers(self) -> TransferTable:
        """The transfers among the tasks."""
        return transfer_table(self)

    def price_figure(self, figure: Figure) -> FloatArray:
        """A figure of the compute of every template task."""
        number, prices = self._prices
        return np.array([figure(price, price.fixed_s + price.row_s) for price in prices])[number]

    @cached_property
    def _prices(self) -> tuple[IntArray, list[PhaseCost]]:
        return by_identity([task.price for task in self.of_template])

    def compute_tasks(self, group: tuple[int, int, IntArray]) -> Iterator[tuple[int, CompiledTask]]:
        """(template task, task) of the tasks of a group's template that are no transfers."""
        first = int(self.first_of_code[group[1]])
        tasks = enumerate(self.actions.codes[group[1]].tasks, start=first)
        return ((number, task) for number, task in tasks if task.transfer is None)


def task_table(program: Program, actions: ActionTable | None = None) -> TaskTable:
    """The tasks of a program; `actions`: its action table, where it exists already."""
    actions = action_table(program) if actions is None else actions
    sizes = np.array([len(code.tasks) for code in actions.codes], dtype=np.int64)
    tasks = tuple(task for code in actions.codes for task in code.tasks)
    return TaskTable(program, actions, tasks, np.append(0, np.cumsum(sizes)))
