"""Draws a schedule for the terminal, with one row per rank and time running to the right."""

from __future__ import annotations

from math import fsum

from moesim.simulator.schedules.action import Overlap, Step
from moesim.simulator.schedules.schedule import Schedule
from moesim.simulator.schedules.timeline import Durations, Times, idle, makespan, unit_times

_MAX_PANELS = 8
_IDLE = "."


def draw(schedule: Schedule, width: int = 100, durations: Durations | None = None) -> str:
    """Draw a schedule `width` columns wide, by default with the durations F=I=W=1, B=2, pair=3.

    The time axis continues in further panels. If it needs more than eight, it is scaled down to one panel
    with a letter per column (F, I, W, B, X for a pair). Labels name the stage where a rank holds several.
    Raises InputError if the schedule can never finish.
    """
    times = unit_times(schedule, durations)
    total = makespan(times)
    margin = len(f"rank {schedule.pp - 1} ")
    columns = max(20, width - margin)
    scale = _readable_scale(schedule, times)
    if total * scale > columns * _MAX_PANELS:
        scale = columns / total
        rows = [
            _letters(steps, own, scale, columns) for steps, own in zip(schedule.ranks, times, strict=True)
        ]
        note = "F forward, I input gradient, W weight gradient, B both, X overlapped pair"
    else:
        length = round(total * scale)
        # Panels end between steps of the shortest duration, so that their labels stay whole.
        columns -= columns % int(scale) if columns > scale else 0
        rows = [
            _blocks(schedule, rank, own, scale, columns).ljust(length, _IDLE)
            for rank, own in enumerate(times)
        ]
        note = "F forward, I input gradient, W weight gradient, B both, & overlapped pair"
    panels = [
        "\n".join(
            f"rank {rank}".ljust(margin) + row[first : first + columns].rstrip()
            for rank, row in enumerate(rows)
        )
        for first in range(0, max(map(len, rows)), columns)
    ]
    return "\n\n".join([_headline(schedule, times), *panels, f"{note}, {_IDLE} idle"])


def _headline(schedule: Schedule, times: Times) -> str:
    total = makespan(times)
    bubble = fsum(idle(times)) / (schedule.pp * total) if total else 0.0
    return (
        f"{schedule.name}: {schedule.pp} ranks, {schedule.n_stages} stages ({schedule.placement}), "
        f"{schedule.microbatches} micro-batches; length {total:g}, idle {bubble:.1%}"
    )


def _label(step: Step, with_stage: bool) -> str:
    if isinstance(step, Overlap):
        return f"{_label(step.first, with_stage)}&{_label(step.second, with_stage)}"
    return str(step) if with_stage else f"{step.kind}{step.microbatch}"


def _readable_scale(schedule: Schedule, times: Times) -> float:
    """Columns per unit of time that fit every label and one blank."""
    needed = 1.0
    for rank, own in enumerate(times):
        with_stage = len(schedule.stages_on_rank(rank)) > 1
        for step, (start, end) in zip(schedule.ranks[rank], own, strict=True):
            if end > start:
                needed = max(needed, (len(_label(step, with_stage)) + 1) / (end - start))
    return float(-(-needed // 1))


def _blocks(
    schedule: Schedule, rank: int, own: tuple[tuple[float, float], ...], scale: float, columns: int
) -> str:
    with_stage = len(schedule.stages_on_rank(rank)) > 1
    row = ""
    for step, (start, end) in zip(schedule.ranks[rank], own, strict=True):
        first, last = round(start * scale), round(end * scale)
        label = _label(step, with_stage)
        # A label that the end of a panel would cut starts the next panel instead.
        room = columns - first % columns
        shift = room if room < len(label) <= last - first - room else 0
        row = row.ljust(first, _IDLE) + (" " * shift + label)[: last - first].ljust(last - first)
    return row


def _letters(
    steps: tuple[Step, ...], own: tuple[tuple[float, float], ...], scale: float, columns: int
) -> str:
    row = [_IDLE] * columns
    for step, (start, end) in zip(steps, own, strict=True):
        letter = "X" if isinstance(step, Overlap) else step.kind
        for column in range(max(0, round(start * scale)), min(columns, round(end * scale))):
            row[column] = letter
    return "".join(row)
