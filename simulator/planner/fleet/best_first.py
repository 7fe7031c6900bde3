"""Best-first search over the plans of a fleet: the plan with the lowest bound is always expanded next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import inf

from moesim.hwmodels.errors import InputError
from moesim.simulator.cost.plan_costs import PlanCosts
from moesim.simulator.layout.job import PoolSlice, ResolvedJob, pool_of_ranks
from moesim.simulator.layout.stages import StageAssignment, blocks_of, from_layers_per_stage
from moesim.simulator.model.block import is_layer
from moesim.simulator.model.recompute import recompute_label
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.planner.bound import BoundBook
from moesim.simulator.planner.closed_form import CostedPlan, step_seconds_by_rank
from moesim.simulator.planner.expert_loads import ExpertLoads
from moesim.simulator.planner.fleet.space import (
    FleetPools,
    PoolSeconds,
    blocks_by_kind,
    ideal_bound_s,
    layout_bound_s,
)
from moesim.simulator.planner.frames import Frame
from moesim.simulator.planner.refusals import FULL, FULL_OR_NO_HEADROOM, TOO_SLOW, Refusals
from moesim.simulator.planner.space import Space
from moesim.simulator.predict.fleet import FleetMemory, balanced_over_pools
from moesim.simulator.scenario import Scenario

MOST_EXPANDED = 10_000
"""Most combinations of frame, precision and recompute that are expanded; a search that stops here says so."""

RESOLUTION = 64
"""Steps into which a first-pool layer's seconds are divided when block seconds are rounded for a layout."""


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """A plan that fits, with its layout, bound and closed form (s).

    `frame`, `recipe`, `policy` and `zero` are positions in the lists of frames and of the space.
    """

    frame: int
    recipe: int
    policy: int
    zero: int
    stages: StageAssignment
    bound_s: float
    time_s: float


@dataclass(frozen=True, slots=True)
class _Node:
    """Plans that share frame, precision and recompute policy, and also the layout if `stages` is set."""

    frame: int
    recipe: int
    policy: int
    zeros: tuple[int, ...] = ()
    stages: StageAssignment | None = None


