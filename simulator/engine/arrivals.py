"""When members arrive at the barriers of transfers, for all passes of a template at once (pure)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moesim.hwmodels.arrays import IntArray
from moesim.simulator.engine.program import CompiledTemplate
from moesim.simulator.engine.records import Execution


def inputs_ready_ns(
    execution: Execution, code: CompiledTemplate, actions: IntArray, transfers: Sequence[int]
) -> IntArray:
    """When each member had all that transfers wait for [transfers, actions, members], in nanoseconds.

    `actions` run the template `code`; `transfers` are positions in it. The small kernels before a transfer
    follow. No task ends before its action starts, so the start matters only to transfers without inputs.
    """
    times, first = execution.times, execution.table.first_task[actions]
    waits = [_waits_for(code, transfer) for transfer in transfers]
    ready = np.empty((len(waits), len(actions), times.ends.shape[1]), dtype=np.int64)
    if all(waits):
        np.take(
            times.ends,
            first + np.array([tasks[0] for tasks in waits], dtype=np.int64)[:, None],
            axis=0,
            out=ready,
            mode="clip",
        )
    else:
        for row, tasks in zip(ready, waits, strict=True):
            row[:] = times.ends[first + tasks[0]] if tasks else times.start[actions]
    for more in range(1, max(map(len, waits), default=0)):
        waiting = [row for row, tasks in enumerate(waits) if len(tasks) > more]
        others = times.ends[first + np.array([waits[row][more] for row in waiting])[:, None]]
        if len(waiting) == len(waits):
            np.maximum(ready, others, out=ready)
        else:
            ready[waiting] = np.maximum(ready[waiting], others)
    return ready


def _waits_for(code: CompiledTemplate, transfer: int) -> tuple[int, ...]:
    """Tasks that must have ended before a transfer: its inputs, and the one before on its stream."""
    before = code.before[transfer]
    return tuple(dict.fromkeys((*code.tasks[transfer].deps, *([] if before is None else [before]))))
