"""DualPipeV: DualPipe cut in half, so that one direction folds into a V and needs one copy of each stage."""

from __future__ import annotations

from moesim.simulator.schedules.eight_steps import eight_steps
from moesim.simulator.schedules.schedule import Schedule, v_route
from moesim.simulator.schedules.sizes import check_fixed_vpp, check_microbatches, check_positive

NAME = "dualpipev"


def check_dualpipev(pp: int, microbatches: int, vpp: int = 1) -> None:
    """Raise InputError with the nearest legal sizes where `build_dualpipev` would."""
    check_positive(NAME, pp, microbatches, vpp)
    check_fixed_vpp(NAME, vpp, 2)
    rule = f"the eight steps need at least one micro-batch a stage, 2 pp = {2 * pp}"
    check_microbatches(NAME, microbatches, 2 * pp, lambda m: True, rule)


def build_dualpipev(pp: int, microbatches: int, vpp: int = 1) -> Schedule:
    """Schedule with stages r and 2 pp - 1 - r on rank r, for micro-batches >= 2 pp.

    Neither deepseek-ai/DualPipe (dualpipev.py at 3da1bbea5360) nor PyTorch 2.13 asks for even numbers
    here. Raises InputError.
    """
    check_dualpipev(pp, microbatches, vpp)
    ranks = []
    for rank in range(pp):
        down, up = (rank, 0), (2 * pp - 1 - rank, 0)
        ranks.append(eight_steps(down, up, rank, depth=pp, chunks=microbatches))
    return Schedule(NAME, microbatches, (v_route(pp),), tuple(ranks), awaits_sends=True)
