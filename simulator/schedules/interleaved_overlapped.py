"""1F1B whose steady state runs a forward and a backward as one pair, so that all-to-alls hide behind compute.

Megatron core with `overlap_moe_expert_parallel_comm`: interleaved 1F1B with one more forward in the warm-up,
then pairs (NVIDIA/Megatron-LM@core_v0.15.0 megatron/core/pipeline_parallel/schedules.py, combined_1f1b.py;
the order inside a pair is in models/common/model_chunk_schedule_plan.py).
"""

from __future__ import annotations

from functools import partial

from moesim.simulator.schedules.action import Action, Overlap, Schedule, Step, loop_route
from moesim.simulator.schedules.interleaved import (
    check_rounds,
    interleaved_rank,
    per_round,
    warmup_forwards,
)
from moesim.simulator.schedules.spec import ScheduleSpec

NAME = "interleaved-1f1b-overlapped"
PER_HOP, MORE = 2, 1
"""Forwards of the warm-up for each rank that follows, and the one that is ahead of its backward."""


def build_interleaved_overlapped(pp: int, microbatches: int, vpp: int = 1) -> Schedule:
    """Build the order with `vpp` stages per rank; one rank with one stage pairs micro-batches of its own."""
    ranks = tuple(
        _paired(
            interleaved_rank(pp, microbatches, vpp, rank, PER_HOP, MORE),
            warmup_forwards(pp, microbatches, vpp, rank, PER_HOP, MORE),
        )
        for rank in range(pp)
    )
    return Schedule(NAME, microbatches, (loop_route(pp, pp * vpp),), ranks, pairs=True)


def _paired(steps: tuple[Step, ...], warmup: int) -> tuple[Step, ...]:
    """Join every forward after the `warmup` ones with the backward that follows it."""
    out = list(steps[:warmup])
    index = warmup
    while index < len(steps):
        forward, backward = steps[index], steps[index + 1] if index + 1 < len(steps) else None
        if isinstance(forward, Action) and forward.kind == "F" and isinstance(backward, Action):
            out.append(Overlap(forward, backward))
            index += 2
        else:
            out.append(forward)
            index += 1
    return tuple(out)


INTERLEAVED_OVERLAPPED = ScheduleSpec(
    NAME,
    build_interleaved_overlapped,
    stages_per_rank=None,
    check_sizes=partial(check_rounds, NAME),
    microbatch_step=per_round,
    overlapped_pairs=True,
    hides_expert_transfers=True,
    overlap_order="megatron",
    advised=False,
    fleet_default=False,
)
