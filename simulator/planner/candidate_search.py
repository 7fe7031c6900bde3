"""Searches the plans of one scenario: bounds exclude most plans, and the closed form estimates the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from math import ceil, inf
from typing import Any

import numpy as np
from msgspec import Struct, field

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.hwmodels.errors import InputError
from moesim.simulator.cost.plan_costs import PlanCosts
from moesim.simulator.layout.job import resolve
from moesim.simulator.layout.parallel import Layout
from moesim.simulator.layout.stages import blocks_of, from_layers_per_stage
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.planner.candidates import find_candidates
from moesim.simulator.planner.closed_form import CLOSED_FORM_ERROR, CostedPlan, Replays, step_seconds
from moesim.simulator.planner.expert_loads import MemberLag
from moesim.simulator.planner.frames import Frame
from moesim.simulator.planner.goal import Goal, OnProgress, dominated, no_progress, staircase
from moesim.simulator.planner.placements import cost_key
from moesim.simulator.planner.plan_arrays import Candidates, inner_axes
from moesim.simulator.planner.replay import pattern
from moesim.simulator.planner.result import (
    PlanRow,
    PlanStep,
    closed_form_memory,
    make_row,
    scenario_of,
)
from moesim.simulator.planner.space import PlanSpace, with_defaults
from moesim.simulator.planner.trainer_limits import TrainerLimits
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.parallel import ParallelPlan
from moesim.simulator.schedules import SCHEDULES
from moesim.simulator.trainers.trainer import Trainer

BATCH = 1024
"""Plans estimated together: a larger batch estimates plans that nobody needs, a smaller one is slower."""

MOST_ESTIMATES = 50_000
"""Most plans that a search estimates, which takes about ten seconds; a search that stops here says so."""

FAMILIES_A_BATCH, MOST_AHEAD = 125, 8
"""Families wanted for each batch that is evaluated together with the next ones, and the most such batches:
larger batches are faster, and what is evaluated in vain stays a small part of all."""

FRONT_ROUNDS = 64
"""Most rounds of refining the Pareto front of time and memory."""

FRONT_SPAN = 2.0
"""The front ends at this multiple of the best step time: nobody doubles the step to save memory."""


class CandidateSearch(Struct):
    """The search over one set of candidates; `estimated` counts the closed forms that were evaluated."""

    scenario: Scenario
    shape: ModelShape
    candidates: Candidates
    estimated: int = 0
    capped: bool = False
    _plans: dict[tuple[int, int, int], ParallelPlan] = field(default_factory=dict)
    _spreads: dict[tuple[int, int, int], MemberLag] = field(default_factory=dict)
    _replays: dict[int, Replays] = field(default_factory=dict)
    """Replays of the plans that were estimated, by group."""
    _seconds: dict[tuple[int, int], float] = field(default_factory=dict)
    """Closed forms of plans and placements that were evaluated ahead of their turn."""

    def estimate(self, numbers: Iterable[int], alive: Callable[[float], None] = lambda share: None) -> None:
        """Estimate some plans with every placement; plans that share a schedule replay go together.

        `alive` is called every few plans with the share of them that is done.
        """
        c = self.candidates
        todo = [(int(n), p) for n in numbers if np.isnan(c.time_s[n]) for p in c.placements_of(int(n))]
        self._compute(todo, alive)
        self.estimated += len(todo)
        tried: dict[int, list[tuple[float, float, int]]] = {}
        for number, p in todo:
            # Extrapolated from short samples, a time may fall a little below what is proven.
            at_least = max(self._seconds.pop((number, p)), float(c.bound[number]))
            tried.setdefault(number, []).append((at_least, c.bytes_with(number, p), p))
        for number, all_ in tried.items():
            c.time_s[number], c.memory[number], c.placement[number] = best = min(all_)
            if len(all_) > 1:
                c.others[number] = [one for one in all_ if one != best]

    def _compute(self, todo: Iterable[tuple[int, int]], alive: Callable[[float], None]) -> None:
        """Evaluate the closed forms of some plans and placements that have not been evaluated."""
        c = self.candidates
        batches: dict[int, list[tuple[int, int]]] = {}
        for plan in todo:
            if plan not in self._seconds:
                batches.setdefault(int(c.group[plan[0]]), []).append(plan)
        whole, done = max(1, sum(map(len, batches.values()))), 0
        for key in sorted(batches):
            alive(done / whole)
            done += len(batches[key])
            chosen, shaped = batches[key], c.groups[key].pattern
            order = self.scenario.communication.order_of(shaped.name)
            replays = self._replays.setdefault(key, Replays())
            times = step_seconds(self._costed(chosen), shaped, order, replays)
            self._seconds.update(zip(chosen, times.tolist(), strict=True))

    def _costed(self, chosen: Sequence[tuple[int, int]]) -> list[CostedPlan]:
        """The costs of some plans, each with a placement; parts that plans share are looked up once."""
        c, space, costed = self.candidates, self.candidates.space, []
        index = c.index[np.array([number for number, _ in chosen], dtype=np.int64)]
        most = int(index.max(initial=0)) // space.inner + 1
        axes = np.array(np.unravel_index(index, (most, *inner_axes(space)))).T.tolist()
        for (number, placement), (n, p, r, s, z) in zip(chosen, axes, strict=True):
            which = int(c.group[number])
            group = c.groups[which]
            frame, stages = group.frames[n], group.layouts[c.layout_with(number, placement)]
            plan = self._plans.get((which, n, z))
            if plan is None:
                plan = frame.plan.model_copy(update={"zero_stage": space.zero_stage[z]})
                self._plans[which, n, z] = plan
            spread = self._spreads.get((which, n, placement))
            if spread is None:
                spread = c.loads.spread(frame, space.placement[placement])
                self._spreads[which, n, placement] = spread
            choice = c.recipes[p], space.recompute[r], space.sms[s]
            costs = c.costs_of[cost_key(space.placement[placement])]
            costed.append(CostedPlan.of(costs, frame, plan, choice, spread, stages))
        return costed

    def seconds_of(self, scenario: Scenario, layers: tuple[int, ...], microbatches: int) -> float:
        """Closed-form step time, in seconds, of any plan of this cluster with a named schedule."""
        plan, placement = scenario.parallel, scenario.routing.eplb
        costs = self.candidates.costs_of.get(cost_key(placement))
        costs = costs or PlanCosts(self.candidates.costs.job.with_scenario(scenario))
        shaped = pattern(scenario.schedule, plan.pp, microbatches, plan.vpp, scenario.software.awaited_sends)
        layout = Layout(plan, costs.cluster.n_gpus, costs.cluster.node.n_gpus)
        frame = Frame(plan, scenario.schedule, microbatches, layout, shaped)
        stages = from_layers_per_stage(blocks_of(self.shape), layers)
        choice = scenario.recipe, scenario.recompute, scenario.communication.sms
        spread = self.candidates.loads.spread(frame, placement)
        costed = CostedPlan.of(costs, frame, plan, choice, spread, stages)
        order = scenario.communication.order_of(scenario.schedule)
        return float(step_seconds([costed], shaped, order)[0])

    def fastest(self, families: int, at_least_s: float = 0.0, say: OnProgress = no_progress) -> float:
        """Estimate plans in order of their bounds until no other can be among the best families.

        Returns the step time (s) up to which this is proven: every plan whose lower bound is below it, or
        below `at_least_s`, has been estimated.
        """
        c = self.candidates
        order = np.argsort(c.least_s, kind="stable")
        done, evaluated, share = 0, 0, 0.0
        ahead = BATCH * max(1, min(MOST_AHEAD, families // FAMILIES_A_BATCH))
        open_ = ahead
        limit = float("inf")
        while done < len(order) and c.least_s[order[done]] <= max(limit, at_least_s):
            if self.estimated >= MOST_ESTIMATES:
                self.capped = True
                break
            text = self._done()
            if done >= evaluated:
                # As many as all before, since plans of one schedule are faster together.
                more = BATCH * ceil(min(done, open_ - done) / BATCH)
                near = order[done : done + max(ahead, more)]
                # Until the limit is known, the plans that are evaluated together may be all that are needed.
                last = min(1.0, max(share, (done + len(near)) / max(1, min(open_, len(order)))))
                alive = partial(_within, say, share, last, text)
                self._compute([(int(n), p) for n in near for p in c.placements_of(int(n))], alive)
                evaluated = done + len(near)
            self.estimate(order[done : done + BATCH])
            done += BATCH
            best = self.best_of_families()
            limit = c.time_s[best[min(families, len(best)) - 1]] if len(best) >= families else float("inf")
            if np.isfinite(limit):
                open_ = int(np.searchsorted(c.least_s[order], max(limit, at_least_s)))
            share = min(1.0, done / max(1, open_))
            say(share, self._done())
        return float(c.least_s[order[done]]) if done < len(order) else float("inf")

    def _done(self) -> str:
        """What the search has done, for its progress."""
        return f"{self.estimated:,} plans estimated" if self.estimated else "ordering plans by their bounds"

    def best_of_families(self) -> list[int]:
        """The fastest estimated plan of every family, fastest first; ties by memory, then by number."""
        c = self.candidates
        known = np.nonzero(~np.isnan(c.time_s))[0]
        order = known[np.lexsort((known, c.memory[known], c.time_s[known]))]
        _, first = np.unique(c.family[order], return_index=True)
        return [int(n) for n in order[np.sort(first)]]

    def leanest(self, families: int) -> list[int]:
        """Estimate and return the plans of least memory, one of each family; ties go by bound."""
        c = self.candidates
        order = np.lexsort((np.arange(len(c.memory)), c.bound, c.memory))
        _, first = np.unique(c.family[order], return_index=True)
        leanest = [int(n) for n in order[np.sort(first)][:families]]
        self.estimate(leanest)
        for number in leanest:
            self._take_leanest(number)
        return leanest

    def _take_leanest(self, number: int) -> None:
        """Give a plan its placement of least memory instead of its fastest; ties go by time."""
        c = self.candidates
        all_ = [(c.memory[number], c.time_s[number], c.placement[number])]
        all_ += [(bytes_, seconds, p) for seconds, bytes_, p in c.others.get(number, ())]
        c.memory[number], c.time_s[number], c.placement[number] = min(all_)

    def front(self, say: OnProgress = no_progress) -> list[tuple[int, int]]:
        """The Pareto front of closed-form time and memory, as (plan, placement), up to twice the best time.

        A plan whose bound an estimate dominates cannot be on the front. Of the other plans, those on the
        front of the bounds are estimated, round after round, until none is left.
        """
        c = self.candidates
        open_ = np.nonzero(np.isnan(c.time_s))[0]
        left: list[int] = []
        evaluated = 0
        for _ in range(FRONT_ROUNDS):
            known = np.nonzero(~np.isnan(c.time_s))[0]
            most = FRONT_SPAN * c.time_s[known].min() if len(known) else np.inf
            steps = staircase(*self._points()[:2])
            # A plan that is excluded once stays excluded.
            open_ = open_[np.isnan(c.time_s[open_]) & (c.least_s[open_] <= most)]
            open_ = open_[~dominated(c.memory[open_], c.least_s[open_], steps)]
            if not len(open_):
                break
            text = f"{self._done()}; looking for trade-offs with memory"
            left.append(len(open_))
            # The first round excludes most plans; from then on they become fewer at a steady pace.
            share = 0.0 if len(left) < 3 else 1.0 - left[-1] / left[1]
            alive = partial(_within, say, share, share, text)
            layers = _lowest(open_, c.memory[open_], c.least_s[open_])
            lowest = next(layers)
            if any((n, p) not in self._seconds for n in lowest for p in c.placements_of(n)):
                # The layers behind are the next rounds, but for plans that this one will exclude.
                near, most = lowest, max(BATCH, evaluated)
                while len(near) < most and (layer := next(layers, None)):
                    near = near + layer
                self._compute([(n, p) for n in near for p in c.placements_of(n)], alive)
                evaluated += len(near)
            self.estimate(lowest, alive)
        memory, seconds, number, placement = self._points()
        order = np.lexsort((placement, number, seconds, memory))
        times = seconds[order]
        first = np.concatenate([[True], times[1:] < np.minimum.accumulate(times)[:-1]])
        kept = order[first & (times <= FRONT_SPAN * times.min())]
        return [(int(number[n]), int(placement[n])) for n in kept]

    def _points(self) -> tuple[FloatArray, FloatArray, IntArray, IntArray]:
        """(bytes, seconds, plan, placement) of every estimate."""
        c = self.candidates
        known = np.nonzero(~np.isnan(c.time_s))[0]
        rest = [(b, t, n, p) for n, tried in c.others.items() for t, b, p in tried]
        more = np.array(rest, dtype=np.float64).reshape(-1, 4).T
        return (
            np.concatenate([c.memory[known], more[0]]),
            np.concatenate([c.time_s[known], more[1]]),
            np.concatenate([known, more[2].astype(np.int64)]),
            np.concatenate([c.placement[known], more[3]]).astype(np.int64),
        )


def _lowest(numbers: IntArray, memory: FloatArray, bound: FloatArray) -> Iterator[list[int]]:
    """The plans on the front of memory and bound, then those on the front of the rest, and so on."""
    order = np.lexsort((bound, memory))
    while len(order):
        least = np.minimum.accumulate(bound[order])
        first = np.concatenate([[True], bound[order][1:] < least[:-1]])
        yield [int(n) for n in numbers[order[first]]]
        order = order[~first]


def _within(say: OnProgress, first: float, last: float, text: str, share: float) -> None:
    """Report the share of a part that lasts from share `first` to share `last`."""
    say(first + share * (last - first), text)


# -- variant search ----------------------------------------------------------------------------------
# Searches the plans of one variant of a scenario: finds the candidates and estimates the promising ones.

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
        return make_row(scenario, self.cluster, simulated, estimate, changed=self.changed)

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
        step = simulated or closed_form_memory(scenario, self.shape, self.cluster, c, number, placement)
        if self._families is None:
            self._families = np.bincount(c.family)
        family = int(self._families[c.family[number]])
        return make_row(
            scenario, self.cluster, step, float(seconds), float(c.bound[number]), family, self.changed
        )
