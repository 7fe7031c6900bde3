"""The tasks inside actions as events on their streams, for all actions of a template at once (pure)."""

from __future__ import annotations

import numpy as np

from moesim.hwmodels.arrays import IntArray
from moesim.simulator.engine.program import NS, CompiledTask, CompiledTemplate
from moesim.simulator.engine.records import Execution
from moesim.simulator.predict.event_list import EventList
from moesim.simulator.predict.trace_events import COMMUNICATION, COMPUTE, INSIDE, SHARDING


def add_tasks(found: EventList, execution: Execution, member: int) -> None:
    """Add every task of a member of each pipeline rank.

    A compute task ends with its exposed collectives. A transfer begins with its small kernels and the wait
    for the other members.
    """
    table = execution.table
    for code, actions in table.of_code():
        for number, task in enumerate(code.tasks):
            at = table.first_task[actions] + number
            end = execution.times.ends[at, member]
            own_ns = task.rows_ns[table.microbatches[actions, task.side], member]
            if task.transfer is None:
                _add_compute(found, task, number, table.rank[actions], actions, end, own_ns)
            else:
                ready = _ready_ns(execution, code, number, actions, member) + own_ns
                launch = np.minimum(end, execution.times.begins[at] + task.transfer.launch_ns)
                _add_transfer(
                    found, task, number, table.rank[actions], actions, (ready - own_ns, ready, launch, end)
                )


def _add_compute(
    found: EventList,
    task: CompiledTask,
    number: int,
    rank: IntArray,
    actions: IntArray,
    end: IntArray,
    own_ns: IntArray,
) -> None:
    waits = np.minimum(own_ns, round(task.price.exposed_s * NS))
    found.add(COMPUTE, task.phase, rank, end - own_ns, end - waits, actions, number, task.block)
    found.add(INSIDE, task.phase, rank, end - waits, end, actions, number, task.block)


def _add_transfer(
    found: EventList,
    task: CompiledTask,
    number: int,
    rank: IntArray,
    actions: IntArray,
    times: tuple[IntArray, IntArray, IntArray, IntArray],
) -> None:
    """Add the small kernels, the wait and the payload of a transfer; `times` bound them."""
    begin, ready, launch, end = times
    stream = SHARDING if task.stream == "sharding" else COMMUNICATION
    found.add(stream, f"prepare {task.phase}", rank, begin, ready, actions, number, task.block)
    found.add(stream, f"wait for {task.phase}", rank, ready, launch, actions, number, task.block)
    found.add(stream, task.phase, rank, launch, end, actions, number, task.block)


def _ready_ns(
    execution: Execution, code: CompiledTemplate, number: int, actions: IntArray, member: int
) -> IntArray:
    """When a member can begin a transfer: its stream is free, and its inputs are there."""
    first, before = execution.table.first_task[actions], code.before[number]
    ready = execution.times.start[actions, member]
    for task in (*code.tasks[number].deps, *([] if before is None else [before])):
        ready = np.maximum(ready, execution.times.ends[first + task, member])
    return np.asarray(ready)
