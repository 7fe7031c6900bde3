"""The goal of a plan search: its objective, the limits that a plan must keep, its front and its progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import inf, isfinite
from typing import Literal, get_args

import numpy as np
from msgspec import Struct

from moesim.hwmodels.arrays import BoolArray, FloatArray
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.units import SECONDS_PER_DAY, SECONDS_PER_HOUR
from moesim.simulator.planner.result import PlanRow
from moesim.simulator.scenario import Scenario

# -- goal --------------------------------------------------------------------------------------------
# The goal of a plan search: its objective, and the limits that a plan must keep.

Objective = Literal["time", "cost", "energy", "deadline", "memory"]


class Goal(Struct, frozen=True):
    """The quantity to minimise, the number of families to rank, and the limits on the run's days and cost."""

    objective: str = "time"
    top: int = 10
    deadline_days: float | None = None
    budget_usd: float | None = None

    def check(self, scenario: Scenario) -> None:
        """Raise InputError for values out of range, or if scenario or cluster lack what the goal needs."""
        names = get_args(Objective)
        if self.objective not in names:
            raise InputError(f"objective={self.objective!r} is not one of {', '.join(names)}")
        if not 1 <= self.top <= 1000:
            raise InputError(f"top={self.top} must lie between 1 and 1000")
        self.check_limits()
        if self.objective == "deadline" and self.deadline_days is None:
            raise InputError("objective=deadline needs deadline_days, the days that the run may take")
        if scenario.fleet is not None:  # the rest is checked pool by pool
            return
        if scenario.stages.blocks is not None:
            raise InputError(
                "stages.blocks fixes a part of the model: a plan search needs the whole; leave it out"
            )
        if (self.objective == "cost" or self.budget_usd is not None) and (
            scenario.machine.price_per_gpu_hour is None
        ):
            scenario.machine.usd_per_gpu_hour  # noqa: B018 - raises, with the remedy
        if self.objective == "energy":
            scenario.machine.accelerator.tdp_w  # noqa: B018 - raises if the power limit is unknown

    def check_limits(self) -> None:
        """Raise InputError for a deadline or a budget that is not a finite number above 0."""
        for key, value in (("deadline_days", self.deadline_days), ("budget_usd", self.budget_usd)):
            if value is not None and not (isfinite(value) and value > 0):
                raise InputError(f"{key}={value} must be a finite number above 0")

    def most_step_s(self, scenario: Scenario, usd_per_hour: float | None) -> float:
        """Longest step (s) that keeps deadline and budget.

        `usd_per_hour` is the price of all GPUs together, None if it is unknown.
        """
        steps = -(-scenario.run.tokens // (scenario.batch.sequences * scenario.batch.sequence_length))
        most = inf if self.deadline_days is None else self.deadline_days * SECONDS_PER_DAY / steps
        if self.budget_usd is not None and usd_per_hour is not None:
            most = min(most, self.budget_usd / usd_per_hour * SECONDS_PER_HOUR / steps)
        return most

    def value(self, row: PlanRow) -> float:
        """The quantity of a plan that the objective minimises."""
        if self.objective == "memory":
            return row.memory_bytes
        if self.objective == "energy":
            assert row.energy_j is not None
            return row.energy_j
        if self.objective == "cost" or (self.objective == "deadline" and row.cost_usd is not None):
            assert row.cost_usd is not None
            return row.cost_usd
        return row.gpu_hours if self.objective == "deadline" else row.time_s

    def ranked(self, rows: Iterable[PlanRow]) -> list[PlanRow]:
        """The rows, best first, each with its relative distance from the best."""
        kept = sorted(rows, key=lambda row: (self.value(row), row.memory_bytes, row.label))
        best = self.value(kept[0]) if kept else 1.0
        return [replace(row, margin=self.value(row) / best - 1.0) for row in kept]


# -- progress ----------------------------------------------------------------------------------------
# Progress of a search: each part reports its own share, which is scaled to a share of the whole.

OnProgress = Callable[[float, str], None]
"""Called with the share of the work that is done (0 to 1) and a text on the current work."""


def no_progress(share: float, text: str) -> None:
    """Discard the report."""


def rising(say: OnProgress) -> OnProgress:
    """A callback whose share never falls: a part that turns out to be longer than expected stands still."""
    highest = 0.0

    def never_falling(share: float, text: str) -> None:
        nonlocal highest
        highest = max(highest, min(1.0, share))
        say(highest, text)

    return never_falling


def scaled(say: OnProgress, first: float, last: float) -> OnProgress:
    """A callback for one part of the work, which lasts from share `first` to share `last` of the whole."""
    return lambda share, text: say(first + share * (last - first), text)


def equal_part(say: OnProgress, number: int, count: int, first: float, last: float) -> OnProgress:
    """A callback for the `number`-th (from 0) of `count` equal parts between `first` and `last`."""
    step = (last - first) / count
    return scaled(say, first + number * step, first + (number + 1) * step)


# -- pareto ------------------------------------------------------------------------------------------
# Pareto fronts: the plans that no other plan dominates.


def front(points: Sequence[Sequence[float]]) -> list[int]:
    """Positions, ascending, of the points that no other point dominates; of equal points the first stays.

    A point dominates another if it is smaller in one value and no larger in any.
    """
    kept: list[int] = []
    order = sorted(range(len(points)), key=lambda n: (tuple(points[n]), n))
    for n in order:
        mine = points[n]
        if not any(all(a <= b for a, b in zip(points[k], mine, strict=True)) for k in kept):
            kept.append(n)
    return sorted(kept)


def staircase(memory: FloatArray, time_s: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Memory in ascending order, and the least time of all plans with at most that memory."""
    order = np.lexsort((time_s, memory))
    return memory[order], np.minimum.accumulate(time_s[order])


def dominated(memory: FloatArray, bound_s: FloatArray, steps: tuple[FloatArray, FloatArray]) -> BoolArray:
    """Whether each plan is dominated: another has no more memory and a time no longer than its bound.

    `steps` is the staircase of the estimated plans.
    """
    if not len(steps[0]):
        return np.zeros(len(memory), dtype=bool)
    at = np.searchsorted(steps[0], memory, side="right") - 1
    best = np.where(at >= 0, steps[1][np.maximum(at, 0)], np.inf)
    return np.asarray(best <= bound_s)
