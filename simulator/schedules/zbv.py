"""ZB-V, with two stages per rank in a V and split backwards (Qi et al. 2023, arXiv 2401.10241, section 6)."""

from __future__ import annotations

import math

from moesim.simulator.schedules.action import Step
from moesim.simulator.schedules.schedule import Schedule, v_route
from moesim.simulator.schedules.sequence import RankWriter
from moesim.simulator.schedules.spec import ScheduleSpec, every
from moesim.simulator.schedules.timeline import Durations

NAME = "zbv"


def build_zbv(pp: int, microbatches: int, vpp: int = 1) -> Schedule:
    """Build the order with stages r and 2 pp - 1 - r on rank r, for any pp and micro-batches >= 1.

    The order needs 2 pp - 1 micro-batches to fill the pipeline. With fewer, it is that order without the
    missing micro-batches, as in PyTorch 2.13.
    """
    ranks = tuple(_rank_steps(pp, microbatches, rank) for rank in range(pp))
    return Schedule(NAME, microbatches, (v_route(pp),), ranks)


def bubble(pp: int, durations: Durations, vpp: int) -> float | None:
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
    NAME,
    build_zbv,
    stages_per_rank=2,
    microbatch_step=every(1),
    bubble=bubble,
    names_elsewhere={"torch": "ZBVZeroBubble"},
    advised=False,
)
