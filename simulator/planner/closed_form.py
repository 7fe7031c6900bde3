"""Computes step times in closed form for arrays of plans, along the longest path of their schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moesim.hwmodels.arrays import FloatArray
from moesim.simulator.cost.formulas import SyncParts, end_of_step
from moesim.simulator.cost.table import CostTable, SyncCost
from moesim.simulator.layout.stages import StageAssignment
from moesim.simulator.model.operator import BlockKind
from moesim.simulator.planner.action_times import ActionBook, ActionTimes
from moesim.simulator.planner.member_lag import MemberLag
from moesim.simulator.planner.pattern import Key, Order, Pattern
from moesim.simulator.schedules.template import OverlapOrder

CLOSED_FORM_ERROR = 0.03
"""Relative error against the engine that 95 of 100 closed forms keep (measured by benchmarks/planner.py)."""

MOST_BYTES = 64_000_000
"""Largest table of times of one replay; plans that need more are replayed in several parts."""


@dataclass(frozen=True, slots=True)
class PricedPlan:
    """A plan with all the prices that its replay needs."""

    microbatches: int
    table: CostTable
    spread: MemberLag
    send_s: tuple[float, float]
    """Seconds of a pipeline send alone, and of two that leave together (eq. E7)."""
    sync: tuple[SyncCost, ...]
    ports: tuple[float, float]
    """Bytes/s of a GPU's ports, scale-out and scale-up."""


def step_seconds(
    plans: Sequence[PricedPlan], pattern: Pattern, assignment: StageAssignment, order: OverlapOrder
) -> FloatArray:
    """Step time of every plan, in seconds (docs/model.md, eq. P2).

    The plans share schedule, stages and the phases of their blocks. The longest path through a schedule of
    a few pipeline fills covers warm-up, steady state and drain; it is extrapolated to more micro-batches.
    """
    return step_seconds_by_rank([plans], [0] * pattern.pp, pattern, assignment, order)


def step_seconds_by_rank(
    pools: Sequence[Sequence[PricedPlan]],
    owners: Sequence[int],
    pattern: Pattern,
    assignment: StageAssignment,
    order: OverlapOrder,
) -> FloatArray:
    """Step time of every plan, in seconds, where pipeline rank r pays the prices of pool `owners[r]`.

    `pools[p][i]` is plan i with the prices of pool p. Every hop takes as long as on the slowest pool.
    """
    n = len(pools[0])
    # Plans that differ only in ZeRO stages 0 to 2, or in policies of equal arithmetic, share the replay.
    same: dict[tuple[object, ...], int] = {}
    keys = [(*(id(pool[i].table) for pool in pools), pools[0][i].microbatches) for i in range(n)]
    row = [same.setdefault(key, len(same)) for key in keys]
    first = [row.index(k) for k in range(len(same))]
    width = max(1, MOST_BYTES // (8 * max(o.rows for o in pattern.orders)))
    parts = [
        _done([[pool[i] for i in first[k : k + width]] for pool in pools], owners, pattern, assignment, order)
        for k in range(0, len(first), width)
    ]
    syncs = [[pools[owner][i].sync[rank] for rank, owner in enumerate(owners)] for i in range(n)]
    return _finished(np.concatenate(parts, axis=1)[:, row], pattern, syncs)


def _done(
    pools: Sequence[Sequence[PricedPlan]],
    owners: Sequence[int],
    pattern: Pattern,
    assignment: StageAssignment,
    order: OverlapOrder,
) -> FloatArray:
    """Seconds at which every rank ends its last action [ranks, plans]."""
    books = [
        ActionBook([p.table for p in plans], [p.spread for p in plans], order, plans[0].ports)
        for plans in pools
    ]
    blocks = [[block.kind for block in stage] for stage in assignment.stages]
    send = np.max([[p.send_s for p in plans] for plans in pools], axis=0).T
    ends = [_replay(sample, [books[o] for o in owners], blocks, send) for sample in pattern.orders]
    count = np.array([p.microbatches for p in pools[0]], dtype=np.float64)
    return np.array([pattern.along(ends[0][r], ends[-1][r], count) for r in range(pattern.pp)])


def _replay(
    order: Order, books: Sequence[ActionBook], blocks: Sequence[Sequence[BlockKind]], send: FloatArray
) -> list[FloatArray]:
    """Seconds at which every rank ends its last schedule step [ranks][plans], along the longest path.

    `books` has one entry a rank. `send`: seconds of one send and of two together [2, plans].
    """
    times: dict[tuple[int, Key], ActionTimes] = {}
    rows = np.empty((order.rows, send.shape[1]))
    zero = np.zeros(send.shape[1])
    for op in order.ops:
        book = books[op.rank]
        action = times.get((id(book), op.key))
        if action is None:
            action = times[id(book), op.key] = book.times(op.key, blocks)
        start = zero if op.before < 0 else rows[op.before]
        for row in op.waits:
            start = np.maximum(start, rows[row])
        np.add(start, action.whole, out=rows[op.end])
        for row, output in op.outputs:
            out = action.forward_out if output.forward else action.backward_out
            np.add(start, action.whole if order.awaits_sends else out, out=rows[row])
            if output.crossing:
                rows[row] += send[output.crossing - 1]
        if op.awaited:
            rows[op.end] += send[op.awaited - 1]
    return [rows[row] for row in order.last]


def _finished(done: FloatArray, pattern: Pattern, syncs: Sequence[Sequence[SyncCost]]) -> FloatArray:
    """Add the end of the step (eq. E5): reduction with the mirror rank, norm barrier, optimizer, gather."""
    costs = np.array([[(s.reduce_s, s.norm_s, s.optimizer_s, s.gather_s) for s in sync] for sync in syncs])
    parts = [SyncParts(*costs[:, rank].T) for rank in range(pattern.pp)]
    times = end_of_step(list(done), pattern.holders, parts, np.maximum.reduce)
    return np.asarray(np.max([time.gathered for time in times], axis=0))
