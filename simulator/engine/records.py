"""The protocol of an engine, and what it returns: the times of every task, transfer, send and end of step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.simulator.cost import formulas
from moesim.simulator.cost.formulas import SyncParts
from moesim.simulator.engine.program import NS, ActionTable, CompiledTemplate, Program
from moesim.simulator.engine.task_table import TaskTable, task_table

# -- records ---------------------------------------------------------------------------------------


class Barriers(NamedTuple):
    """How the members reached the barriers of all transfers of a group, in the order of its `ActionTable`.

    `last_member` [tasks]: the member that was ready last, the first of equal ones; -1 for compute tasks.
    `ready_total_ns` [tasks]: when each member was ready, summed over the members; 0 for compute tasks.
    """

    last_member: IntArray
    ready_total_ns: IntArray


class BarrierWaits(NamedTuple):
    """Waits of a group at the barriers of all transfers, over all passes, in nanoseconds.

    `wait_ns` [transfers, members]: of each member for those that were ready later, by transfer of the
    templates in the order of `ActionTable.codes`. `held_up_ns` [pipeline ranks, members]: time in which a
    member alone kept its group waiting, from the arrival of the last but one.
    """

    wait_ns: IntArray
    held_up_ns: IntArray


class ShortTimes(Struct, frozen=True, eq=False, dict=True):
    """Times in nanoseconds [rows, members] that take 32 bits each, read like an array of 64-bit ones.

    `make`: gives them as counted from `base` [rows], when they are read first.
    """

    make: Callable[[], NDArray[np.int32]]
    base: IntArray
    members: int

    @cached_property
    def ticks(self) -> NDArray[np.int32]:
        """The times less those of `base`."""
        return self.make()

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and members."""
        return len(self.base), self.members

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.base)

    def __getitem__(self, key: Any) -> Any:
        """The times at an index of rows, or of rows and members."""
        ticks, base = self.ticks[key], self.base[key[0] if isinstance(key, tuple) else key]
        missing = np.ndim(ticks) - np.ndim(base)
        return ticks + (base.reshape(*base.shape, *(1,) * missing) if missing > 0 else base)


class RecordedTimes(Struct, frozen=True, eq=False):
    """Times of all actions and tasks of a group in nanoseconds, in the order of its `ActionTable`.

    `start`, `end` and `free` [actions, members]: when an action began, when its last task had ended, and when
    the next action may start (later than `end` where the rank waits for its own sends). `ends` [tasks,
    members]: the end of every task. `begins` and `finishes` [tasks]: when the last member reached the barrier
    of a transfer, and when the slowest had its payload; -1 for compute tasks. `barriers` and `waits` follow
    from these (functions `barriers` and `waits`); an engine may give them where it has them anyway.
    """

    start: IntArray
    end: IntArray
    free: IntArray
    ends: IntArray
    """An array, or `ShortTimes`, which reads like one."""
    begins: IntArray
    finishes: IntArray
    barriers: Barriers | None = None
    waits: BarrierWaits | None = None

    @classmethod
    def empty(cls, table: ActionTable, members: int) -> RecordedTimes:
        """Times of nothing yet."""
        actions, tasks = (len(table.steps), members), (table.tasks, members)
        start, end, free, ends = (np.zeros(shape, np.int64) for shape in (actions, actions, actions, tasks))
        return cls(start, end, free, ends, np.zeros(table.tasks, np.int64), np.zeros(table.tasks, np.int64))


class SyncRecord(Struct):
    """End of the step on one pipeline rank, with the begin and end of each part in nanoseconds."""

    ready_ns: int
    reduce: tuple[int, int]
    norm: tuple[int, int]
    optimizer: tuple[int, int]
    gather: tuple[int, int]


class SendRecord(Struct):
    """One pipeline send between ranks, with the begin and end of its payload in nanoseconds."""

    source: int
    target: int
    label: str
    start: int
    end: int


