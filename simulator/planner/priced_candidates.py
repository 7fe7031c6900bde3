"""Prices the candidates of a search; parts that plans share are looked up once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from moesim.hwmodels.arrays import IntArray
from moesim.simulator.layout.stages import StageAssignment
from moesim.simulator.planner.closed_form import PricedPlan
from moesim.simulator.planner.member_lag import MemberLag
from moesim.simulator.planner.plan_arrays import Candidates, inner_axes
from moesim.simulator.scenario.parallel import ParallelPlan


@dataclass(slots=True)
class PricedCandidates:
    """The prices of candidates, by (plan, placement)."""

    candidates: Candidates
    _layers: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _plans: dict[tuple[int, int, int], ParallelPlan] = field(default_factory=dict)
    _spreads: dict[tuple[int, int, int], MemberLag] = field(default_factory=dict)

    def priced(self, chosen: Sequence[tuple[int, int]]) -> list[PricedPlan]:
        """The prices of some plans, each with a placement of the space."""
        c = self.candidates
        axes = self._axes(np.array([number for number, _ in chosen], dtype=np.int64))
        return [
            self._priced(int(c.group[number]), own, c.layout_with(number, p), p)
            for (number, p), own in zip(chosen, axes.tolist(), strict=True)
        ]

    def _axes(self, numbers: IntArray) -> IntArray:
        """Positions in the lists of frames, precisions, policies, SMs and ZeRO stages [plans, axes]."""
        index, inner = self.candidates.index[numbers], inner_axes(self.candidates.space)
        most = int(index.max(initial=0)) // self.candidates.space.inner + 1
        return np.array(np.unravel_index(index, (most, *inner))).T

    def _priced(self, group: int, axes: Sequence[int], layout: int, placement: int) -> PricedPlan:
        c, (n, p, r, s, z) = self.candidates, axes
        held = c.groups[group]
        frame, stages = held.frames[n], held.layouts[layout]
        plan = self._plans.get((group, n, z))
        if plan is None:
            plan = frame.plan.model_copy(update={"zero_stage": c.space.zero_stage[z]})
            self._plans[group, n, z] = plan
        spread = self._spreads.get((group, n, placement))
        if spread is None:
            spread = c.loads.spread(frame, c.space.placement[placement])
            self._spreads[group, n, placement] = spread
        choice = c.recipes[p], c.space.recompute[r], c.space.sms[s]
        return c.book_of(placement).priced_plan(frame, plan, choice, spread, stages, self._layers_of(stages))

    def _layers_of(self, layout: StageAssignment) -> tuple[int, ...]:
        """Layers of each stage, counted once a layout; the candidates keep the layouts alive."""
        if id(layout) not in self._layers:
            self._layers[id(layout)] = layout.layers_per_stage
        return self._layers[id(layout)]
