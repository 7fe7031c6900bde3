"""Start and end of every step from order and dependencies alone, as the longest path over a schedule."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from math import fsum
from typing import TypeAlias

from msgspec import Struct

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.frozen import SameObject
from moesim.simulator.schedules.action import Action, Kind, Overlap, Schedule, Step, actions_of

Times: TypeAlias = tuple[tuple[tuple[float, float], ...], ...]
"""Start and end of every step, `times[rank][position]`."""

Needs: TypeAlias = tuple[str, int, int]
"""A result that an action waits for, as ('F' | 'backward' | 'I', stage, micro-batch)."""


class Durations(Struct, frozen=True):
    """Duration of each kind of step of one stage, the same on every rank (any one unit of time).

    `backward` is the full backward, `overlap` a forward-backward pair. Raises InputError for a negative
    or non-finite duration.
    """

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0
    backward: float = 2.0
    overlap: float = 3.0

    def __post_init__(self) -> None:
        """Raise InputError for a negative or non-finite duration."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InputError(f"duration {name}={value} must be finite and at least 0.")

    def of(self, step: Step) -> float:
        """Duration of one step."""
        if isinstance(step, Overlap):
            return self.overlap
        if step.kind == "F":
            return self.forward
        if step.kind == "B":
            return self.backward
        return self.input_gradient if step.kind == "I" else self.weight_gradient


def needs_of(action: Action, n_stages: int) -> Iterator[Needs]:
    """Yield the results that one action depends on.

    F follows the F of the previous stage; I and B follow the F of their own stage and the I or B of the next
    stage; W follows the I of its own stage.
    """
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "F":
        if stage > 0:
            yield ("F", stage - 1, microbatch)
    elif action.kind == "W":
        yield ("I", stage, microbatch)
    else:
        yield ("F", stage, microbatch)
        if stage < n_stages - 1:
            yield ("backward", stage + 1, microbatch)


def provides_of(action: Action) -> tuple[Needs, ...]:
    """Results that the end of one action makes available, in the terms of `needs_of`."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "F":
        return (("F", stage, microbatch),)
    if action.kind == "B":
        return (("backward", stage, microbatch),)
    if action.kind == "I":
        return (("backward", stage, microbatch), ("I", stage, microbatch))
    return ()


class StepOrder(Struct, frozen=True):
    """The steps of a schedule in an order in which every step comes after all that it waits for.

    Steps have their number in the order of ranks, and on a rank in the order of the schedule. `steps`:
    (number, numbers of the steps that must have ended) of every step.
    """

    steps: tuple[tuple[int, tuple[int, ...]], ...]
    kinds: tuple[tuple[tuple[Kind, int], ...], ...] = ()
    """What steps are apart from their micro-batches: the (kind, stage) of their actions."""
    kind_of: tuple[int, ...] = ()
    """Number in `kinds` of every step."""

    def ends(self, durations: Sequence[float]) -> list[float]:
        """Earliest end of every step, by number, from the durations by number."""
        ends = [0.0] * len(durations)
        for number, before in self.steps:
            start = 0.0
            for other in before:
                if ends[other] > start:
                    start = ends[other]
            ends[number] = start + durations[number]
        return ends


def longest_path(schedule: Schedule, duration: Callable[[int, Step], float]) -> Times:
    """Compute the earliest times with `duration(rank, step)`, free transfers and one step at a time per rank.

    An overlapped pair starts when both of its actions can start, and both end together. Raises InputError
    naming the rank, position and action at which the order deadlocks.
    """
    order = step_order(schedule)
    durations = [duration(rank, step) for rank, steps in enumerate(schedule.ranks) for step in steps]
    ends = order.ends(durations)
    spans = [(0.0, 0.0)] * len(ends)
    for number, before in order.steps:
        spans[number] = (max((ends[other] for other in before), default=0.0), ends[number])
    at = iter(spans)
    return tuple(tuple(islice(at, len(steps))) for steps in schedule.ranks)


def step_order(schedule: Schedule) -> StepOrder:
    """The order of a schedule's steps, however long each takes; raises the errors of `longest_path`."""
    order, done = _order(SameObject(schedule.ranks), schedule.n_stages)
    if any(count < len(steps) for count, steps in zip(done, schedule.ranks, strict=True)):
        raise InputError(_stuck(schedule, done))
    return order


