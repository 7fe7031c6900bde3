"""The search over the plans of a fleet: always the most promising next, by its lower bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heappop, heappush
from math import inf

from moesim.hwmodels.errors import InputError
from moesim.simulator.fleet.balance import FleetMemory, balanced_over_pools
from moesim.simulator.fleet.spread import Part, owners_of
from moesim.simulator.layout.in_flight import rank_stages
from moesim.simulator.layout.memory import RankStages
from moesim.simulator.layout.stages import StageAssignment, blocks_of, from_layers_per_stage
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.planner.bound import BoundBook
from moesim.simulator.planner.fleet_bound import PoolSeconds, blocks_by_kind, ideal_bound_s, layout_bound_s
from moesim.simulator.planner.fleet_space import FleetPools
from moesim.simulator.planner.frames import Frame
from moesim.simulator.planner.prices import PriceBook
from moesim.simulator.planner.refusals import Refusals
from moesim.simulator.planner.replay import Priced, step_seconds_by_rank
from moesim.simulator.planner.space import Space
from moesim.simulator.planner.spread import spread_of
from moesim.simulator.scenario import Scenario
from moesim.simulator.schedules import build

MOST_EXPANDED = 4_000
"""Most frames that get layouts and memory, about a minute; a search that stops here says so."""

TOO_SLOW = "too slow for the deadline or budget, whatever else"


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """A plan that fits: its frame and positions in the space's lists, layout, bound and closed form (s)."""

    frame: int
    recipe: int
    policy: int
    zero: int
    stages: StageAssignment
    bound_s: float
    time_s: float


