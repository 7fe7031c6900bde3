"""Step times in closed form, over arrays of plans: actions along the schedule's longest path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moesim.simulator.chunk import OverlapOrder
from moesim.simulator.cost.table import CostTable, SyncCost
from moesim.simulator.layout.stages import StageAssignment
from moesim.simulator.model.operator import BlockKind
from moesim.simulator.planner.actions import ActionBook, ActionTimes
from moesim.simulator.planner.pattern import Key, Order, Pattern
from moesim.simulator.planner.spread import Spread

Array = npt.NDArray[np.float64]

MOST_BYTES = 64_000_000
"""Memory for the table of times of one replay; more plans go in several."""


@dataclass(frozen=True, slots=True)
class Priced:
    """A plan with its prices, ready to be replayed."""

    microbatches: int
    table: CostTable
    spread: Spread
    send_s: float
    sync: tuple[SyncCost, ...]


def step_seconds(
    plans: Sequence[Priced], pattern: Pattern, assignment: StageAssignment, order: OverlapOrder
) -> Array:
    """Seconds of a step of every plan (docs/model.md, eq. P2).

    The plans share schedule, stages and the phases of their blocks. The longest path over the schedule of
    a few pipeline fills gives warm-up, steady state and drain; further micro-batches continue it.
    """
    # ZeRO stages 0 to 2 and policies of equal arithmetic differ after the last action only.
    same: dict[tuple[int, int], int] = {}
    row = [same.setdefault((id(p.table), p.microbatches), len(same)) for p in plans]
    first = [plans[row.index(n)] for n in range(len(same))]
    width = max(1, MOST_BYTES // (8 * max(o.rows for o in pattern.orders)))
    parts = [_done(first[n : n + width], pattern, assignment, order) for n in range(0, len(first), width)]
    return _finished(np.concatenate(parts, axis=1)[:, row], pattern, plans)


def _done(
    plans: Sequence[Priced], pattern: Pattern, assignment: StageAssignment, order: OverlapOrder
) -> Array:
    """End of the last action of every rank [ranks, plans]."""
    book = ActionBook([p.table for p in plans], [p.spread for p in plans], order)
    blocks = [[block.kind for block in stage] for stage in assignment.stages]
    send = np.array([p.send_s for p in plans])
    ends = [_replay(sample, book, blocks, send) for sample in pattern.orders]
    count = np.array([p.microbatches for p in plans], dtype=np.float64)
    return np.array([pattern.along(ends[0][r], ends[-1][r], count) for r in range(pattern.pp)])


def _replay(
    order: Order, book: ActionBook, blocks: Sequence[Sequence[BlockKind]], send: Array
) -> list[Array]:
    """End of every rank's last step [ranks][plans]: the longest path, sends included."""
    times: dict[Key, ActionTimes] = {}
    rows = np.empty((order.rows, len(send)))
    zero = np.zeros(len(send))
    for op in order.ops:
        action = times.get(op.key)
        if action is None:
            action = times[op.key] = book.times(op.key, blocks)
        start = zero if op.before < 0 else rows[op.before]
        for row in op.waits:
            start = np.maximum(start, rows[row])
        np.add(start, action.whole, out=rows[op.end])
        for row, output in op.outputs:
            out = action.forward_out if output.forward else action.backward_out
            np.add(start, out, out=rows[row])
            if output.crosses:
                rows[row] += send
    return [rows[row] for row in order.last]


def _finished(done: Array, pattern: Pattern, plans: Sequence[Priced]) -> Array:
    """Reduction behind the mirror rank, norm as a barrier, optimizer and gather (eq. E5)."""
    parts = np.array([[(s.reduce_s, s.norm_s, s.optimizer_s, s.gather_s) for s in p.sync] for p in plans])
    ready = [np.max([done[h] for h in pattern.holders[r]], axis=0) for r in range(pattern.pp)]
    meet = np.max([ready[r] + parts[:, r, 0] for r in range(pattern.pp)], axis=0)
    return np.asarray(meet + (parts[:, :, 1] + parts[:, :, 2] + parts[:, :, 3]).max(axis=1))
