"""DualPipeV: half of DualPipe, whose single direction is folded into a V with one copy of each stage."""

from __future__ import annotations

from moesim.simulator.schedules.action import Schedule, v_route
from moesim.simulator.schedules.dualpipe import pair_gap
from moesim.simulator.schedules.eight_steps import eight_steps
from moesim.simulator.schedules.spec import ScheduleSpec, check_microbatches, every
from moesim.simulator.schedules.timeline import Durations

NAME = "dualpipev"


def check_dualpipev(pp: int, microbatches: int) -> None:
    """Raise InputError, with the nearest legal number, for too few micro-batches."""
    rule = f"the eight steps need at least one micro-batch a stage, 2 pp = {2 * pp}"
    check_microbatches(NAME, microbatches, 2 * pp, lambda m: True, rule)


def build_dualpipev(pp: int, microbatches: int, vpp: int = 1) -> Schedule:
    """Build the order with stages r and 2 pp - 1 - r on rank r, for micro-batches >= 2 pp.

    The number of micro-batches may be odd, as in deepseek-ai/DualPipe (dualpipev.py at 3da1bbea5360) and
    PyTorch 2.13.
    """
    ranks = []
    for rank in range(pp):
        down, up = (rank, 0), (2 * pp - 1 - rank, 0)
        ranks.append(eight_steps(down, up, rank, depth=pp, chunks=microbatches))
    return Schedule(NAME, microbatches, (v_route(pp),), tuple(ranks))


def bubble(pp: int, durations: Durations, vpp: int) -> float:
    """(pp - 1)(F&B + B - 3W), DualPipe's row for 2 pp stages on pp ranks.

    Source: deepseek-ai/DualPipe at 3da1bbea5360, README.
    """
    return (pp - 1) * pair_gap(durations)


DUALPIPEV = ScheduleSpec(
    NAME,
    build_dualpipev,
    stages_per_rank=2,
    check_sizes=check_dualpipev,
    microbatch_step=every(1),
    bubble=bubble,
    overlapped_pairs=True,
    awaits_sends=True,
    names_elsewhere={"torch": "DualPipeV"},
)
