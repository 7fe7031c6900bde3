"""Arrays of the plans of a space that are legal and fit, with their prices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.simulator.layout.stages import StageAssignment
from moesim.simulator.model.precision import Precision
from moesim.simulator.planner.closed_form import PricedPlan
from moesim.simulator.planner.expert_loads import ExpertLoads, MemberLag
from moesim.simulator.planner.frames import Frame
from moesim.simulator.planner.placements import price_key
from moesim.simulator.planner.prices import PriceBook
from moesim.simulator.planner.refusals import Refusals
from moesim.simulator.planner.replay import Pattern
from moesim.simulator.planner.space import Space
from moesim.simulator.scenario.parallel import ParallelPlan

# -- plan arrays -------------------------------------------------------------------------------------
# Arrays of the plans of a space that are legal and fit.


@dataclass(frozen=True, slots=True)
class FrameGroup:
    """Frames that share a schedule pattern, with the stage layouts tried for it."""

    pattern: Pattern
    frames: list[Frame]
    layouts: tuple[StageAssignment, ...]


@dataclass
class Candidates:
    """Plans that are legal and fit; the arrays have one entry for each plan, whatever its placement.

    `index` is the plan's position in its group over (frame, precision, policy, sms, ZeRO stage).
    `replicas`: numbers of redundant experts of the placements, fewest first. `layout` and `bytes_of` are
    [replicas, plans]; bytes are infinite if the plan does not fit. `memory`, `placement` and `time_s` belong
    to the fastest placement once the search has tried them (before that they hold the least bytes, 0 and
    NaN). `others` holds the slower placements that were tried, as (seconds, bytes, placement).
    """

    space: Space
    groups: list[FrameGroup]
    group: npt.NDArray[np.int32]
    index: IntArray
    layout: npt.NDArray[np.int8]
    memory: FloatArray
    bound: FloatArray
    family: npt.NDArray[np.int32]
    time_s: FloatArray
    refused: Refusals
    legal: int
    fitting: int
    """Number of plans that are legal and fit, each placement counted."""
    books: dict[tuple[int, bool], PriceBook]
    loads: ExpertLoads
    replicas: tuple[int, ...]
    bytes_of: FloatArray
    placement: npt.NDArray[np.int8]
    others: dict[int, list[tuple[float, float, int]]] = field(default_factory=dict)

    @cached_property
    def recipes(self) -> tuple[Precision, ...]:
        """The recipe of each precision of the space."""
        return self.space.recipes

    @property
    def book(self) -> PriceBook:
        """The lowest prices of any placement: fewest replicas, every group of experts on its node."""
        return self.books[min(self.books)]

    @property
    def priced(self) -> int:
        """Number of price tables that were computed."""
        return sum(book.priced for book in self.books.values())

    def placements_of(self, number: int) -> list[int]:
        """Positions of the placements that are legal for a plan and fit."""
        if len(self.space.placement) == 1:
            return [0]
        layout = self.groups[int(self.group[number])].frames[self.axes_of(number)[0]].layout
        return [
            p
            for p, placement in enumerate(self.space.placement)
            if self.loads.problem(layout, placement) is None and np.isfinite(self.bytes_with(number, p))
        ]

    def bytes_with(self, number: int, placement: int) -> float:
        """Bytes of a plan with a placement of the space; infinite if it does not fit."""
        return float(self.bytes_of[self._row(placement), number])

    def layout_with(self, number: int, placement: int) -> int:
        """Position in the group's stage layouts of a plan's layout with a placement of the space."""
        return int(self.layout[self._row(placement), number])

    def _row(self, placement: int) -> int:
        return self.replicas.index(price_key(self.space.placement[placement])[0])

    def axes_of(self, number: int) -> tuple[int, ...]:
        """Positions in the lists of frames, precisions, policies, SMs and ZeRO stages."""
        group = self.groups[int(self.group[number])]
        place = np.unravel_index(int(self.index[number]), (len(group.frames), *inner_axes(self.space)))
        return tuple(int(n) for n in place)

    def axes(self, number: int) -> tuple[Frame, int, int, int, int]:
        """Frame and positions in the lists of precisions, policies, SMs and ZeRO stages."""
        frame, *rest = self.axes_of(number)
        return (self.groups[int(self.group[number])].frames[frame], *rest)  # type: ignore[return-value]

    def assignment(self, number: int, placement: int | None = None) -> StageAssignment:
        """Stage layout of a plan, with its own placement or another one."""
        which = int(self.placement[number]) if placement is None else placement
        return self.groups[int(self.group[number])].layouts[self.layout_with(number, which)]


def inner_axes(space: Space) -> tuple[int, int, int, int]:
    """Numbers of precisions, recompute policies, SM counts and ZeRO stages in a space."""
    return len(space.precision), len(space.recompute), len(space.sms), len(space.zero_stage)


# -- priced candidates -------------------------------------------------------------------------------
# Prices the candidates of a search; parts that plans share are looked up once for all of them.


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
        # Positions in the lists of frames, precisions, policies, SMs and ZeRO stages [plans, axes].
        index, inner = (
            self.candidates.index[np.array([number for number, _ in chosen], dtype=np.int64)],
            inner_axes(self.candidates.space),
        )
        most = int(index.max(initial=0)) // self.candidates.space.inner + 1
        axes = np.array(np.unravel_index(index, (most, *inner))).T
        return [
            self._priced(int(c.group[number]), own, c.layout_with(number, p), p)
            for (number, p), own in zip(chosen, axes.tolist(), strict=True)
        ]

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
        # Layers of each stage, counted once a layout; the candidates keep the layouts alive.
        if id(stages) not in self._layers:
            self._layers[id(stages)] = stages.layers_per_stage
        return c.books[price_key(c.space.placement[placement])].priced_plan(
            frame, plan, choice, spread, stages, self._layers[id(stages)]
        )
