"""ZB-H1 and its interleaved form: weight gradients fill the bubble (Qi et al. 2023, arXiv 2401.10241)."""

from __future__ import annotations

from moesim.simulator.schedules.interleaved import check_rounds, interleaved_rank
from moesim.simulator.schedules.schedule import Schedule, loop_route
from moesim.simulator.schedules.sequence import split_backwards
from moesim.simulator.schedules.sizes import check_fixed_vpp, check_positive

H1_NAME = "zb-h1"
INTERLEAVED_NAME = "interleaved-zero-bubble"


def check_interleaved_zero_bubble(pp: int, microbatches: int, vpp: int = 1) -> None:
    """Raise InputError with the nearest legal sizes where `build_interleaved_zero_bubble` would."""
    check_positive(INTERLEAVED_NAME, pp, microbatches, vpp)
    check_rounds(INTERLEAVED_NAME, pp, microbatches)


def build_interleaved_zero_bubble(pp: int, microbatches: int, vpp: int = 1) -> Schedule:
    """Schedule with `vpp` stages a rank and split backwards; sizes and order of PyTorch 2.13.

    Micro-batches must divide into max(1, micro-batches // pp) equal rounds. Raises InputError.
    """
    check_interleaved_zero_bubble(pp, microbatches, vpp)
    return _build(INTERLEAVED_NAME, pp, microbatches, vpp)


def check_zb_h1(pp: int, microbatches: int, vpp: int = 1) -> None:
    """Raise InputError with the nearest legal sizes where `build_zb_h1` would."""
    check_positive(H1_NAME, pp, microbatches, vpp)
    check_fixed_vpp(H1_NAME, vpp, 1)


def build_zb_h1(pp: int, microbatches: int, vpp: int = 1) -> Schedule:
    """The interleaved zero-bubble order with one stage a rank, where rounds do not matter.

    Legal for any pp and micro-batches >= 1. Raises InputError.
    """
    check_zb_h1(pp, microbatches, vpp)
    return _build(H1_NAME, pp, microbatches, 1)


def _build(name: str, pp: int, microbatches: int, vpp: int) -> Schedule:
    ranks = []
    for rank in range(pp):
        full = interleaved_rank(pp, microbatches, vpp, rank, warmup_per_hop=1)
        # Rank r keeps r weight gradients back: what the ranks before it hold in extra forwards,
        # it holds in weight gradients, so that the peak memory is 1F1B's on rank 0.
        ranks.append(split_backwards(full, delay=rank))
    return Schedule(name, microbatches, (loop_route(pp, pp * vpp),), tuple(ranks))
