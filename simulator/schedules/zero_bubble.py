"""ZB-H1 and its interleaved form fill the bubble with weight gradients (Qi et al. 2023, arXiv 2401.10241)."""

from __future__ import annotations

from functools import partial

from moesim.simulator.schedules.interleaved import check_rounds, interleaved_rank, per_round
from moesim.simulator.schedules.schedule import Schedule, loop_route
from moesim.simulator.schedules.sequence import split_backwards
from moesim.simulator.schedules.spec import ScheduleSpec, every
from moesim.simulator.schedules.timeline import Durations

H1_NAME = "zb-h1"
INTERLEAVED_NAME = "interleaved-zero-bubble"


def build_interleaved_zero_bubble(pp: int, microbatches: int, vpp: int = 1) -> Schedule:
    """Build the order of PyTorch 2.13 with `vpp` stages per rank and split backwards.

    Micro-batches must divide into max(1, micro-batches // pp) equal rounds.
    """
    return _build(INTERLEAVED_NAME, pp, microbatches, vpp)


def build_zb_h1(pp: int, microbatches: int, vpp: int = 1) -> Schedule:
    """Build the interleaved zero-bubble order with one stage per rank, where rounds make no difference.

    Any pp and micro-batches >= 1 are legal.
    """
    return _build(H1_NAME, pp, microbatches, 1)


def h1_bubble(pp: int, durations: Durations, vpp: int) -> float:
    """(pp - 1)(F + B - 2W), full backward B (arXiv 2412.19437 table 2, as ZB1P; arXiv 2401.10241 table 2)."""
    return (pp - 1) * (durations.forward + durations.backward - 2 * durations.weight_gradient)


def interleaved_bubble(pp: int, durations: Durations, vpp: int) -> float | None:
    """Bubble of ZB-H1 for one stage per rank; None otherwise, where none was published."""
    return h1_bubble(pp, durations, vpp) if vpp == 1 else None


def _build(name: str, pp: int, microbatches: int, vpp: int) -> Schedule:
    ranks = []
    for rank in range(pp):
        full = interleaved_rank(pp, microbatches, vpp, rank, warmup_per_hop=1)
        # Rank r defers r weight gradients. Earlier ranks hold as many more forwards instead, so that every
        # rank has the peak memory of rank 0 in 1F1B.
        ranks.append(split_backwards(full, delay=rank))
    return Schedule(name, microbatches, (loop_route(pp, pp * vpp),), tuple(ranks))


ZB_H1 = ScheduleSpec(H1_NAME, build_zb_h1, microbatch_step=every(1), bubble=h1_bubble)
INTERLEAVED_ZERO_BUBBLE = ScheduleSpec(
    INTERLEAVED_NAME,
    build_interleaved_zero_bubble,
    stages_per_rank=None,
    check_sizes=partial(check_rounds, INTERLEAVED_NAME),
    microbatch_step=per_round,
    bubble=interleaved_bubble,
    names_elsewhere={"torch": "InterleavedZeroBubble"},
    advised=False,
    fleet_default=False,
)
