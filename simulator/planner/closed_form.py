"""Computes step times in closed form for arrays of plans, along the longest path of their schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from moesim.hwmodels.arrays import FloatArray
from moesim.simulator.cost.formulas import SyncParts, end_of_step
from moesim.simulator.cost.table import CostTable, SyncCost
from moesim.simulator.layout.stages import StageAssignment
from moesim.simulator.planner.action_times import ActionBook
from moesim.simulator.planner.member_lag import MemberLag
from moesim.simulator.planner.pattern import Pattern
from moesim.simulator.planner.replay import ActionTimes, Key, replay
from moesim.simulator.schedules.template import OverlapOrder, Template

CLOSED_FORM_ERROR = 0.03
"""Relative error against the engine that 95 of 100 closed forms keep (lab/benchmarks/planner.py)."""

MOST_BYTES = 64_000_000
"""Largest table of times of one replay; plans that need more are replayed in several parts."""


@dataclass(frozen=True, slots=True)
class PricedPlan:
    """A plan with all the prices that its replay needs."""

    microbatches: int
    stages: StageAssignment
    table: CostTable
    spread: MemberLag
    send_s: tuple[float, float]
    """Seconds of a pipeline send alone, and of two that leave together (eq. E7)."""
    sync: tuple[SyncCost, ...]
    ports: tuple[float, float]
    """Bytes/s of a GPU's ports, scale-out and scale-up."""


ReplayKey = tuple[object, ...]
"""What decides a replay: tables and lag of every pool, stages and number of micro-batches."""


@dataclass(slots=True)
class Replays:
    """Replays of one pattern that plans share, kept from one call to the next.

    Plans that differ only in ZeRO stages 0 to 2, or in policies of equal arithmetic, share a replay.
    """

    done: dict[ReplayKey, FloatArray] = field(default_factory=dict)
    """Seconds at which every rank ends its last action [ranks]."""
    ends: dict[int, tuple[tuple[SyncCost, ...], FloatArray]] = field(default_factory=dict)
    """Costs of the end of the step, and the same as an array [ranks, parts]; by the id of the former."""
    templates: dict[object, Template] = field(default_factory=dict)
    """Templates of the actions, by action and phases."""
    _kept: list[Sequence[PricedPlan]] = field(default_factory=list)
    """A plan of every replay: its objects must stay alive while their ids are keys."""

    def add(self, key: ReplayKey, plans: Sequence[PricedPlan], done: FloatArray) -> None:
        """Keep a replay; `plans`: one of its plans at the prices of every pool."""
        self.done[key] = done
        self._kept.append(plans)

    def end(self, sync: tuple[SyncCost, ...]) -> FloatArray:
        """Costs of the end of the step [ranks, (reduction, norm, optimizer, gather)]."""
        known = self.ends.get(id(sync))
        if known is None:
            costs = np.array([(s.reduce_s, s.norm_s, s.optimizer_s, s.gather_s) for s in sync])
            known = self.ends[id(sync)] = sync, costs
        return known[1]


def step_seconds(
    plans: Sequence[PricedPlan], pattern: Pattern, order: OverlapOrder, replays: Replays | None = None
) -> FloatArray:
    """Step time of every plan, in seconds (docs/model.md, eq. P2).

    The plans share the schedule. The longest path through a schedule of a few pipeline fills covers warm-up,
    steady state and drain; it is extrapolated to more micro-batches. `replays`: those of earlier calls with
    the same pattern and order, to which new ones are added.
    """
    return step_seconds_by_rank([plans], [0] * pattern.pp, pattern, order, replays)


