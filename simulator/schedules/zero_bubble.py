"""ZB-H1, its interleaved form and ZB-V fill the bubble with weight gradients (arXiv 2401.10241)."""

from __future__ import annotations

import math
from functools import partial

from moesim.simulator.schedules.action import Schedule, Step, loop_route, v_route
from moesim.simulator.schedules.interleaved import check_rounds, interleaved_rank, per_round
from moesim.simulator.schedules.spec import RankWriter, ScheduleSpec, every, split_backwards
from moesim.simulator.schedules.timeline import Durations


def build_zero_bubble(name: str, pp: int, microbatches: int, vpp: int = 1) -> Schedule:
    """Build the order of PyTorch 2.13 with `vpp` stages per rank and split backwards.

    Micro-batches must divide into max(1, micro-batches // pp) equal rounds; with one stage per rank (ZB-H1)
    rounds make no difference, and any pp and micro-batches >= 1 are legal.
    """
    ranks = []
    for rank in range(pp):
        full = interleaved_rank(pp, microbatches, vpp, rank, warmup_per_hop=1)
        # Rank r defers r weight gradients. Earlier ranks hold as many more forwards instead, so that every
        # rank has the peak memory of rank 0 in 1F1B.
        ranks.append(split_backwards(full, delay=rank))
    return Schedule(name, microbatches, (loop_route(pp, pp * vpp),), tuple(ranks))


def h1_bubble(pp: int, durations: Durations, vpp: int) -> float:
    """(pp - 1)(F + B - 2W), full backward B (arXiv 2412.19437 table 2, as ZB1P; arXiv 2401.10241 table 2)."""
    return (pp - 1) * (durations.forward + durations.backward - 2 * durations.weight_gradient)


def interleaved_bubble(pp: int, durations: Durations, vpp: int) -> float | None:
    """Bubble of ZB-H1 for one stage per rank; None otherwise, where none was published."""
    return h1_bubble(pp, durations, vpp) if vpp == 1 else None


ZB_H1 = ScheduleSpec("zb-h1", partial(build_zero_bubble, "zb-h1"), microbatch_step=every(1), bubble=h1_bubble)
INTERLEAVED_ZERO_BUBBLE = ScheduleSpec(
    "interleaved-zero-bubble",
    partial(build_zero_bubble, "interleaved-zero-bubble"),
    stages_per_rank=None,
    check_sizes=partial(check_rounds, "interleaved-zero-bubble"),
    microbatch_step=per_round,
    bubble=interleaved_bubble,
    names_elsewhere={"torch": "InterleavedZeroBubble"},
    advised=False,
    fleet_default=False,
)


def build_zbv(pp: int, microbatches: int, vpp: int = 1) -> Schedule:
    """Build ZB-V (section 6 of the paper) with stages r and 2 pp - 1 - r on rank r, for any legal sizes.

    The order needs 2 pp - 1 micro-batches to fill the pipeline. With fewer, it is that order without the
    missing micro-batches, as in PyTorch 2.13.
    """
    ranks = tuple(_rank_steps(pp, microbatches, rank) for rank in range(pp))
    return Schedule("zbv", microbatches, (v_route(pp),), ranks)


def v_bubble(pp: int, durations: Durations, vpp: int) -> float | None:
    """0 where F, I and W take equal times (arXiv 2401.10241, 6); None otherwise, where none was published.

    The paper counts the idle time of each rank between its own first and last steps.
    """
    forward, weights = durations.forward, durations.weight_gradient
    even = math.isclose(forward, weights) and math.isclose(durations.input_gradient, weights)
    return 0.0 if even else None


def _rank_steps(pp: int, microbatches: int, rank: int) -> tuple[Step, ...]:
    total = max(microbatches, 2 * pp - 1)
    down, up = (rank, 0), (2 * pp - 1 - rank, 0)
    after = pp - rank  # this rank and those below it in the V
    writer = RankWriter(limit=microbatches)

    # Warm-up: fill the way down, meet the first micro-batches coming up, start their backwards.
    for _ in range(2 * after - 1):
        writer.put(down, "F")
    for _ in range(rank):
        writer.put(up, "F")
        writer.put(down, "F")
    for _ in range(after):
        writer.put(up, "F", "I", "W")

    # Steady state: forward, input gradient, weight gradient of either stage in turn.
    while writer.count(up, "F") < total:
        if writer.count(down, "F") < total:
            writer.put(down, "F")
        writer.put(down, "I", "W")
        writer.put(up, "F", "I", "W")

    # Drain: input gradients first, since other ranks wait for them; weight gradients fill the end.
    for _ in range(rank):
        writer.put(down, "I")
        writer.put(up, "I")
    for _ in range(after):
        writer.put(down, "I", "W")
    for chunk in (up, down):
        while writer.count(chunk, "W") < total:
            writer.put(chunk, "W")
    return tuple(writer.steps)


ZBV = ScheduleSpec(
    "zbv",
    build_zbv,
    stages_per_rank=2,
    microbatch_step=every(1),
    bubble=v_bubble,
    names_elsewhere={"torch": "ZBVZeroBubble"},
    advised=False,
)