class Execution(Struct, frozen=True, eq=False, dict=True):
    """The execution of one group of a step; `Engine` lists what an engine guarantees for it.

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

    @property
    def events(self) -> int:
        """Number of tasks that ran."""
        return len(self.times.ends)

    @cached_property
    def last_ns(self) -> int:
        """When the last action of the group ended and its rank was free again."""
        return max(free_by_rank(self.table, self.times))


def free_by_rank(table: ActionTable, times: RecordedTimes) -> list[int]:
    """When each pipeline rank was free after its last action, in ns; 0 for a rank without actions."""
    bounds = pairwise(table.first_action.tolist())
    return [int(times.free[end - 1].max()) if end > begin else 0 for begin, end in bounds]


def step_time_s(executions: Sequence[Execution]) -> float:
    """Seconds of the step, which all groups run together."""
    return executions[0].end_ns / NS


def last_group(executions: Sequence[Execution]) -> Execution:
    """The execution of the group whose last action ended last; of equal ones the first."""
    return max(executions, key=lambda execution: execution.last_ns)


# -- arrivals at barriers --------------------------------------------------------------------------


def inputs_ready_ns(
    execution: Execution, code: CompiledTemplate, actions: IntArray, transfers: Sequence[int]
) -> IntArray:
    """When each member had all that transfers wait for [transfers, actions, members], in nanoseconds.

    `actions` run the template `code`; `transfers` are positions in it. The small kernels before a transfer
    follow. No task ends before its action starts, so the start matters only to transfers without inputs.
    """
    times, first = execution.times, execution.table.first_task[actions]
    ready = np.empty((len(transfers), len(actions), times.ends.shape[1]), dtype=np.int64)
    for row, transfer in zip(ready, transfers, strict=True):
        # Tasks that must have ended before a transfer: its inputs, and the one before on its stream.
        before = code.before[transfer]
        tasks = tuple(dict.fromkeys((*code.tasks[transfer].deps, *([] if before is None else [before]))))
        row[:] = times.ends[first + tasks[0]] if tasks else times.start[actions]
        for task in tasks[1:]:
            np.maximum(row, times.ends[first + task], out=row)
    return ready


def barriers(execution: Execution) -> Barriers:
    """How the members reached the barriers of the transfers of a group: as recorded, or from its times."""
    if execution.times.barriers is not None:
        return execution.times.barriers
    tasks = execution.table.tasks
    last, total = np.full(tasks, -1), np.zeros(tasks, dtype=np.int64)
    for at, _, ready in _ready_ns(execution):
        last[at], total[at] = ready.argmax(axis=2), ready.sum(axis=2)
    return Barriers(last, total)


def waits(execution: Execution) -> BarrierWaits:
    """What the members of a group waited at barriers: as recorded, or from its times."""
    if execution.times.waits is not None:
        return execution.times.waits
    members, wait = execution.program.members, [np.zeros((0, execution.program.members), dtype=np.int64)]
    held_up = np.zeros((len(execution.program.ranks), members), dtype=np.int64)
    for at, rank, ready in _ready_ns(execution):
        meet = execution.times.begins[at]
        wait.append(meet.sum(axis=1)[:, None] - ready.sum(axis=1))
        if members > 1:
            last = ready.argmax(axis=2)
            np.put_along_axis(ready, last[..., None], -1, axis=2)
            np.add.at(held_up[rank], last, meet - ready.max(axis=2))
    return BarrierWaits(np.concatenate(wait), held_up)


def _ready_ns(execution: Execution) -> Iterator[tuple[IntArray, int, IntArray]]:
    """(tasks [transfers, actions], pipeline rank, when each member is ready [transfers, actions, members]) of
    the transfers of each template."""
    table = execution.table
    for code, actions in table.of_code():
        if code.transfers:
            ready = inputs_ready_ns(execution, code, actions, code.transfers)
            for row, transfer in zip(ready, code.transfers, strict=True):
                task = code.tasks[transfer]
                row += task.rows_ns[table.microbatches[actions, task.side]]
            at = table.first_task[actions] + np.array(code.transfers)[:, None]
            yield at, int(table.rank[actions[0]]), ready


# -- the end of the step ---------------------------------------------------------------------------


def end_of_step(
    programs: Sequence[Program], free_ns: Sequence[Sequence[int]]
) -> tuple[list[SyncRecord], int]:
    """The end of the step on every pipeline rank, and the nanosecond at which the step ends (eq. E5).

    `free_ns[group][r]`: when pipeline rank r of each program was free after its last action. A rank's
    reduction waits for all groups of all ranks that hold the same parameters (in a bidirectional schedule
    also the mirror rank); gradient clipping makes the norm a barrier of all ranks.
    """
    schedule, sync = programs[0].schedule, programs[0].costs.sync
    done = [max(group[r] for group in free_ns) for r in range(schedule.pp)]
    slow = [max(program.link_map.sync_slowness(r) for program in programs) for r in range(schedule.pp)]
    parts = [
        SyncParts(
            round(cost.reduce_s * slower * NS),
            round(cost.norm_s * NS),
            round(cost.optimizer_s * NS),
            round(cost.gather_s * slower * NS),
        )
        for cost, slower in zip(sync, slow, strict=True)
    ]
    holders = [schedule.holders(r) for r in range(schedule.pp)]
    result = [
        SyncRecord(end, (t.ready, t.reduced), (t.meet, t.norm), (t.norm, t.updated), (t.updated, t.gathered))
        for end, t in zip(done, formulas.end_of_step(done, holders, parts, max), strict=True)
    ]
    return result, max((s.gather[1] for s in result), default=0)


# -- the protocol ----------------------------------------------------------------------------------


class Engine(Protocol):
    """Runs the programs of all groups of a step together.

    An engine decides how tasks, transfers and sends share the cluster's links; the program states their
    durations and order. Everything that reads an execution relies on these promises:

    - The executions come in the order of the programs, and each has the times of every placed step, in the
      order of its `ActionTable`. The tasks of a step start in template order, each on its stream (compute or
      communication), after the tasks that it depends on (docs/model.md, eq. E1).
    - A transfer is a barrier: `begins` is when its last member was ready, and no member has its payload
      before `begins` + launch + its own payload alone on its links (eq. E2).
    - A step starts when its rank is free and its activation and gradient have arrived (eqs. E4 and E7).
    - `syncs`, `end_ns` and `carried_bytes` are the same in all executions; `end_of_step` computes the first
      two from the records.
    - Equal programs give equal executions.

    With links that are never full, every engine returns the longest path through the tasks
    (docs/model.md, section "Engine"); the tests hold each registered engine to that.
    """

    @property
    def name(self) -> str:
        """Name of the engine in `ENGINES`."""

    def execute(self, programs: Sequence[Program]) -> list[Execution]:
        """Run the programs, one a group, and return what happened to each.

        All programs follow one schedule on the links of one cluster. Raises RuntimeError where ranks wait
        for each other forever, which a validated schedule cannot cause.
        """
