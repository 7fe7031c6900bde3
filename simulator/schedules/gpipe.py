"""GPipe, which runs all forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965)."""

from __future__ import annotations

from moesim.simulator.schedules.action import Action, Schedule, Step, loop_route
from moesim.simulator.schedules.spec import ScheduleSpec, every
from moesim.simulator.schedules.timeline import Durations

NAME = "gpipe"


def build_gpipe(pp: int, microbatches: int, vpp: int = 1) -> Schedule:
    """Build the order for any pp and micro-batches >= 1; backwards run in ascending micro-batch order.

    The paper's figure draws the backwards in descending order, whereas Megatron-LM's paper (arXiv 2104.04473,
    figure 3) and PyTorch run them in ascending order. Bubble and peak memory are the same.
    """
    ranks = tuple(_rank_steps(rank, microbatches) for rank in range(pp))
    return Schedule(NAME, microbatches, (loop_route(pp, pp),), ranks)


def bubble(pp: int, durations: Durations, vpp: int) -> float:
    """(pp - 1)(F + B), forward and full backward (arXiv 1811.06965; arXiv 2104.04473, 2.2)."""
    return (pp - 1) * (durations.forward + durations.backward)


def _rank_steps(rank: int, microbatches: int) -> tuple[Step, ...]:
    forwards = [Action(rank, "F", m) for m in range(microbatches)]
    backwards = [Action(rank, "B", m) for m in range(microbatches)]
    return (*forwards, *backwards)


# 1F1B has the same bubble and keeps fewer micro-batches in flight, so GPipe is never advised.
GPIPE = ScheduleSpec(
    NAME,
    build_gpipe,
    microbatch_step=every(1),
    bubble=bubble,
    names_elsewhere={"torch": "GPipe"},
    advised=False,
    fleet_default=False,
)
