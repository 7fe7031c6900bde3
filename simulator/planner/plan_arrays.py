"""The plans of a space that are legal and fit, as arrays."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from moesim.hwmodels.arrays import FloatArray, IntArray
from moesim.simulator.layout.stages import StageAssignment
from moesim.simulator.planner.expert_loads import ExpertLoads
from moesim.simulator.planner.frames import Frame
from moesim.simulator.planner.pattern import Pattern
from moesim.simulator.planner.placements import price_key
from moesim.simulator.planner.prices import PriceBook
from moesim.simulator.planner.refusals import Refusals
from moesim.simulator.planner.space import Space


@dataclass(frozen=True, slots=True)
class FrameGroup:
    """Frames that share one schedule pattern, with the layouts tried for it."""

    pattern: Pattern
    frames: list[Frame]
    layouts: tuple[StageAssignment, ...]


@dataclass(slots=True)
class Candidates:
    """Plans that are legal and fit: one entry each in the arrays, whatever the placement of their experts.

    `index` counts within the group over (frame, precision, policy, sms, ZeRO stage). `replicas`: numbers of
    redundant experts of the placements, fewest first; `layout` and `bytes_of` [numbers of replicas, plans]
    with each, infinite bytes where that does not fit. `memory`, `placement` and `time_s` are those of the
    fastest placement once the search has tried them (before: fewest replicas, 0 and NaN), `others` the
    rest that was tried: (seconds, bytes, placement).
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
    """With every placement counted."""
    books: dict[tuple[int, bool], PriceBook]
    loads: ExpertLoads
    replicas: tuple[int, ...]
    bytes_of: FloatArray
    placement: npt.NDArray[np.int8]
    others: dict[int, list[tuple[float, float, int]]] = field(default_factory=dict)

    @property
    def book(self) -> PriceBook:
        """Prices with the fewest replicas, every group of experts on its node: the least of any placement."""
        return self.books[min(self.books)]

    @property
    def priced(self) -> int:
        """Price tables that were worked out."""
        return sum(book.priced for book in self.books.values())

    def book_of(self, placement: int) -> PriceBook:
        """Prices with a placement of the space."""
        return self.books[price_key(self.space.placement[placement])]

    def placements_of(self, number: int) -> list[int]:
        """Placements that a plan can have and that fit."""
        if len(self.space.placement) == 1:
            return [0]
        layout = self.groups[int(self.group[number])].frames[self.axes_of(number)[0]].layout
        return [
            p
            for p, placement in enumerate(self.space.placement)
            if self.loads.problem(layout, placement) is None and np.isfinite(self.bytes_with(number, p))
        ]

    def bytes_with(self, number: int, placement: int) -> float:
        """Bytes of a plan with a placement of the space; infinite where it does not fit."""
        return float(self.bytes_of[self._row(placement), number])

    def layout_with(self, number: int, placement: int) -> int:
        """Which of the group's stage layouts a plan has with a placement of the space."""
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
        """Its stage layout, with its own placement or another one."""
        which = int(self.placement[number]) if placement is None else placement
        return self.groups[int(self.group[number])].layouts[self.layout_with(number, which)]


def inner_axes(space: Space) -> tuple[int, int, int, int]:
    """How many precisions, recompute policies, numbers of SMs and ZeRO stages a space has."""
    return len(space.precision), len(space.recompute), len(space.sms), len(space.zero_stage)
