"""ZB-V: two stages a rank in a V, split backwards (Qi et al. 2023, arXiv 2401.10241, section 6)."""

from __future__ import annotations

from moesim.simulator.schedules.action import Step
from moesim.simulator.schedules.schedule import Schedule, v_route
from moesim.simulator.schedules.sequence import RankWriter
from moesim.simulator.schedules.sizes import check_fixed_vpp, check_positive

NAME = "zbv"


def check_zbv(pp: int, microbatches: int, vpp: int = 1) -> None:
    """Raise InputError with the nearest legal sizes where `build_zbv` would."""
    check_positive(NAME, pp, microbatches, vpp)
    check_fixed_vpp(NAME, vpp, 2)


def build_zbv(pp: int, microbatches: int, vpp: int = 1) -> Schedule:
    """Schedule with stages r and 2 pp - 1 - r on rank r, for any pp and micro-batches >= 1.

    The order fills the pipeline with at least 2 pp - 1 micro-batches; where there are fewer, it is that
    order without the missing ones, as in PyTorch 2.13. Raises InputError.
    """
    check_zbv(pp, microbatches, vpp)
    ranks = tuple(_rank_steps(pp, microbatches, rank) for rank in range(pp))
    return Schedule(NAME, microbatches, (v_route(pp),), ranks)


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
