"""When members arrive at the barriers of transfers, for all passes of a template at once (pure)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moesim.hwmodels.arrays import IntArray
from moesim.simulator.engine.program import CompiledTemplate
from moesim.simulator.engine.records import Barriers, Execution


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
        tasks = _waits_for(code, transfer)
        if not tasks:
            row[:] = times.start[actions]
        for at, task in enumerate(tasks):
            if at == 0:
                times.ends.take(first + task, axis=0, out=row, mode="clip")
            else:
                np.maximum(row, times.ends.take(first + task, axis=0), out=row)
    return ready


def barriers(execution: Execution) -> Barriers:
    """How the members reached the barriers of the transfers of a group: as recorded, or from its times."""
    if execution.times.barriers is not None:
        return execution.times.barriers
    table, tasks = execution.table, execution.table.tasks
    last, total = np.full(tasks, -1), np.zeros(tasks, dtype=np.int64)
    for code, actions in table.of_code():
        if code.transfers:
            at = table.first_task[actions] + np.array(code.transfers)[:, None]
            ready = inputs_ready_ns(execution, code, actions, code.transfers)
            for row, transfer in zip(ready, code.transfers, strict=True):
                task = code.tasks[transfer]
                row += task.rows_ns[table.microbatches[actions, task.side]]
            last[at], total[at] = ready.argmax(axis=2), ready.sum(axis=2)
    return Barriers(last, total)


def _waits_for(code: CompiledTemplate, transfer: int) -> tuple[int, ...]:
    """Tasks that must have ended before a transfer: its inputs, and the one before on its stream."""
    before = code.before[transfer]
    return tuple(dict.fromkeys((*code.tasks[transfer].deps, *([] if before is None else [before]))))
