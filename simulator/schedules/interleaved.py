"""GPipe, 1F1B, interleaved 1F1B, and the form of it whose steady state runs pairs.

GPipe: Huang et al. 2019, arXiv 1811.06965. 1F1B (also PipeDream-flush) and its interleaved form: Narayanan
et al. 2021, arXiv 2104.04473, sections 2.2.1 and 2.2.2. Pairs hide all-to-alls behind compute: Megatron core
with `overlap_moe_expert_parallel_comm` (NVIDIA/Megatron-LM@core_v0.15.0 `megatron/core/pipeline_parallel`:
schedules.py, combined_1f1b.py; the order inside a pair is in models/common/model_chunk_schedule_plan.py).
"""

from __future__ import annotations

from functools import partial

from moesim.simulator.schedules.action import Action, Kind, Overlap, Schedule, Step, loop_route
from moesim.simulator.schedules.spec import (
    Chunk,
    ScheduleSpec,
    check_microbatches,
    every,
    one_forward_one_backward,
)
from moesim.simulator.schedules.timeline import Durations


def build_gpipe(pp: int, microbatches: int, vpp: int = 1) -> Schedule:
    """Build all forwards, then all backwards, in ascending micro-batch order; any sizes are legal.

    The paper's figure draws the backwards in descending order, whereas Megatron-LM's paper (arXiv 2104.04473,
    figure 3) and PyTorch run them in ascending order. Bubble and peak memory are the same.
    """
    kinds: tuple[Kind, ...] = ("F", "B")
    order = [(kind, m) for kind in kinds for m in range(microbatches)]
    ranks = tuple(tuple(Action(rank, kind, m) for kind, m in order) for rank in range(pp))
    return Schedule("gpipe", microbatches, (loop_route(pp, pp),), ranks)


def build_1f1b(pp: int, microbatches: int, vpp: int = 1) -> Schedule:
    """Build forwards and backwards in turn, after min(pp - 1 - r, micro-batches) forwards on rank r."""
    ranks = []
    for rank in range(pp):
        chunks = [(rank, m) for m in range(microbatches)]
        ranks.append(one_forward_one_backward(chunks, chunks, min(pp - 1 - rank, microbatches)))
    return Schedule("1f1b", microbatches, (loop_route(pp, pp),), tuple(ranks))


def flush_bubble(pp: int, durations: Durations, vpp: int) -> float:
    """(pp - 1)(F + B), forward and full backward, for GPipe and 1F1B.

    Sources: arXiv 1811.06965; arXiv 2104.04473, 2.2; DeepSeek-V3, arXiv 2412.19437, table 2.
    """
    return (pp - 1) * (durations.forward + durations.backward)


def build_interleaved_1f1b(pp: int, microbatches: int, vpp: int = 1) -> Schedule:
    """Build the order with `vpp` stages per rank, stage s on rank s % pp.

    Order and sizes are those of `torch.distributed.pipelining` (2.13): micro-batches must divide into
    max(1, micro-batches // pp) equal rounds.
    """
    ranks = tuple(interleaved_rank(pp, microbatches, vpp, rank, warmup_per_hop=2) for rank in range(pp))
    return Schedule("interleaved-1f1b", microbatches, (loop_route(pp, pp * vpp),), ranks)


def interleaved_bubble(pp: int, durations: Durations, vpp: int) -> float:
    """(pp - 1)(F_rank + B_rank) / vpp, where F_rank = vpp F and B_rank = vpp B (arXiv 2104.04473, 2.2.2)."""
    return (pp - 1) * (vpp * durations.forward + vpp * durations.backward) / vpp


def per_round(pp: int, microbatches: int) -> int:
    """Micro-batches of one round, with micro-batches // pp rounds but at least one."""
    return microbatches // max(1, microbatches // pp)


def check_rounds(name: str, pp: int, microbatches: int) -> None:
    """Raise InputError unless the micro-batches divide into max(1, microbatches // pp) equal rounds."""
    rounds = max(1, microbatches // pp)
    rule = f"they must divide into {rounds} equal rounds (micro-batches // pp, with pp={pp})"
    check_microbatches(name, microbatches, 1, lambda m: m % max(1, m // pp) == 0, rule)


def interleaved_rank(
    pp: int, microbatches: int, vpp: int, rank: int, warmup_per_hop: int, more_warmup: int = 0
) -> tuple[Step, ...]:
    """Build the steps of one rank with full backwards.

    The warm-up has one round for each stage of the rank after the first, and `warmup_per_hop` forwards for
    each rank that follows (2 where forward and full backward alternate, 1 where backwards are split), and
    `more_warmup` further ones.
    """
    each = per_round(pp, microbatches)
    stages = [rank + pp * level for level in range(vpp)]
    forwards = _rounds(stages, microbatches, each)
    backwards = _rounds(stages[::-1], microbatches, each)
    warmup = warmup_forwards(pp, microbatches, vpp, rank, warmup_per_hop, more_warmup)
    return one_forward_one_backward(forwards, backwards, warmup)


def warmup_forwards(
    pp: int, microbatches: int, vpp: int, rank: int, warmup_per_hop: int, more_warmup: int
) -> int:
    """Forwards that one rank runs before forwards and backwards alternate."""
    warmup = (vpp - 1) * per_round(pp, microbatches) + warmup_per_hop * (pp - 1 - rank) + more_warmup
    return min(warmup, microbatches * vpp)


def _rounds(stages: list[int], microbatches: int, each: int) -> list[Chunk]:
    """List the chunks by round, then by stage, then by micro-batch."""
    return [
        (stage, microbatch)
        for first in range(0, microbatches, each)
        for stage in stages
        for microbatch in range(first, min(first + each, microbatches))
    ]


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
    return Schedule(
        "interleaved-1f1b-overlapped", microbatches, (loop_route(pp, pp * vpp),), ranks, pairs=True
    )


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


# 1F1B has the same bubble and keeps fewer micro-batches in flight, so GPipe is never advised.
GPIPE = ScheduleSpec(
    "gpipe",
    build_gpipe,
    microbatch_step=every(1),
    bubble=flush_bubble,
    names_elsewhere={"torch": "GPipe"},
    advised=False,
    fleet_default=False,
)
ONE_F_ONE_B = ScheduleSpec(
    "1f1b",
    build_1f1b,
    microbatch_step=every(1),
    bubble=flush_bubble,
    awaits_sends=True,
    names_elsewhere={"torch": "1F1B", "megatron-lm": "1F1B"},
)
INTERLEAVED_1F1B = ScheduleSpec(
    "interleaved-1f1b",
    build_interleaved_1f1b,
    stages_per_rank=None,
    check_sizes=partial(check_rounds, "interleaved-1f1b"),
    microbatch_step=per_round,
    bubble=interleaved_bubble,
    names_elsewhere={"torch": "Interleaved1F1B", "megatron-lm": "interleaved 1F1B"},
    advised=False,
    fleet_default=False,
)
INTERLEAVED_OVERLAPPED = ScheduleSpec(
    "interleaved-1f1b-overlapped",
    build_interleaved_overlapped,
    stages_per_rank=None,
    check_sizes=partial(check_rounds, "interleaved-1f1b-overlapped"),
    microbatch_step=per_round,
    overlapped_pairs=True,
    hides_expert_transfers=True,
    overlap_order="megatron",
    names_elsewhere={"megatron-lm": "1F1B with expert overlap"},
    advised=False,
    fleet_default=False,
)
