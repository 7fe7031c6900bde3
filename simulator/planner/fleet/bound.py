"""Lower bounds of a fleet's step time, before the layout is known and for a given layout (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import fsum, inf, sqrt

import numpy as np

from moesim.simulator.layout.groups import members_per_program
from moesim.simulator.layout.stages import StageAssignment, blocks_of
from moesim.simulator.model.operator import BlockKind
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.planner.block_seconds import ACTIONS
from moesim.simulator.planner.bound import ACTIONS_OF, STANDARD_ERRORS, BoundBook
from moesim.simulator.planner.frames import Frame
from moesim.simulator.planner.replay import Key

Blocks = dict[BlockKind, int]


class PoolSeconds:
    """Seconds of the actions of a plan's stages on one pool, with even transfers."""

    def __init__(self, book: BoundBook, frame: Frame, recipe: int, policy: int) -> None:
        """`recipe` and `policy` are positions in the book's lists."""
        self.kinds, self.routed = book.book.kinds, book.book.routed
        kept = book.least_kept(frame)
        self.compute = book.compute(frame.plan, kept)[recipe, book.class_of[policy]]
        self.moved = book.transfer(frame.plan, kept)[recipe, 0]
        self.weights = {
            kind: float(w)
            for kind, w in zip(
                self.kinds, book.weights(frame.plan)[recipe, book.class_of[policy]], strict=True
            )
        }

    def work(self, uses: Sequence[str], blocks: Blocks) -> tuple[float, float]:
        """Seconds (compute, small kernels and transfers) of actions of some blocks, each run alone."""
        work, moved = [0.0], [0.0]
        for use in uses:
            n = ACTIONS.index(use)
            for kind, count in blocks.items():
                own = self.compute[self.kinds.index(kind), n]
                work.append(count * float(own[0]))
                moved.append(count * float(own[1]))
                if use != "W" and kind in self.routed:
                    moved.append(count * float(self.moved[n]))
        return fsum(work), fsum(moved)

    def block(self, kind: BlockKind, paired: bool) -> float:
        """Seconds of a block's forward and backward pass.

        Compute and transfers run in series; in a schedule of overlapped pairs the busier stream counts.
        """
        work, moved = self.work(ACTIONS, {kind: 1})
        return max(work, moved) if paired else work + moved


def ideal_bound_s(
    pools: Sequence[PoolSeconds], ranks: Sequence[int], frame: Frame, blocks: Blocks, clock_cv: float
) -> float:
    """Least seconds of a step with any layout (docs/model.md, eq. S4).

    If a block of kind k is worth y_k, a rank of pool p, which needs w_p(k) seconds for it, does work worth at
    most max_k y_k / w_p(k) a second. Any positive y_k gives a bound; here it is the mean of the pools'
    seconds.
    """
    paired = frame.pattern.paired
    each = [{kind: pool.block(kind, paired) for kind in blocks} for pool in pools]
    worth = {kind: fsum(own[kind] for own in each) / len(each) for kind in blocks}
    rate = fsum(
        n * max(worth[kind] / own[kind] if own[kind] else inf for kind in blocks if worth[kind])
        for n, own in zip(ranks, each, strict=True)
    )
    total = fsum(count * worth[kind] for kind, count in blocks.items())
    return frame.microbatches * total / rate * _least(frame, clock_cv)


def layout_bound_s(
    pools: Sequence[PoolSeconds],
    owners: Sequence[int],
    frame: Frame,
    assignment: StageAssignment,
    clock_cv: float,
) -> float:
    """Least seconds of a step of a plan with these stages (eq. P1, with each rank on its own pool)."""
    pattern = frame.pattern
    route = pattern.samples[0].routes[0]
    held = [dict(Counter(block.kind for block in stage)) for stage in assignment.stages]
    count = np.array([frame.microbatches], dtype=np.float64)

    each = {
        (kind, stage): fsum(pools[owners[route[stage]]].work(ACTIONS_OF[kind], held[stage]))
        for stage in range(pattern.n_stages)
        for kind in ACTIONS_OF
    }

    def seconds(key: Key, rank: int) -> float:
        kind, forward, backward = key
        if kind not in ("F&B", "F&I"):
            return each[kind, max(forward, backward)]
        pool = pools[owners[rank]]
        one, two = pool.work("F", held[forward]), pool.work("IW" if kind == "F&B" else "I", held[backward])
        return max(one[0] + two[0], one[1] + two[1])

    most = 0.0
    back = "I" if pattern.split else "B"
    for rank in range(pattern.pp):
        first, last, ends = pattern.counts[0][rank], pattern.counts[-1][rank], pattern.ends[rank]
        often = {key: pattern.along(first.get(key, 0), last.get(key, 0), count) for key in {*first, *last}}
        busy = fsum(float(often[key][0]) * seconds(key, rank) for key in sorted(often))
        head = fsum(each["F", stage] for stage in range(ends.first_stage))
        trailing = fsum(each["W", stage] for stage in ends.trailing_weights)
        tail = fsum(each[back, stage] for stage in range(ends.last_stage))
        most = max(most, head + max(busy, busy - trailing + tail))
    return most * _least(frame, clock_cv)


def blocks_by_kind(shape: ModelShape) -> Blocks:
    """Number of blocks of each kind in a model."""
    return dict(Counter(block.kind for block in blocks_of(shape)))


def _least(frame: Frame, clock_cv: float) -> float:
    return max(0.0, 1.0 - STANDARD_ERRORS * clock_cv / sqrt(members_per_program(frame.layout)))
