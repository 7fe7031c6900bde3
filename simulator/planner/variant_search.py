"""Searches the plans of one variant of a scenario: finds the candidates and estimates the promising ones."""

from __future__ import annotations

from concurrent.futures import Executor
from math import inf
from typing import Any

import numpy as np

from moesim.hwmodels.arrays import IntArray
from moesim.hwmodels.errors import InputError
from moesim.simulator.layout.job import resolve
from moesim.simulator.planner.candidate_search import CandidateSearch
from moesim.simulator.planner.candidates import find_candidates
from moesim.simulator.planner.closed_form import CLOSED_FORM_ERROR
from moesim.simulator.planner.goal import Goal
from moesim.simulator.planner.progress import OnProgress
from moesim.simulator.planner.result import PlanRow
from moesim.simulator.planner.rows import Estimates, PlanStep, closed_form_memory, make_row, scenario_of
from moesim.simulator.planner.space import PlanSpace, with_defaults
from moesim.simulator.planner.trainer_limits import TrainerLimits
from moesim.simulator.scenario import Scenario
from moesim.simulator.schedules import SCHEDULES
from moesim.simulator.trainers.trainer import Trainer

NEAR_BEST = 1.05
"""The scenario's own plan gets a rank if its time is at most this multiple of the best; the search then
estimates every plan that may be faster."""

ROUNDING = 1e-9
"""Relative difference up to which two closed-form times count as equal."""


class VariantSearch:
    """One variant of a scenario, with its candidates and those chosen for simulation."""

    def __init__(
        self,
        changed: dict[str, Any],
        scenario: Scenario,
        wanted: PlanSpace,
        goal: Goal,
        say: OnProgress,
        trainer: Trainer | None = None,
        pool: Executor | None = None,
    ) -> None:
        """`changed`: the variant's scenario keys and values. Raises InputError for an unusable space."""
        self.changed, self.scenario, self.headroom = changed, scenario, wanted.headroom
        job = resolve(scenario)
        self.shape, self.cluster = job.shape, job.cluster
        fixed = scenario.stages.layers if wanted.layout == "scenario" else None
        if fixed is not None and scenario.stages.mtp is not None:
            raise InputError("a search keeps MTP modules on the last stage: leave out stages.mtp")
        if wanted.layout == "scenario" and fixed is None:
            raise InputError("layout=scenario, but the scenario has no stages.layers; use layout=balanced")
        self.notes: tuple[str, ...] = ()
        space, limits = with_defaults(wanted, scenario, self.shape, self.cluster), None
        if trainer is not None:
            limits = TrainerLimits(trainer, scenario)
            space, self.notes = limits.chosen(wanted, space)
        usd = None if goal.budget_usd is None else self.cluster.usd_per_gpu_hour * self.cluster.n_gpus
        self.goal, self.most_s = goal, goal.most_step_s(scenario, usd)
        self.candidates = find_candidates(job, space, fixed, self.most_s, say, limits, pool)
        self.study = CandidateSearch(scenario, self.shape, self.candidates)
        self.proven_s = inf
        self.chosen: list[int] = []
        self.front: list[tuple[int, int]] = []
        self._families: IntArray | None = None

    def own(self, simulated: PlanStep) -> PlanRow:
        """The row of the scenario's own plan."""
        scenario, estimate = self.scenario, None
        if scenario.schedule in SCHEDULES and scenario.stages.mtp is None:
            estimate = self.study.seconds_of(scenario, simulated.layers, simulated.microbatches)
        return make_row(scenario, self.cluster, simulated, Estimates(estimate, changed=self.changed))

    def explore(self, own: PlanRow | None, say: OnProgress) -> None:
        """Estimate every plan that may be among the best, and choose those to simulate."""
        top = self.goal.top
        if self.goal.objective == "memory":
            self.chosen = self.study.leanest(top)
        else:
            self.proven_s = self.study.fastest(top, say=say)
            best = self.study.best_of_families()
            fastest = self.candidates.time_s[best[0]]
            if own is not None and (own.closed_form_s or inf) <= NEAR_BEST * fastest:
                self.proven_s = self.study.fastest(top, own.closed_form_s or 0.0, say=say)
            self.chosen = self.study.best_of_families()[:top]

    def rank_of(self, own: PlanRow) -> int | None:
        """One plus the families with a faster closed form.

        None unless every plan that may be faster has been estimated.
        """
        if own.closed_form_s is None or own.closed_form_s > self.proven_s:
            return None
        times = self.candidates.time_s[self.study.best_of_families()]
        return int((times < own.closed_form_s * (1.0 - ROUNDING)).sum()) + 1

    def rivals(self, rows: list[PlanRow]) -> int:
        """Number of unsimulated families whose closed form is within its error of the fastest in `rows`."""
        best = min((row.closed_form_s or inf for row in rows), default=inf)
        times = self.candidates.time_s[self.study.best_of_families()]
        return max(0, int((times <= best * (1.0 + CLOSED_FORM_ERROR)).sum()) - len(self.chosen))

    def row(self, number: int, simulated: PlanStep | None, placement: int | None = None) -> PlanRow:
        """The row of a plan, with its fastest placement or another one that was tried."""
        c = self.candidates
        scenario = scenario_of(self.scenario, c, number, placement)
        tried = {which: seconds for seconds, _, which in c.others.get(number, ())}
        seconds = c.time_s[number] if placement is None else tried.get(placement, c.time_s[number])
        found = simulated or closed_form_memory(scenario, self.shape, self.cluster, c, number, placement)
        if self._families is None:
            self._families = np.bincount(c.family)
        family = int(self._families[c.family[number]])
        known = Estimates(
            float(seconds), float(c.bound[number]), c.assignment(number, placement), family, self.changed
        )
        return make_row(scenario, self.cluster, found, known)
