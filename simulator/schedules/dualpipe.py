"""DualPipe: a bidirectional pipeline of overlapped forward-backward pairs (DeepSeek-V3, arXiv 2412.19437)."""

from __future__ import annotations

from moesim.hwmodels.errors import InputError
from moesim.simulator.schedules.action import Schedule, bidirectional_routes
from moesim.simulator.schedules.eight_steps import eight_steps
from moesim.simulator.schedules.spec import ScheduleSpec, check_microbatches, every
from moesim.simulator.schedules.timeline import Durations

NAME = "dualpipe"


def check_dualpipe(pp: int, microbatches: int) -> None:
    """Raise InputError, with the nearest legal sizes, for odd ranks and too few or odd micro-batches."""
    if pp % 2:
        near = [p for p in (pp - 1, pp + 1) if p]
        raise InputError(
            f"schedule {NAME}: pp={pp} is odd, but ranks work in mirrored pairs; nearest legal: "
            f"{', '.join(map(str, near))}.",
            key="parallel.pp",
            nearest=near,
        )
    rule = f"half of them enter at each end and the eight steps need at least 2 pp = {2 * pp}"
    check_microbatches(NAME, microbatches, 2 * pp, lambda m: m % 2 == 0, rule)


def build_dualpipe(pp: int, microbatches: int, vpp: int = 1) -> Schedule:
    """Build the order for even pp and an even number of micro-batches >= 2 pp.

    Each direction numbers its own stages, so rank r holds stages r and pp - 1 - r. Micro-batches 0..M/2-1
    enter at rank 0 and M/2..M-1 at the last rank.
    """
    half = microbatches // 2
    ranks = []
    for rank in range(pp):
        position = min(rank, pp - 1 - rank)
        near_end = 0 if rank < pp // 2 else half  # first micro-batch entering at this rank's end
        own = (position, near_end)
        other = (pp - 1 - position, half - near_end)
        ranks.append(eight_steps(own, other, position, depth=pp // 2, chunks=half))
    return Schedule(NAME, microbatches, bidirectional_routes(pp), tuple(ranks))


def bubble(pp: int, durations: Durations, vpp: int) -> float:
    """(pp/2 - 1)(F&B + B - 3W), full backward B and overlapped pair F&B (arXiv 2412.19437, table 2)."""
    return (pp / 2 - 1) * pair_gap(durations)


def pair_gap(durations: Durations) -> float:
    """Bubble that each rank after the first of a direction adds: F&B + B - 3W."""
    return durations.overlap + durations.backward - 3 * durations.weight_gradient


DUALPIPE = ScheduleSpec(
    NAME,
    build_dualpipe,
    check_sizes=check_dualpipe,
    microbatch_step=every(2),
    bubble=bubble,
    bidirectional=True,
    overlapped_pairs=True,
    awaits_sends=True,
)
