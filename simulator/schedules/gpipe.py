"""GPipe: all forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965)."""

from __future__ import annotations

from moesim.simulator.schedules.action import Action, Step
from moesim.simulator.schedules.schedule import Schedule, loop_route
from moesim.simulator.schedules.sizes import check_fixed_vpp, check_positive

NAME = "gpipe"


def check_gpipe(pp: int, microbatches: int, vpp: int = 1) -> None:
    """Raise InputError with the nearest legal sizes where `build_gpipe` would."""
    check_positive(NAME, pp, microbatches, vpp)
    check_fixed_vpp(NAME, vpp, 1)


def build_gpipe(pp: int, microbatches: int, vpp: int = 1) -> Schedule:
    """Schedule for any pp and micro-batches >= 1; backwards run in ascending micro-batch order.

    The paper's figure draws the backwards in descending order; ascending is what Megatron-LM's paper
    (arXiv 2104.04473, figure 3) and PyTorch run. Bubble and peak memory are the same. Raises InputError.
    """
    check_gpipe(pp, microbatches, vpp)
    ranks = tuple(_rank_steps(rank, microbatches) for rank in range(pp))
    return Schedule(NAME, microbatches, (loop_route(pp, pp),), ranks)


def _rank_steps(rank: int, microbatches: int) -> tuple[Step, ...]:
    forwards = [Action(rank, "F", m) for m in range(microbatches)]
    backwards = [Action(rank, "B", m) for m in range(microbatches)]
    return (*forwards, *backwards)