@dataclass(slots=True)
class FleetSearch:
    """The search over the frames of one fleet, which expands and estimates them in order of their bounds."""

    scenario: Scenario
    shape: ModelShape
    pools: FleetPools
    space: Space
    frames: Sequence[Frame]
    fixed: tuple[int, ...] | None
    """Layers of every stage if the scenario fixes them, else None."""
    most_s: float
    """Longest step that deadline and budget allow."""
    refused: Refusals
    estimates: dict[int, list[FleetPlan]] = field(default_factory=dict)
    """Plans with a closed form, by frame."""
    estimated: int = 0
    fitting: int = 0
    expanded: int = 0
    capped: bool = False
    costs: tuple[PlanCosts, ...] = field(init=False)
    _bounds: tuple[BoundBook, ...] = field(init=False)
    _loads: ExpertLoads = field(init=False)
    _lean: dict[tuple[int, int], bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make the costs and the bounds of each pool."""
        pools, space = self.pools, self.space
        self._loads = ExpertLoads(self.scenario, self.shape)
        self.costs = tuple(
            PlanCosts(ResolvedJob(part.scenario, self.shape, part.scenario.machine, profile))
            for part, profile in zip(pools.parts, pools.profiles, strict=True)
        )
        self._bounds = tuple(
            BoundBook(
                costs,
                self._loads,
                space.recipes,
                space.recompute,
                (part.scenario.communication.sms,),
                space.zero_stage,
                (self.scenario.routing.eplb,),
            )
            for costs, part in zip(self.costs, pools.parts, strict=True)
        )

    def fastest(self, families: int) -> float:
        """Estimate plans until no other frame can be among the `families` fastest.

        Returns a lower bound (s) on the step of every plan that was not estimated.
        """
        heap: list[tuple[float, int, _Node]] = []
        for number in range(len(self.frames)):
            for bound, node in self._nodes(number):
                heappush(heap, (bound, len(heap), node))
        order = len(heap)
        while heap and heap[0][0] <= self._limit(families):
            bound, _, node = heappop(heap)
            if node.stages is not None:
                self._estimate(bound, node, node.stages)
                continue
            if self.expanded >= MOST_EXPANDED:
                self.capped = True
                return bound
            for own_bound, known in self._expand(node):
                order += 1
                heappush(heap, (max(bound, own_bound), order, known))
        for bound, _, node in heap:
            if bound > self.most_s and node.stages is None:
                text = f"{self._label(node)} needs at least {bound:.2f} s, {self.most_s:.2f} s allowed"
                self.refused.add(TOO_SLOW, len(self.space.zero_stage), text)
        return heap[0][0] if heap else inf

    def best(self) -> list[FleetPlan]:
        """The fastest estimated plan of every frame, fastest first."""
        fastest = [min(plans, key=lambda p: (p.time_s, p.zero)) for plans in self.estimates.values()]
        return sorted((p for p in fastest if p.time_s <= self.most_s), key=lambda p: (p.time_s, p.frame))

    def _limit(self, families: int) -> float:
        """Step time (s) above which no further plan is needed.

        It is the time of the slowest wanted family, and at most the longest allowed step.
        """
        best = sorted(min(p.time_s for p in plans) for plans in self.estimates.values())
        return min(self.most_s, best[families - 1] if len(best) >= families else inf)

    def _seconds(self, frame: Frame, recipe: int, policy: int) -> list[PoolSeconds]:
        return [PoolSeconds(book, frame, recipe, policy) for book in self._bounds]

    def _nodes(self, number: int) -> list[tuple[float, _Node]]:
        """A node with its bound for each precision and recompute policy of a frame that every pool prices."""
        frame, nodes = self.frames[number], []
        n = frame.pattern.n_stages
        if self.fixed is not None and len(self.fixed) != n:
            text = f"{frame.label}: {n} stages, not {len(self.fixed)}"
            self.refused.add("another number of stages than stages.layers", self.space.inner, text)
            return []
        cv, blocks = self.scenario.variation.clock_cv.value, blocks_by_kind(self.shape)
        ranks = [len(part.ranks) for part in self.pools.at(frame.plan.pp)]
        for recipe in range(len(self.space.precision)):
            try:
                for policy in range(len(self.space.recompute)):
                    bound = ideal_bound_s(self._seconds(frame, recipe, policy), ranks, frame, blocks, cv)
                    nodes.append((bound, _Node(number, recipe, policy)))
            except InputError as error:
                many = self.space.inner // len(self.space.precision)
                self.refused.add_error(str(error), many, frame.label)
        return nodes

    def _expand(self, node: _Node) -> list[tuple[float, _Node]]:
        """The node's plans that fit, grouped by layout, each group with its bound."""
        self.expanded += 1
        frame = self.frames[node.frame]
        pools = self._seconds(frame, node.recipe, node.policy)
        by_layout: dict[StageAssignment, list[int]] = {}
        full = not self._may_fit(node)
        for zero in sorted(range(len(self.space.zero_stage)), key=lambda z: -self.space.zero_stage[z]):
            stage = self.space.zero_stage[zero]
            if frame.pattern.paired and stage == 3:
                reason = "parallel.zero_stage=3 has no slot for its gathers in an overlapped pair"
                self.refused.add(reason, 1, f"{self._label(node)} zero_stage=3")
                continue
            stages = None if full else self._stages(pools, node, zero)
            if stages is None:
                # A lower ZeRO stage uses at least as much memory; without FSDP its allocator has less slack.
                least = 2 if self.scenario.software.fsdp else 3
                full = full or stage < least or self.space.headroom is not None
                reason = FULL if self.space.headroom == 0.0 else FULL_OR_NO_HEADROOM
                self.refused.add(reason, 1, f"{self._label(node)} zero_stage={stage}")
            else:
                by_layout.setdefault(stages, []).append(zero)
        nodes = []
        for stages, zeros in by_layout.items():
            owners = pool_of_ranks(self.pools.at(frame.plan.pp))
            bound = layout_bound_s(pools, owners, frame, stages, self.scenario.variation.clock_cv.value)
            if bound > self.most_s:
                text = f"{self._label(node)} needs at least {bound:.2f} s, {self.most_s:.2f} s allowed"
                self.refused.add(TOO_SLOW, len(zeros), text)
                continue
            self.fitting += len(zeros)
            nodes.append((bound, replace(node, zeros=tuple(sorted(zeros)), stages=stages)))
        return nodes

    def _may_fit(self, node: _Node) -> bool:
        """Whether a plan of the node's frame and precision fits with full recompute and any ZeRO stage.

        The highest stage is leanest, but its allocator has more slack (eq. M10).
        """
        if "full" not in self.space.recompute or self.fixed is not None:
            return True
        lean = replace(node, policy=self.space.recompute.index("full"))
        key = (lean.frame, lean.recipe)
        if key not in self._lean:
            paired = self.frames[node.frame].pattern.paired
            zeros = [z for z, stage in enumerate(self.space.zero_stage) if stage < 3 or not paired]
            zeros.sort(key=lambda z: -self.space.zero_stage[z])
            pools = self._seconds(self.frames[lean.frame], lean.recipe, lean.policy)
            self._lean[key] = any(self._stages(pools, lean, zero) is not None for zero in zeros)
        return self._lean[key]

    def _label(self, node: _Node) -> str:
        return (
            f"{self.frames[node.frame].label} recompute={recompute_label(self.space.recompute[node.policy])}"
        )

    def _stages(self, pools: Sequence[PoolSeconds], node: _Node, zero: int) -> StageAssignment | None:
        """The layout of eq. S3 if it fits, else the best layout that fits; None if none does."""
        frame = self.frames[node.frame]
        parts = self.pools.at(frame.plan.pp)
        update = {
            "parallel": frame.plan.model_copy(update={"zero_stage": self.space.zero_stage[zero]}),
            "precision": self.space.precision[node.recipe],
            "recompute": self.space.recompute[node.policy],
        }
        own = [
            PoolSlice(part.label, part.cluster, part.scenario.model_copy(update=update), part.ranks)
            for part in parts
        ]
        memory = FleetMemory(self.shape, own, frame.in_flight, frame.microbatches, self.space.headroom)
        route = frame.pattern.samples[0].routes[0]
        if self.fixed is not None:
            stages = from_layers_per_stage(blocks_of(self.shape), self.fixed)
            return stages if memory.fits(stages) else None
        owners = pool_of_ranks(parts)
        layer = max(weight for kind, weight in pools[0].weights.items() if is_layer(kind))
        near = [{k: float(round(RESOLUTION * w / layer)) for k, w in p.weights.items()} for p in pools]
        stages, fits = balanced_over_pools(near, [owners[rank] for rank in route], memory)
        return stages if fits else None

    def _estimate(self, bound: float, node: _Node, stages: StageAssignment) -> None:
        """Estimate the plans of a node, one for each of its ZeRO stages (eq. P2)."""
        frame = self.frames[node.frame]
        for zero in node.zeros:
            stage = self.space.zero_stage[zero]
            time_s = self.closed_form_s(frame, node.recipe, node.policy, stage, stages)
            plan = FleetPlan(node.frame, node.recipe, node.policy, zero, stages, bound, time_s)
            self.estimates.setdefault(node.frame, []).append(plan)
            self.estimated += 1

    def closed_form_s(
        self, frame: Frame, recipe: int, policy: int, zero_stage: int, stages: StageAssignment
    ) -> float:
        """Closed-form step time of one plan with these stages, in seconds (eq. P2)."""
        plan = frame.plan.model_copy(update={"zero_stage": zero_stage})
        chosen = self.space.recipes[recipe]
        recompute = self.space.recompute[policy]
        spread = self._loads.spread(frame, self.scenario.routing.eplb)
        costed = [
            CostedPlan.of(
                costs, frame, plan, (chosen, recompute, part.scenario.communication.sms), spread, stages
            )
            for costs, part in zip(self.costs, self.pools.parts, strict=True)
        ]
        owners = pool_of_ranks(self.pools.at(plan.pp))
        order = self.scenario.communication.order_of(frame.schedule)
        return float(step_seconds_by_rank([[p] for p in costed], owners, frame.pattern, order)[0])
