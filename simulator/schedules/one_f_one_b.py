"""1F1B, which alternates forwards and backwards after a warm-up of one forward per following rank.

It is also known as PipeDream-flush.
"""

from __future__ import annotations

from moesim.simulator.schedules.action import Schedule, loop_route
from moesim.simulator.schedules.gpipe import bubble
from moesim.simulator.schedules.spec import ScheduleSpec, every, one_forward_one_backward

NAME = "1f1b"


def build_1f1b(pp: int, microbatches: int, vpp: int = 1) -> Schedule:
    """Build the order for any pp and micro-batches >= 1 (Narayanan et al. 2021, arXiv 2104.04473, 2.2.1).

    Rank r runs min(pp - 1 - r, micro-batches) forwards before it alternates.
    """
    ranks = []
    for rank in range(pp):
        chunks = [(rank, m) for m in range(microbatches)]
        ranks.append(one_forward_one_backward(chunks, chunks, min(pp - 1 - rank, microbatches)))
    return Schedule(NAME, microbatches, (loop_route(pp, pp),), tuple(ranks))


# The bubble is GPipe's (arXiv 2104.04473, 2.2; DeepSeek-V3, arXiv 2412.19437, table 2).
ONE_F_ONE_B = ScheduleSpec(
    NAME,
    build_1f1b,
    microbatch_step=every(1),
    bubble=bubble,
    awaits_sends=True,
    names_elsewhere={"torch": "1F1B", "megatron-lm": "1F1B"},
)
