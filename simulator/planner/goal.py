"""The goal of a plan search: its objective, and the limits that a plan must keep."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import Literal, get_args

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.units import SECONDS_PER_DAY, SECONDS_PER_HOUR
from moesim.simulator.planner.result import PlanRow
from moesim.simulator.scenario import Scenario

Objective = Literal["time", "cost", "energy", "deadline", "memory"]


@dataclass(frozen=True, slots=True)
class Goal:
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
        for key, value in (("deadline_days", self.deadline_days), ("budget_usd", self.budget_usd)):
            if value is not None and not (isfinite(value) and value > 0):
                raise InputError(f"{key}={value} must be a finite number above 0")
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
