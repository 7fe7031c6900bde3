"""Arrays of the plans of a space that are legal and fit, with their prices."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.simulator.cost.plan_costs import PlanCosts
from moesim.simulator.layout.stages import StageAssignment
from moesim.simulator.model.precision import Precision
from moesim.simulator.planner.expert_loads import ExpertLoads
from moesim.simulator.planner.frames import Frame
from moesim.simulator.planner.placements import cost_key
from moesim.simulator.planner.refusals import Refusals
from moesim.simulator.planner.replay import Pattern
from moesim.simulator.planner.space import Space

# -- plan arrays -------------------------------------------------------------------------------------
# Arrays of the plans of a space that are legal and fit.


class FrameGroup(Struct, frozen=True):
    """Frames that share a schedule pattern, with the stage layouts tried for it."""

    pattern: Pattern
    frames: list[Frame]
    layouts: tuple[StageAssignment, ...]


class Candidates(Struct, dict=True):
    """Plans that are legal and fit; the arrays have one entry for each plan, whatever its placement.

    `index` is the plan's position in its group over (frame, precision, policy, sms, ZeRO stage).
    `replicas`: numbers of redundant experts of the placements, fewest first. `layout` and `bytes_of` are
    [replicas, plans]; bytes are infinite if the plan does not fit. `memory`, `placement` and `time_s` belong
    to the fastest placement once the search has tried them (before that they hold the least bytes, 0 and
    NaN). `least_s`, no less than `bound`, is a bound of the closed form alone, by which plans are excluded.
    `others` holds the slower placements that were tried, as (seconds, bytes, placement).
    """

    space: Space
    groups: list[FrameGroup]
    group: npt.NDArray[np.int32]
    index: IntArray
    layout: npt.NDArray[np.int8]
    memory: FloatArray
    bound: FloatArray
    least_s: FloatArray
    family: npt.NDArray[np.int32]
    time_s: FloatArray
    refused: Refusals
    legal: int
    fitting: int
    """Number of plans that are legal and fit, each placement counted."""
    costs_of: dict[tuple[int, bool], PlanCosts]
    """Costs by the part of a placement that they depend on."""
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
    def costs(self) -> PlanCosts:
        """The lowest costs of any placement: fewest replicas, every group of experts on its node."""
        return self.costs_of[min(self.costs_of)]

    @property
    def priced(self) -> int:
        """Number of parts of cost tables that were computed."""
        return sum(len(costs.keys) for costs in self.costs_of.values())

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
        return self.replicas.index(cost_key(self.space.placement[placement])[0])

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