def step_seconds_by_rank(
    pools: Sequence[Sequence[PricedPlan]],
    owners: Sequence[int],
    pattern: Pattern,
    order: OverlapOrder,
    replays: Replays | None = None,
) -> FloatArray:
    """Step time of every plan, in seconds, where pipeline rank r pays the prices of pool `owners[r]`.

    `pools[p][i]` is plan i with the prices of pool p. Every hop takes as long as on the slowest pool.
    """
    replays = Replays() if replays is None else replays
    plans = list(zip(*pools, strict=True))
    keys = [_replay_key(plan) for plan in plans]
    missing = {key: plan for key, plan in zip(keys, plans, strict=True) if key not in replays.done}
    todo = list(missing.items())
    width = max(1, MOST_BYTES // (8 * max(o.rows for o in pattern.orders)))
    for first in range(0, len(todo), width):
        part = todo[first : first + width]
        done = _done([plan for _, plan in part], owners, pattern, order, replays.templates)
        for (key, plan), column in zip(part, done, strict=True):
            replays.add(key, plan, column)
    ends: dict[int, int] = {}
    columns: list[FloatArray] = []
    which = np.empty((len(pools), len(plans)), dtype=np.int64)
    for n, plan in enumerate(plans):
        for pool, priced in enumerate(plan):
            place = ends.setdefault(id(priced.sync), len(columns))
            if place == len(columns):
                columns.append(replays.end(priced.sync))
            which[pool, n] = place
    costs = np.array(columns)
    by_rank = [costs[which[owner], rank] for rank, owner in enumerate(owners)]
    return _finished(np.array([replays.done[key] for key in keys]).T, pattern, by_rank)


def _replay_key(plan: Sequence[PricedPlan]) -> ReplayKey:
    first = plan[0]
    return (*(id(p.table) for p in plan), *(p.spread for p in plan), id(first.stages), first.microbatches)


def _done(
    plans: Sequence[Sequence[PricedPlan]],
    owners: Sequence[int],
    pattern: Pattern,
    order: OverlapOrder,
    templates: dict[object, Template],
) -> FloatArray:
    """Seconds at which every rank ends its last action [plans, ranks]; `plans[i][p]` is plan i in pool p."""
    alike: dict[tuple[int, frozenset[object]], list[int]] = {}
    for n, plan in enumerate(plans):
        alike.setdefault((id(plan[0].stages), frozenset(plan[0].table.transfer)), []).append(n)
    used = order if pattern.paired else None
    parts = [_Part([plans[n] for n in numbers], used, templates) for numbers in alike.values()]
    sorted_ = [n for numbers in alike.values() for n in numbers]

    def times(pool: int, key: Key) -> ActionTimes:
        each = [part.times(pool, key) for part in parts]
        if len(each) == 1:
            return each[0]
        names = ("whole", "forward_out", "backward_out")
        return ActionTimes(*(np.concatenate([getattr(one, name) for one in each]) for name in names))

    chosen = [plans[n] for n in sorted_]
    send = np.array([np.max([priced.send_s for priced in plan], axis=0) for plan in chosen]).T
    pool_of_rank = np.array(owners, dtype=np.int64)
    ends = [replay(sample, times, pool_of_rank, send) for sample in pattern.orders]
    count = np.array([plan[0].microbatches for plan in chosen], dtype=np.float64)
    done = np.empty((len(plans), pattern.pp))
    by_rank = zip(ends[0], ends[-1], strict=True)
    done[sorted_] = np.array([pattern.along(short, long, count) for short, long in by_rank]).T
    return done


class _Part:
    """Action times of plans whose stages and phases are the same, by pool."""

    def __init__(
        self,
        plans: Sequence[Sequence[PricedPlan]],
        order: OverlapOrder | None,
        templates: dict[object, Template],
    ) -> None:
        self._books = []
        for priced in zip(*plans, strict=True):
            tables, spreads = [p.table for p in priced], [p.spread for p in priced]
            self._books.append(ActionBook(tables, spreads, order, priced[0].ports, templates))
        self._blocks = [[block.kind for block in stage] for stage in plans[0][0].stages.stages]

    def times(self, pool: int, key: Key) -> ActionTimes:
        return self._books[pool].times(key, self._blocks)


def _finished(done: FloatArray, pattern: Pattern, costs: Sequence[FloatArray]) -> FloatArray:
    """Add the end of the step (eq. E5): reduction with the mirror rank, norm barrier, optimizer, gather.

    `done`: [ranks, plans]; `costs`: those of the end of the step on each rank [plans, parts].
    """
    parts = [SyncParts(*own.T) for own in costs]
    times = end_of_step(list(done), pattern.holders, parts, np.maximum.reduce)
    return np.asarray(np.max([time.gathered for time in times], axis=0))
