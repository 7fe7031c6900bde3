"""Start and end of every step from order and dependencies alone, as the longest path over a schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from math import fsum
from typing import TypeAlias

from moesim.hwmodels.errors import InputError
from moesim.simulator.schedules.action import Action, Overlap, Step, actions_of
from moesim.simulator.schedules.schedule import Schedule

Times: TypeAlias = tuple[tuple[tuple[float, float], ...], ...]
"""Start and end of every step, `times[rank][position]`."""

Needs: TypeAlias = tuple[str, int, int]
"""A result that an action waits for, as ('F' | 'backward' | 'I', stage, micro-batch)."""


@dataclass(frozen=True, slots=True)
class Durations:
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
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0):
                raise InputError(f"duration {field.name}={value} must be finite and at least 0.")

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


def longest_path(schedule: Schedule, duration: Callable[[int, Step], float]) -> Times:
    """Compute the earliest times with `duration(rank, step)`, free transfers and one step at a time per rank.

    An overlapped pair starts when both of its actions can start, and both end together. Raises InputError
    naming the rank, position and action at which the order deadlocks.
    """
    n_stages = schedule.n_stages
    ranks = schedule.ranks
    times: list[list[tuple[float, float]]] = [[] for _ in ranks]
    done: dict[Needs, float] = {}
    waiting: dict[Needs, list[int]] = {}
    ready = list(range(len(ranks)))
    while ready:
        rank = ready.pop()
        own = times[rank]
        steps = ranks[rank]
        while len(own) < len(steps):
            step = steps[len(own)]
            actions = actions_of(step)
            start = own[-1][1] if own else 0.0
            for need in (need for action in actions for need in needs_of(action, n_stages)):
                ready_at = done.get(need)
                if ready_at is None:
                    break
                start = max(start, ready_at)
            else:
                end = start + duration(rank, step)
                own.append((start, end))
                for key in (key for action in actions for key in provides_of(action)):
                    done[key] = end
                    ready.extend(waiting.pop(key, ()))
                continue
            waiting.setdefault(need, []).append(rank)
            break
    if any(len(own) < len(steps) for own, steps in zip(times, ranks, strict=True)):
        raise InputError(_stuck(schedule, [len(own) for own in times], waiting))
    return tuple(tuple(own) for own in times)


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


def _stuck(schedule: Schedule, positions: list[int], waiting: dict[Needs, list[int]]) -> str:
    """Describe one rank of the deadlock, and the action that it waits for, in one sentence."""
    need_of = {rank: need for need, ranks in waiting.items() for rank in ranks}
    where = {
        key: (rank, position, action)
        for rank, steps in enumerate(schedule.ranks)
        for position, step in enumerate(steps)
        for action in actions_of(step)
        for key in provides_of(action)
    }
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
