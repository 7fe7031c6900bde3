"""Every task of a program as vectors, with what its members need together (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from moesim.hwmodels.arrays import IntArray
from moesim.simulator.engine.action_table import ActionTable, action_table
from moesim.simulator.engine.program import CompiledTask, Program


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
        """The number of every task's template task."""
        shift = self.first_of_code[self.actions.code] - self.actions.first_task[:-1]
        return np.arange(self.actions.tasks) + shift[self.action]

    @cached_property
    def side(self) -> IntArray:
        """The side of every task: 0 forward, 1 backward."""
        return np.array([task.side for task in self.of_template], dtype=np.int64)[self.template_task]

    @cached_property
    def microbatch(self) -> IntArray:
        """The micro-batch of every task."""
        return self.actions.microbatches[self.action, self.side]

    @cached_property
    def slowest_ns(self) -> IntArray:
        """Compute in nanoseconds of the slowest member of every task."""
        return self.at_tasks(*over_members(self.of_template, np.maximum))

    def at_tasks(self, number: IntArray, rows: IntArray) -> IntArray:
        """Values of all tasks from rows [rows, micro-batches], of which `number` has one a template task."""
        return np.asarray(rows[number[self.template_task], self.microbatch])

    def groups(self) -> Iterator[tuple[int, int, IntArray]]:
        """(pipeline rank, template number, actions) of each template of a rank, in the order of first use."""
        table = self.actions
        key = table.rank * len(table.codes) + table.code
        order = np.argsort(key, kind="stable")
        bounds = np.flatnonzero(np.diff(key[order], prepend=-1)).tolist()
        parts = [order[begin:end] for begin, end in pairwise([*bounds, len(order)])]
        for actions in sorted(parts, key=lambda part: int(part[0])):
            yield int(table.rank[actions[0]]), int(table.code[actions[0]]), actions


def task_table(program: Program, actions: ActionTable | None = None) -> TaskTable:
    """The tasks of a program; `actions`: its action table, where it exists already."""
    actions = action_table(program) if actions is None else actions
    sizes = np.array([len(code.tasks) for code in actions.codes], dtype=np.int64)
    tasks = tuple(task for code in actions.codes for task in code.tasks)
    return TaskTable(program, actions, tasks, np.append(0, np.cumsum(sizes)))


def over_members(tasks: Sequence[CompiledTask], reduce: np.ufunc) -> tuple[IntArray, IntArray]:
    """(number of the row of every task, rows) of the tasks' durations, reduced over the members.

    The rows are [rows, micro-batches]; tasks that share their durations share a row.
    """
    number: dict[int, int] = {}
    rows: list[IntArray] = []
    numbers = []
    for task in tasks:
        at = number.setdefault(id(task.rows_ns), len(rows))
        if at == len(rows):
            rows.append(reduce.reduce(task.rows_ns, axis=1))
        numbers.append(at)
    return np.array(numbers, dtype=np.int64), np.array(rows, dtype=np.int64)
