"""The actions and tasks of a program as vectors, for code that reads or writes all of them at once (pure)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from moesim.hwmodels.arrays import IntArray
from moesim.simulator.engine.program import CompiledTemplate, PlacedStep, Program


@dataclass(frozen=True, slots=True, eq=False)
class ActionTable:
    """Every action of a program in the order of pipeline ranks, and every task in the order of actions.

    `steps[a]`: the placed step. `rank[a]`: its pipeline rank. `code[a]`: its template in `codes`.
    `stages[a]` and `microbatches[a]`: (forward, backward), -1 where the side is absent. `first_action[r]`:
    first action of rank r, with the number of all actions at the end. `first_task[a]`: number of the first
    task of action a, with the number of all tasks at the end.
    """

    steps: tuple[PlacedStep, ...]
    codes: tuple[CompiledTemplate, ...]
    rank: IntArray
    code: IntArray
    stages: IntArray
    microbatches: IntArray
    first_action: IntArray
    first_task: IntArray

    @property
    def tasks(self) -> int:
        """Number of all tasks."""
        return int(self.first_task[-1])

    def of_code(self) -> Iterator[tuple[CompiledTemplate, IntArray]]:
        """Each template with the numbers of its actions, in the order in which templates appear."""
        order = np.argsort(self.code, kind="stable")
        ends = np.cumsum(np.bincount(self.code, minlength=len(self.codes)))
        begin = 0
        for code, end in zip(self.codes, ends.tolist(), strict=True):
            yield code, order[begin:end]
            begin = end


def action_table(program: Program) -> ActionTable:
    """The table of a program's actions."""
    steps = tuple(step for steps in program.ranks for step in steps)
    numbers: dict[int, int] = {}
    codes: list[CompiledTemplate] = []
    code = np.empty(len(steps), dtype=np.int64)
    for action, step in enumerate(steps):
        number = numbers.setdefault(id(step.code), len(codes))
        if number == len(codes):
            codes.append(step.code)
        code[action] = number
    counts = np.array([len(steps) for steps in program.ranks], dtype=np.int64)
    sizes = np.array([len(found.tasks) for found in codes], dtype=np.int64)
    return ActionTable(
        steps,
        tuple(codes),
        np.repeat(np.arange(len(counts)), counts),
        code,
        np.array([step.stages for step in steps], dtype=np.int64).reshape(-1, 2),
        np.array([step.microbatches for step in steps], dtype=np.int64).reshape(-1, 2),
        np.append(0, np.cumsum(counts)),
        np.append(0, np.cumsum(sizes[code] if len(steps) else sizes[:0])),
    )