@lru_cache(maxsize=16)
def _order(key: SameObject[tuple[tuple[Step, ...], ...]], n_stages: int) -> tuple[StepOrder, tuple[int, ...]]:
    """The order of all steps that can run, and how many of them each rank has."""
    ranks = key.value
    rank_of = [rank for rank, steps in enumerate(ranks) for _ in steps]
    flat = [actions_of(step) for steps in ranks for step in steps]
    giver = {need: number for number, actions in enumerate(flat) for a in actions for need in provides_of(a)}
    before: list[tuple[int, ...]] = []
    after: list[list[int]] = [[] for _ in flat]
    missing: list[int] = []
    for number, actions in enumerate(flat):
        needed = [giver.get(need, -1) for action in actions for need in needs_of(action, n_stages)]
        if number and rank_of[number - 1] == rank_of[number]:
            needed.append(number - 1)
        for other in needed:
            if other >= 0:
                after[other].append(number)
        before.append(tuple(needed))
        missing.append(len(needed))
    ready = [number for number, count in enumerate(missing) if not count]
    ordered = []
    while ready:
        number = ready.pop()
        ordered.append((number, before[number]))
        for other in after[number]:
            missing[other] -= 1
            if not missing[other]:
                ready.append(other)
    done = Counter(rank_of[number] for number, _ in ordered)
    numbers: dict[tuple[tuple[Kind, int], ...], int] = {}
    kind_of = [numbers.setdefault(tuple((a.kind, a.stage) for a in own), len(numbers)) for own in flat]
    order = StepOrder(tuple(ordered), tuple(numbers), tuple(kind_of))
    return order, tuple(done[rank] for rank in range(len(ranks)))


def unit_times(schedule: Schedule, durations: Durations | None = None) -> Times:
    """Compute `longest_path` with the same durations on every rank and stage; raises the same errors."""
    of = (durations or Durations()).of
    return longest_path(schedule, lambda rank, step: of(step))


def makespan(times: Times) -> float:
    """Time at which the last step ends."""
    return max((own[-1][1] for own in times if own), default=0.0)


def idle(times: Times) -> tuple[float, ...]:
    """Bubble of each rank, the time between 0 and the makespan in which it does not work."""
    total = makespan(times)
    return tuple(total - fsum(end - start for start, end in own) for own in times)


def _stuck(schedule: Schedule, positions: Sequence[int]) -> str:
    """Describe one rank of the deadlock, and the action that it waits for, in one sentence.

    `positions[r]`: the number of steps that rank r has run.
    """
    where = {
        key: (rank, position, action)
        for rank, steps in enumerate(schedule.ranks)
        for position, step in enumerate(steps)
        for action in actions_of(step)
        for key in provides_of(action)
    }

    def unmet(rank: int) -> Needs:
        """The first result that the next step of a rank waits for."""
        needs = (
            need
            for action in actions_of(schedule.ranks[rank][positions[rank]])
            for need in needs_of(action, schedule.n_stages)
        )
        return next(n for n in needs if n not in where or where[n][1] >= positions[where[n][0]])

    need_of = {rank: unmet(rank) for rank, n in enumerate(positions) if n < len(schedule.ranks[rank])}
    rank = min(need_of)
    visited: set[int] = set()
    # Follow the waits into the cycle; a rank outside of it waits only because of the cycle.
    while rank not in visited and need_of[rank] in where:
        visited.add(rank)
        rank = where[need_of[rank]][0]
    need = need_of[rank]
    step = schedule.ranks[rank][positions[rank]]
    text = (
        f"schedule {schedule.name}: rank {rank} is stuck at position {positions[rank]} ({step}), waiting for "
    )
    if need not in where:
        kind = {"F": "F", "I": "I", "backward": "B"}[need[0]]
        return (
            text
            + f"{need[1]}{kind}{need[2]}, which no rank runs; add it or correct the stage or micro-batch."
        )
    other, position, action = where[need]
    blocker = schedule.ranks[other][positions[other]]
    reason = (
        "in the same step" if other == rank and position == positions[rank] else f"at position {position}"
    )
    after = f", after {blocker}" if position > positions[other] else ""
    return (
        text + f"{action}, which rank {other} runs {reason}{after}; move {action} ahead of what waits for it."
    )


# -- a schedule for the terminal, with one row per rank and time running to the right ------------------

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
    needed = 1.0  # columns per unit of time that fit every label and one blank
    for rank, own in enumerate(times):
        with_stage = len(schedule.stages_on_rank(rank)) > 1
        for step, (start, end) in zip(schedule.ranks[rank], own, strict=True):
            if end > start:
                needed = max(needed, (len(_label(step, with_stage)) + 1) / (end - start))
    scale = float(-(-needed // 1))
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
    bubble = fsum(idle(times)) / (schedule.pp * total) if total else 0.0
    headline = (
        f"{schedule.name}: {schedule.pp} ranks, {schedule.n_stages} stages ({schedule.placement}), "
        f"{schedule.microbatches} micro-batches; length {total:g}, idle {bubble:.1%}"
    )
    return "\n\n".join([headline, *panels, f"{note}, {_IDLE} idle"])


def _label(step: Step, with_stage: bool) -> str:
    if isinstance(step, Overlap):
        return f"{_label(step.first, with_stage)}&{_label(step.second, with_stage)}"
    return str(step) if with_stage else f"{step.kind}{step.microbatch}"


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
