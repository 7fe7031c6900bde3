"""Pipeline schedules as plain data."""

from __future__ import annotations

from collections.abc import Callable

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.validation import nearest
from moesim.simulator.schedules.action import Action, Kind, Overlap, Step, actions_of, parse_step
from moesim.simulator.schedules.bubble import published_bubble
from moesim.simulator.schedules.draw import draw
from moesim.simulator.schedules.dualpipe import build_dualpipe, check_dualpipe
from moesim.simulator.schedules.dualpipev import build_dualpipev, check_dualpipev
from moesim.simulator.schedules.gpipe import build_gpipe, check_gpipe
from moesim.simulator.schedules.interleaved import build_interleaved_1f1b, check_interleaved_1f1b, per_round
from moesim.simulator.schedules.one_f_one_b import build_1f1b, check_1f1b
from moesim.simulator.schedules.schedule import Placement, Schedule
from moesim.simulator.schedules.text import from_csv, from_json, infer_schedule, to_csv, to_json
from moesim.simulator.schedules.timeline import (
    Durations,
    Times,
    idle,
    longest_path,
    makespan,
    needs_of,
    provides_of,
    unit_times,
)
from moesim.simulator.schedules.validate import RankReport, ScheduleReport, validate
from moesim.simulator.schedules.zbv import build_zbv, check_zbv
from moesim.simulator.schedules.zero_bubble import (
    build_interleaved_zero_bubble,
    build_zb_h1,
    check_interleaved_zero_bubble,
    check_zb_h1,
)

BUILDERS: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": build_gpipe,
    "1f1b": build_1f1b,
    "interleaved-1f1b": build_interleaved_1f1b,
    "zb-h1": build_zb_h1,
    "interleaved-zero-bubble": build_interleaved_zero_bubble,
    "zbv": build_zbv,
    "dualpipe": build_dualpipe,
    "dualpipev": build_dualpipev,
}
"""Every schedule by name; the arguments are pp, micro-batches and vpp."""


CHECKS: dict[str, Callable[[int, int, int], None]] = {
    "gpipe": check_gpipe,
    "1f1b": check_1f1b,
    "interleaved-1f1b": check_interleaved_1f1b,
    "zb-h1": check_zb_h1,
    "interleaved-zero-bubble": check_interleaved_zero_bubble,
    "zbv": check_zbv,
    "dualpipe": check_dualpipe,
    "dualpipev": check_dualpipev,
}
"""The sizes that each builder takes, without building: InputError with the nearest legal ones."""


STEADY_GRAIN: dict[str, Callable[[int, int], int]] = {
    "gpipe": lambda pp, microbatches: 1,
    "1f1b": lambda pp, microbatches: 1,
    "interleaved-1f1b": per_round,
    "zb-h1": lambda pp, microbatches: 1,
    "interleaved-zero-bubble": per_round,
    "zbv": lambda pp, microbatches: 1,
    "dualpipe": lambda pp, microbatches: 2,
    "dualpipev": lambda pp, microbatches: 1,
}
"""Micro-batches after which the steady state repeats itself, from pp and micro-batches.

A schedule that is not listed is never shortened: the planner validates and replays all of it.
"""


FREE_VPP = frozenset({"interleaved-1f1b", "interleaved-zero-bubble"})
"""Schedules whose stages a rank are the caller's choice; with one stage they are 1f1b and zb-h1."""


def build(name: str, pp: int, microbatches: int, vpp: int = 1) -> Schedule:
    """Schedule `name` on `pp` ranks.

    `vpp` is the stages a rank of the interleaved schedules; the others take 1. Raises InputError listing
    the valid names, or the nearest legal sizes.
    """
    builder = BUILDERS.get(name)
    if builder is None:
        hint = nearest(name, list(BUILDERS))
        raise InputError(f"schedule {name!r} is unknown{hint}; valid names: {', '.join(BUILDERS)}.")
    return builder(pp, microbatches, vpp)


__all__ = [
    "BUILDERS",
    "CHECKS",
    "FREE_VPP",
    "STEADY_GRAIN",
    "Action",
    "Durations",
    "Kind",
    "Overlap",
    "Placement",
    "RankReport",
    "Schedule",
    "ScheduleReport",
    "Step",
    "Times",
    "actions_of",
    "build",
    "draw",
    "from_csv",
    "from_json",
    "idle",
    "infer_schedule",
    "longest_path",
    "makespan",
    "needs_of",
    "parse_step",
    "per_round",
    "provides_of",
    "published_bubble",
    "to_csv",
    "to_json",
    "unit_times",
    "validate",
]
