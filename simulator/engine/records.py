"""The records that an engine returns: the times of every task, transfer, send and end of step of a program.

Times are integer nanoseconds from the start of the step; vectors have one value a member. An execution holds
them as arrays over all actions and tasks (`RecordedTimes`, in the order of `ActionTable`); `Execution.ranks`
shows the same numbers action by action. This module names no engine, so code that reads an execution works
with every engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.simulator.engine.action_table import ActionTable
from moesim.simulator.engine.durations import NS
from moesim.simulator.engine.program import PlacedStep, Program
from moesim.simulator.engine.task_table import TaskTable, task_table


class Barriers(NamedTuple):
    """How the members reached the barriers of all transfers of a group, in the order of its `ActionTable`.

    `last_member` [tasks]: the member that was ready last, the first of equal ones; -1 for compute tasks.
    `ready_total_ns` [tasks]: when each member was ready, summed over the members; 0 for compute tasks.
    """

    last_member: IntArray
    ready_total_ns: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class RecordedTimes:
    """Times of all actions and tasks of a group in nanoseconds, in the order of its `ActionTable`.

    `start`, `end` and `free` [actions, members] and `ends` [tasks, members] mean what they mean in a
    `StepRecord`, as do `begins` and `finishes` [tasks], which are -1 for compute tasks. `barriers`
    follow from these (`engine/arrivals.py`); an engine may give them where it has them anyway.
    """

    start: IntArray
    end: IntArray
    free: IntArray
    ends: IntArray
    begins: IntArray
    finishes: IntArray
    barriers: Barriers | None = None


@dataclass(slots=True)
class StepRecord:
    """Times of one schedule step in nanoseconds, one value a member."""

    step: PlacedStep
    start: IntArray
    end: IntArray
    """When the last task of the action had ended."""
    free: IntArray
    """When the next action may start, which is later than `end` where the rank waits for its own sends."""
    ends: list[IntArray]
    """End of every task of the template."""
    begins: list[int]
    """When the last member reached the barrier of each transfer; -1 for compute tasks."""
    finishes: list[int]
    """When the slowest member had its payload; -1 for compute tasks."""


@dataclass(slots=True)
class SyncRecord:
    """End of the step on one pipeline rank, with the begin and end of each part in nanoseconds."""

    ready_ns: int
    reduce: tuple[int, int]
    norm: tuple[int, int]
    optimizer: tuple[int, int]
    gather: tuple[int, int]


@dataclass(slots=True)
class SendRecord:
    """One pipeline send between ranks, with the begin and end of its payload in nanoseconds."""

    source: int
    target: int
    label: str
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class Execution:
    """The execution of one group of a step; `engine/protocol.py` lists what an engine guarantees for it.

    `table`: the actions and tasks of the program. `times`: when every action and task began and ended.
    `syncs[r]`: the end of the step on pipeline rank r. `sends`: every pipeline send between ranks, in the
    order of their ends. `carried_bytes`: bytes on each link of the cluster. `end_ns`, `syncs` and
    `carried_bytes` cover all groups together.
    """

    program: Program
    table: ActionTable
    times: RecordedTimes
    syncs: list[SyncRecord]
    sends: Sequence[SendRecord]
    end_ns: int
    carried_bytes: FloatArray

    @cached_property
    def tasks(self) -> TaskTable:
        """The tasks of `table` as vectors."""
        return task_table(self.program, self.table)

    @cached_property
    def ranks(self) -> list[list[StepRecord]]:
        """One record for every step of `program.ranks[r]`, in that order."""
        records = step_records(self.table, self.times)
        bounds = self.table.first_action.tolist()
        return [records[begin:end] for begin, end in pairwise(bounds)]

    @property
    def events(self) -> int:
        """Number of tasks that ran."""
        return len(self.times.ends)

    @property
    def free_ns(self) -> list[int]:
        """When each pipeline rank was free after its last action; 0 for a rank without actions."""
        bounds = self.table.first_action.tolist()
        return [int(self.times.free[end - 1].max()) if end > begin else 0 for begin, end in pairwise(bounds)]

    @cached_property
    def last_ns(self) -> int:
        """When the last action of the group ended and its rank was free again."""
        return max(self.free_ns)


def step_records(table: ActionTable, times: RecordedTimes) -> list[StepRecord]:
    """The times of every action as a record of its own, whose vectors are views of `times`."""
    bounds = table.first_task.tolist()
    begins, finishes = times.begins.tolist(), times.finishes.tolist()
    ends = list(times.ends)
    rows = zip(table.steps, times.start, times.end, times.free, bounds, bounds[1:], strict=False)
    return [
        StepRecord(step, start, end, free, ends[a:b], begins[a:b], finishes[a:b])
        for step, start, end, free, a, b in rows
    ]


def recorded_times(records: Sequence[Sequence[StepRecord]], members: int) -> RecordedTimes:
    """The arrays of an execution from the records of every pipeline rank."""
    flat = [record for rank in records for record in rank]

    def rows(vectors: list[IntArray]) -> IntArray:
        return np.array(vectors, dtype=np.int64).reshape(-1, members)

    return RecordedTimes(
        rows([record.start for record in flat]),
        rows([record.end for record in flat]),
        rows([record.free for record in flat]),
        rows([end for record in flat for end in record.ends]),
        np.array([begin for record in flat for begin in record.begins], dtype=np.int64),
        np.array([finish for record in flat for finish in record.finishes], dtype=np.int64),
    )


def free_ns(records: Sequence[StepRecord]) -> int:
    """When a pipeline rank was free after its last action; 0 for a rank without actions."""
    return int(records[-1].free.max()) if records else 0


def step_time_s(executions: Sequence[Execution]) -> float:
    """Seconds of the step, which all groups run together."""
    return executions[0].end_ns / NS


def last_group(executions: Sequence[Execution]) -> Execution:
    """The execution of the group whose last action ended last; of equal ones the first."""
    return max(executions, key=lambda execution: execution.last_ns)
