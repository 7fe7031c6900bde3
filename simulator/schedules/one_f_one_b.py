"""1F1B: as many forwards as ranks follow, then one forward, one backward (PipeDream-flush)."""

from __future__ import annotations

from moesim.simulator.schedules.schedule import Schedule, loop_route
from moesim.simulator.schedules.sequence import one_forward_one_backward
from moesim.simulator.schedules.sizes import check_fixed_vpp, check_positive

NAME = "1f1b"


def check_1f1b(pp: int, microbatches: int, vpp: int = 1) -> None:
    """Raise InputError with the nearest legal sizes where `build_1f1b` would."""
    check_positive(NAME, pp, microbatches, vpp)
    check_fixed_vpp(NAME, vpp, 1)


def build_1f1b(pp: int, microbatches: int, vpp: int = 1) -> Schedule:
    """Schedule for any pp and micro-batches >= 1 (Narayanan et al. 2021, arXiv 2104.04473, 2.2.1).

    Rank r runs min(pp - 1 - r, micro-batches) forwards before it alternates. Raises InputError.
    """
    check_1f1b(pp, microbatches, vpp)
    ranks = []
    for rank in range(pp):
        chunks = [(rank, m) for m in range(microbatches)]
        ranks.append(one_forward_one_backward(chunks, chunks, min(pp - 1 - rank, microbatches)))
    return Schedule(NAME, microbatches, (loop_route(pp, pp),), tuple(ranks), awaits_sends=True)