@dataclass(slots=True)
class FleetStudy:
    """Frames of one fleet, expanded and estimated in the order of their bounds."""

    scenario: Scenario
    shape: ModelShape
    pools: FleetPools
    space: Space
    frames: Sequence[Frame]
    fixed: tuple[int, ...] | None
    """Layers of every stage, where the scenario's are kept."""
    most_s: float
    """Longest step that deadline and budget allow."""
    refused: Refusals
    estimates: dict[int, list[FleetPlan]] = field(default_factory=dict)
    """Plans with a closed form, by frame."""
    estimated: int = 0
    fitting: int = 0
    expanded: int = 0
    capped: bool = False
    books: tuple[PriceBook, ...] = field(init=False)
    _bounds: tuple[BoundBook, ...] = field(init=False)

    def __post_init__(self) -> None:
        """A book of prices for each pool."""
        pools, space = self.pools, self.space
        self.books = tuple(
            PriceBook(part.scenario, self.shape, part.scenario.machine, profile)
            for part, profile in zip(pools.parts, pools.profiles, strict=True)
        )
        self._bounds = tuple(
            BoundBook(
                book,
                space.recipes,
                space.recompute,
                (part.scenario.communication.sms,),
                space.zero_stage,
            )
            for book, part in zip(self.books, pools.parts, strict=True)
        )

    def fastest(self, families: int) -> float:
        """Estimate until no other frame can be among the `families` fastest.

        Returns the seconds that every plan without an estimate needs at least. A frame counts as refused
        where none of its plans fits.
        """
        heap: list[tuple[float, int, int, tuple[int, int, tuple[int, ...], StageAssignment] | None]] = []
        for number, frame in enumerate(self.frames):
            bound = self._frame_bound(frame)
            if bound < inf:
                heappush(heap, (bound, len(heap), number, None))
        order = len(heap)
        while heap and heap[0][0] <= self._limit(families):
            bound, _, number, plans = heappop(heap)
            if plans is not None:
                self._estimate(number, bound, *plans)
                continue
            if self.expanded >= MOST_EXPANDED:
                self.capped = True
                return bound
            for own_bound, recipe, policy, zeros, stages in self._expand(number):
                order += 1
                heappush(heap, (max(bound, own_bound), order, number, (recipe, policy, zeros, stages)))
        for bound, _, number, plans in heap:
            if bound > self.most_s and plans is None:
                text = (
                    f"{self.frames[number].label} needs at least {bound:.2f} s, {self.most_s:.2f} s allowed"
                )
                self.refused.add(TOO_SLOW, self.space.inner, text)
        return heap[0][0] if heap else inf

    def best(self) -> list[FleetPlan]:
        """The fastest estimated plan of every frame, fastest first."""
        found = [min(plans, key=lambda p: (p.time_s, p.zero)) for plans in self.estimates.values()]
        return sorted((p for p in found if p.time_s <= self.most_s), key=lambda p: (p.time_s, p.frame))

    def fitting_of(self, number: int) -> int:
        """Estimated plans of a frame: those that differ in precision, recompute or ZeRO stage only."""
        return len(self.estimates[number])

    def _limit(self, families: int) -> float:
        """Time of the last family that is wanted, or the longest step that is allowed."""
        best = sorted(min(p.time_s for p in plans) for plans in self.estimates.values())
        return min(self.most_s, best[families - 1] if len(best) >= families else inf)

    def _seconds(self, frame: Frame, recipe: int, policy: int) -> list[PoolSeconds]:
        return [PoolSeconds(book, frame, recipe, policy) for book in self._bounds]

    def _frame_bound(self, frame: Frame) -> float:
        """The least bound over precisions and recompute policies; infinite where no pool prices it."""
        cv, blocks = self.scenario.variation.clock_cv.value, blocks_by_kind(self.shape)
        ranks = [len(part.ranks) for part in self.pools.at(frame.plan.pp)]
        least, problem = inf, ""
        for recipe in range(len(self.space.precision)):
            try:
                for policy in range(len(self.space.recompute)):
                    pools = self._seconds(frame, recipe, policy)
                    least = min(least, ideal_bound_s(pools, ranks, frame, blocks, cv))
            except InputError as error:
                problem = str(error)
                self.refused.add_error(problem, self.space.inner // len(self.space.precision), frame.label)
        return least

    def _expand(self, number: int) -> list[tuple[float, int, int, tuple[int, ...], StageAssignment]]:
        """(bound, precision, policy, ZeRO stages, layout) of the frame's plans that fit."""
        self.expanded += 1
        frame, found = self.frames[number], []
        parts = self.pools.at(frame.plan.pp)
        owners = owners_of(parts)
        route = frame.pattern.samples[0].routes[0]
        cv = self.scenario.variation.clock_cv.value
        zeros = sorted(range(len(self.space.zero_stage)), key=lambda z: -self.space.zero_stage[z])
        for recipe in range(len(self.space.precision)):
            for policy in range(len(self.space.recompute)):
                try:
                    pools = self._seconds(frame, recipe, policy)
                except InputError:
                    continue  # counted when its bound was asked for
                by_layout: dict[StageAssignment, list[int]] = {}
                full = False  # a lower ZeRO stage needs no less
                for zero in zeros:
                    if frame.pattern.paired and self.space.zero_stage[zero] == 3:
                        reason = "parallel.zero_stage=3 has no slot for its gathers in an overlapped pair"
                        self.refused.add(reason, 1, f"{frame.label} zero_stage=3")
                        continue
                    memory = self._memory(parts, frame, recipe, policy, zero)
                    stages = None if full else self._stages(pools, [owners[r] for r in route], memory)
                    if stages is None:
                        full = True
                        self.refused.add("out of memory", 1, self._label(frame, policy, zero))
                        continue
                    by_layout.setdefault(stages, []).append(zero)
                for stages, kept in by_layout.items():
                    self.fitting += len(kept)
                    bound = layout_bound_s(pools, owners, frame, stages, cv)
                    if bound > self.most_s:
                        text = (
                            f"{frame.label} needs at least {bound:.2f} s a step, {self.most_s:.2f} s allowed"
                        )
                        self.refused.add(TOO_SLOW, len(kept), text)
                        self.fitting -= len(kept)
                        continue
                    found.append((bound, recipe, policy, tuple(sorted(kept)), stages))
        return found

    def _label(self, frame: Frame, policy: int, zero: int) -> str:
        return f"{frame.label} recompute={self.space.recompute[policy]} zero={self.space.zero_stage[zero]}"

    def _stages(
        self, pools: Sequence[PoolSeconds], owners: Sequence[int], memory: FleetMemory
    ) -> StageAssignment | None:
        """The layout of eq. S3 where it fits, else the best that does; None where none does."""
        if self.fixed is not None:
            if len(self.fixed) != len(owners):
                return None
            stages = from_layers_per_stage(blocks_of(self.shape), self.fixed)
        else:
            stages = balanced_over_pools([pool.weights for pool in pools], owners, memory)
        return stages if memory.fits(stages) else None

    def _memory(
        self, parts: Sequence[Part], frame: Frame, recipe: int, policy: int, zero: int
    ) -> FleetMemory:
        update = {
            "parallel": frame.plan.model_copy(update={"zero_stage": self.space.zero_stage[zero]}),
            "precision": self.space.precision[recipe],
            "recompute": self.space.recompute[policy],
        }
        own = [
            Part(part.label, part.cluster, part.scenario.model_copy(update=update), part.ranks)
            for part in parts
        ]
        return FleetMemory(self.shape, own, _ranks_in_flight(frame), frame.microbatches, self.space.headroom)

    def _estimate(
        self,
        number: int,
        bound: float,
        recipe: int,
        policy: int,
        zeros: tuple[int, ...],
        stages: StageAssignment,
    ) -> None:
        """Closed form of the plans of a frame that differ in their ZeRO stage only (eq. P2)."""
        frame = self.frames[number]
        for zero in zeros:
            time_s = self.closed_form_s(frame, recipe, policy, self.space.zero_stage[zero], stages)
            plan = FleetPlan(number, recipe, policy, zero, stages, bound, time_s)
            self.estimates.setdefault(number, []).append(plan)
            self.estimated += 1

    def closed_form_s(
        self, frame: Frame, recipe: int, policy: int, zero_stage: int, stages: StageAssignment
    ) -> float:
        """Seconds of a step of one plan with these stages (eq. P2)."""
        plan = frame.plan.model_copy(update={"zero_stage": zero_stage})
        chosen, layers = self.space.recipes[recipe], stages.layers_per_stage
        priced = [
            Priced(
                frame.microbatches,
                book.table(
                    plan,
                    chosen,
                    self.space.recompute[policy],
                    part.scenario.communication.sms,
                    frame.pattern.paired,
                ),
                spread_of(part.scenario, self.shape, frame),
                book.send_s(plan, frame.pattern),
                book.sync(plan, chosen, frame.pattern, layers, stages),
            )
            for book, part in zip(self.books, self.pools.parts, strict=True)
        ]
        owners = owners_of(self.pools.at(plan.pp))
        order = self.scenario.communication.order
        return float(step_seconds_by_rank([[p] for p in priced], owners, frame.pattern, stages, order)[0])


@lru_cache(maxsize=512)
def _ranks_of(name: str, pp: int, microbatches: int, vpp: int) -> tuple[RankStages, ...]:
    return tuple(rank_stages(build(name, pp, microbatches, vpp)))


def _ranks_in_flight(frame: Frame) -> tuple[RankStages, ...]:
    """Fullest moments of every rank; where they grow with the micro-batches, of the whole schedule."""
    early, late = frame.pattern.in_flight[0], frame.pattern.in_flight[-1]
    if early == late:
        return late
    return _ranks_of(frame.schedule, frame.plan.pp, frame.microbatches, frame.plan.vpp)
