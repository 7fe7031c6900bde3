"""Pipeline schedules as plain data: builders, validation, text forms and timelines."""

from __future__ import annotations

from moesim.simulator.schedules.action import (
    Action,
    Awaited,
    Overlap,
    Schedule,
    Step,
    actions_of,
    awaiting,
    parse_step,
    steady_steps,
)
from moesim.simulator.schedules.dualpipe import DUALPIPE, DUALPIPEV
from moesim.simulator.schedules.interleaved import (
    GPIPE,
    INTERLEAVED_1F1B,
    INTERLEAVED_OVERLAPPED,
    ONE_F_ONE_B,
)
from moesim.simulator.schedules.spec import (
    SCHEDULES,
    ScheduleSpec,
    build,
    fleet_defaults,
    name_from,
    pool_defaults,
    published_bubble,
    register,
    spec_of,
    validate,
)
from moesim.simulator.schedules.text import from_csv, from_json, to_csv, to_json
from moesim.simulator.schedules.timeline import (
    Durations,
    draw,
    idle,
    longest_path,
    makespan,
    needs_of,
    provides_of,
    step_order,
    unit_times,
)
from moesim.simulator.schedules.zero_bubble import INTERLEAVED_ZERO_BUBBLE, ZB_H1, ZBV

for _spec in (
    GPIPE,
    ONE_F_ONE_B,
    INTERLEAVED_1F1B,
    INTERLEAVED_OVERLAPPED,
    ZB_H1,
    INTERLEAVED_ZERO_BUBBLE,
    ZBV,
    DUALPIPE,
    DUALPIPEV,
):
    register(_spec)

__all__ = [
    "SCHEDULES",
    "Action",
    "Awaited",
    "Durations",
    "Overlap",
    "Schedule",
    "ScheduleSpec",
    "Step",
    "actions_of",
    "awaiting",
    "build",
    "draw",
    "fleet_defaults",
    "from_csv",
    "from_json",
    "idle",
    "longest_path",
    "makespan",
    "name_from",
    "needs_of",
    "parse_step",
    "pool_defaults",
    "provides_of",
    "published_bubble",
    "register",
    "spec_of",
    "steady_steps",
    "step_order",
    "to_csv",
    "to_json",
    "unit_times",
    "validate",
]
