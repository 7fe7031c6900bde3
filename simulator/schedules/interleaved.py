"""Interleaved 1F1B, with several stages per rank and micro-batches in rounds (arXiv 2104.04473, 2.2.2)."""

from __future__ import annotations

from functools import partial

from moesim.simulator.schedules.action import Schedule, Step, loop_route
from moesim.simulator.schedules.spec import Chunk, ScheduleSpec, check_microbatches, one_forward_one_backward
from moesim.simulator.schedules.timeline import Durations

NAME = "interleaved-1f1b"


def build_interleaved_1f1b(pp: int, microbatches: int, vpp: int = 1) -> Schedule:
    """Build the order with `vpp` stages per rank, stage s on rank s % pp.

    Order and sizes are those of `torch.distributed.pipelining` (2.13): micro-batches must divide into
    max(1, micro-batches // pp) equal rounds.
    """
    ranks = tuple(interleaved_rank(pp, microbatches, vpp, rank, warmup_per_hop=2) for rank in range(pp))
    return Schedule(NAME, microbatches, (loop_route(pp, pp * vpp),), ranks)


def bubble(pp: int, durations: Durations, vpp: int) -> float:
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


INTERLEAVED_1F1B = ScheduleSpec(
    NAME,
    build_interleaved_1f1b,
    stages_per_rank=None,
    check_sizes=partial(check_rounds, NAME),
    microbatch_step=per_round,
    bubble=bubble,
    names_elsewhere={"torch": "Interleaved1F1B", "megatron-lm": "interleaved 1F1B"},
    advised=False,
    fleet_default=False,
)
