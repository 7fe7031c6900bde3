"""Searches the plans of one scenario: bounds exclude most plans, and the closed form estimates the rest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.simulator.layout.parallel import Layout
from moesim.simulator.layout.stages import StageAssignment, blocks_of, from_layers_per_stage
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.planner.closed_form import PricedPlan, Replays, step_seconds
from moesim.simulator.planner.frames import Frame
from moesim.simulator.planner.pareto import dominated, staircase
from moesim.simulator.planner.pattern import pattern
from moesim.simulator.planner.placements import price_key
from moesim.simulator.planner.plan_arrays import Candidates
from moesim.simulator.planner.prices import PriceBook
from moesim.simulator.planner.progress import OnProgress, no_progress
from moesim.simulator.scenario import Scenario

BATCH = 1024
"""Plans estimated together: a larger batch estimates plans that nobody needs, a smaller one is slower."""

MOST_ESTIMATES = 50_000
"""Most plans that a search estimates, which takes about ten seconds; a search that stops here says so."""

FRONT_ROUNDS = 64
"""Most rounds of refining the Pareto front of time and memory."""

FRONT_SPAN = 2.0
"""The front ends at this multiple of the best step time: nobody doubles the step to save memory."""


@dataclass(slots=True)
class CandidateSearch:
    """The search over one set of candidates; `estimated` counts the closed forms that were evaluated."""

    scenario: Scenario
    shape: ModelShape
    candidates: Candidates
    estimated: int = 0
    capped: bool = False
    _layers: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _replays: dict[int, Replays] = field(default_factory=dict)
    """Replays of the plans that were estimated, by group."""

    def estimate(self, numbers: Iterable[int]) -> None:
        """Estimate some plans with every placement; plans that share a schedule replay go together."""
        c = self.candidates
        batches: dict[int, list[tuple[int, int]]] = {}
        for number in [int(number) for number in numbers if np.isnan(c.time_s[number])]:
            for p in c.placements_of(number):
                batches.setdefault(int(c.group[number]), []).append((number, p))
        tried: dict[int, list[tuple[float, float, int]]] = {}
        for key in sorted(batches):
            chosen, shaped = batches[key], c.groups[key].pattern
            priced = [self._priced(number, p) for number, p in chosen]
            order = self.scenario.communication.order_of(shaped.name)
            times = step_seconds(priced, shaped, order, self._replays.setdefault(key, Replays()))
            self.estimated += len(chosen)
            for (number, p), seconds in zip(chosen, times, strict=True):
                # Extrapolated from short samples, a time may fall a little below what is proven.
                at_least = max(float(seconds), float(c.bound[number]))
                tried.setdefault(number, []).append((at_least, c.bytes_with(number, p), p))
        for number, all_ in tried.items():
            c.time_s[number], c.memory[number], c.placement[number] = best = min(all_)
            if len(all_) > 1:
                c.others[number] = [one for one in all_ if one != best]

    def _priced(self, number: int, placement: int) -> PricedPlan:
        c = self.candidates
        frame, p, r, s, z = c.axes(number)
        choice = c.space.recipes[p], c.space.recompute[r], c.space.sms[s]
        plan = frame.plan.model_copy(update={"zero_stage": c.space.zero_stage[z]})
        layout, book = c.assignment(number, placement), c.book_of(placement)
        spread = c.loads.spread(frame, c.space.placement[placement])
        return book.priced_plan(frame, plan, choice, spread, layout, self._layers_of(layout))

    def _layers_of(self, layout: StageAssignment) -> tuple[int, ...]:
        """Layers of each stage, counted once a layout; the candidates keep the layouts alive."""
        if id(layout) not in self._layers:
            self._layers[id(layout)] = layout.layers_per_stage
        return self._layers[id(layout)]

    def seconds_of(self, scenario: Scenario, layers: tuple[int, ...], microbatches: int) -> float:
        """Closed-form step time, in seconds, of any plan of this cluster with a named schedule."""
        plan, placement = scenario.parallel, scenario.routing.eplb
        least = self.candidates.book
        book = self.candidates.books.get(price_key(placement))
        book = book or PriceBook(scenario, self.shape, least.cluster, least.profile)
        shaped = pattern(scenario.schedule, plan.pp, microbatches, plan.vpp, scenario.software.awaited_sends)
        layout = Layout(plan, book.cluster.n_gpus, book.cluster.node.n_gpus)
        frame = Frame(plan, scenario.schedule, microbatches, layout, shaped)
        stages = from_layers_per_stage(blocks_of(self.shape), layers)
        choice = scenario.recipe, scenario.recompute, scenario.communication.sms
        spread = self.candidates.loads.spread(frame, placement)
        priced = book.priced_plan(frame, plan, choice, spread, stages, layers)
        order = scenario.communication.order_of(scenario.schedule)
        return float(step_seconds([priced], shaped, order)[0])

    def fastest(self, families: int, at_least_s: float = 0.0, say: OnProgress = no_progress) -> float:
        """Estimate plans in order of their bounds until no other can be among the best families.

        Returns the step time (s) up to which this is proven: every plan whose lower bound is below it, or
        below `at_least_s`, has been estimated.
        """
        c = self.candidates
        order = np.argsort(c.bound, kind="stable")
        done = 0
        limit = float("inf")
        while done < len(order) and c.bound[order[done]] <= max(limit, at_least_s):
            if self.estimated >= MOST_ESTIMATES:
                self.capped = True
                break
            self.estimate(order[done : done + BATCH])
            done += BATCH
            best = self.best_of_families()
            open_ = (
                np.searchsorted(c.bound[order], max(limit, at_least_s)) if np.isfinite(limit) else len(order)
            )
            say(min(1.0, done / max(1, int(open_))), f"{self.estimated:,} plans in closed form")
            limit = c.time_s[best[min(families, len(best)) - 1]] if len(best) >= families else float("inf")
        return float(c.bound[order[done]]) if done < len(order) else float("inf")

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
        found = [int(n) for n in order[np.sort(first)][:families]]
        self.estimate(found)
        for number in found:
            self._take_leanest(number)
        return found

    def _take_leanest(self, number: int) -> None:
        """Give a plan its placement of least memory instead of its fastest; ties go by time."""
        c = self.candidates
        all_ = [(c.memory[number], c.time_s[number], c.placement[number])]
        all_ += [(bytes_, seconds, p) for seconds, bytes_, p in c.others.get(number, ())]
        c.memory[number], c.time_s[number], c.placement[number] = min(all_)

    def front(self) -> list[tuple[int, int]]:
        """The Pareto front of closed-form time and memory, as (plan, placement), up to twice the best time.

        A plan whose bound an estimate dominates cannot be on the front. Of the other plans, those on the
        front of the bounds are estimated, round after round, until none is left.
        """
        c = self.candidates
        open_ = np.nonzero(np.isnan(c.time_s))[0]
        for _ in range(FRONT_ROUNDS):
            known = np.nonzero(~np.isnan(c.time_s))[0]
            most = FRONT_SPAN * c.time_s[known].min() if len(known) else np.inf
            steps = staircase(*self._points()[:2])
            # A plan that is excluded once stays excluded.
            open_ = open_[np.isnan(c.time_s[open_]) & (c.bound[open_] <= most)]
            open_ = open_[~dominated(c.memory[open_], c.bound[open_], steps)]
            if not len(open_):
                break
            self.estimate(_lowest(open_, c.memory[open_], c.bound[open_]))
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


def _lowest(numbers: IntArray, memory: FloatArray, bound: FloatArray) -> list[int]:
    """The plans on the front of memory and bound, which are estimated next."""
    order = np.lexsort((bound, memory))
    least = np.minimum.accumulate(bound[order])
    first = np.concatenate([[True], bound[order][1:] < least[:-1]])
    return [int(n) for n in numbers[order[first]]]
