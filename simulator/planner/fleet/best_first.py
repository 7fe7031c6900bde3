"""Best-first search over the plans of a fleet: the plan with the lowest bound is always expanded next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import fsum, inf, sqrt
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from moesim.hwmodels.calibration import CalibrationProfile
from moesim.hwmodels.errors import InputError
from moesim.simulator.cost.plan_costs import PlanCosts
from moesim.simulator.dispatchers.registry import check_known
from moesim.simulator.layout.dispatch_limits import check_group
from moesim.simulator.layout.job import (
    PoolSlice,
    ResolvedJob,
    check_supported,
    pool_clusters,
    pool_of_ranks,
    pools_of,
    pricing_scenario,
    rank_unit,
)
from moesim.simulator.layout.parallel import Layout, check_against_model, members_per_program, microbatches
from moesim.simulator.layout.stages import (
    MOST_WITHOUT_LAYERS,
    StageAssignment,
    blocks_of,
    from_layers_per_stage,
)
from moesim.simulator.model.block import is_layer
from moesim.simulator.model.operator import BlockKind
from moesim.simulator.model.recompute import recompute_label
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.planner.bound import ACTIONS_OF, STANDARD_ERRORS, BoundBook
from moesim.simulator.planner.closed_form import ACTIONS, CostedPlan, step_seconds_by_rank
from moesim.simulator.planner.expert_loads import ExpertLoads
from moesim.simulator.planner.frames import Frame, legal_frames
from moesim.simulator.planner.refusals import FULL, FULL_OR_NO_HEADROOM, TOO_SLOW, Refusals
from moesim.simulator.planner.replay import Key
from moesim.simulator.planner.space import PlanSpace, Space, with_defaults
from moesim.simulator.predict.fleet import FleetMemory, balanced_over_pools
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.machine import check_profile
from moesim.simulator.schedules import fleet_defaults

# -- fleet space -----------------------------------------------------------------------------------
# The plans of a fleet: its pools, their space and their legal frames.

SEARCHED = (
    "tp", "pp", "ep", "cp", "vpp", "expert_tp", "microbatch", "zero_stage", "schedule", "recompute",
    "precision", "layout", "headroom",
)  # fmt: skip
"""Keys of a space that a fleet's search supports."""


class FleetPools(Struct, frozen=True):
    """The pools of a fleet, each with its profile and with the scenario as if all GPUs were of its kind.

    `total` counts the GPUs; the number of pipeline ranks must be a multiple of `unit`.
    """

    parts: tuple[PoolSlice, ...]
    profiles: tuple[CalibrationProfile, ...]
    total: int
    unit: int

    def at(self, pp: int) -> tuple[PoolSlice, ...]:
        """The pools with the pipeline ranks that each holds in a pipeline of `pp` ranks."""
        parts, first = [], 0
        for part in self.parts:
            ranks = range(first, first + pp * part.cluster.n_gpus // self.total)
            parts.append(replace(part, ranks=ranks))
            first = ranks.stop
        return tuple(parts)


def fleet_pools(scenario: Scenario) -> FleetPools:
    """Resolve the pools of a scenario. Raises InputError, naming the pool, if one is malformed."""
    check_supported(scenario)
    clusters = pool_clusters(scenario)
    total = sum(cluster.n_gpus for _, cluster in clusters)
    parts, profiles = [], []
    for (label, cluster), pool in zip(clusters, pools_of(scenario), strict=True):
        own = pricing_scenario(scenario, pool, cluster, total)
        try:
            profile = own.calibration
            check_profile(profile, cluster)
            check_known(own.communication.kernels, profile)
        except InputError as error:
            raise InputError(f"{label}: {error}", key=error.key, nearest=error.nearest) from None
        parts.append(PoolSlice(label, cluster, own, range(0)))
        profiles.append(profile)
    return FleetPools(tuple(parts), tuple(profiles), total, rank_unit([c for _, c in clusters]))


def fleet_space(wanted: PlanSpace, scenario: Scenario, pools: FleetPools, shape: ModelShape) -> PlanSpace:
    """Fill in a fleet's defaults for keys that are left out (docs/planner.md lists them).

    Raises InputError for keys that a fleet's search does not support.
    """
    if wanted.sms is not None:
        raise InputError(
            "sms is not searched for a fleet: each pool states its own, fleet.pools.*.communication_sms"
        )
    if wanted.variants:
        raise InputError("variants are not crossed with a fleet: start one search for each of them")
    for key, info in PlanSpace.model_fields.items():
        if key not in SEARCHED and getattr(wanted, key) != info.get_default(call_default_factory=True):
            raise InputError(f"{key} is not searched for a fleet; it has {', '.join(SEARCHED)}")
    node = min(part.cluster.node.n_gpus for part in pools.parts)
    plan = scenario.parallel
    most_stages = shape.n_layers + MOST_WITHOUT_LAYERS
    defaults: dict[str, Any] = {
        "tp": tuple(d for d in (1, 2, 4, 8) if d <= node),
        "pp": tuple(d for d in range(pools.unit, most_stages + 1, pools.unit) if pools.total % d == 0),
        "cp": (1,),
        "vpp": (2,),
        "microbatch": (1, 2),
        "zero_stage": tuple(sorted({1, plan.zero_stage})),
        "schedule": fleet_defaults(),  # no gradients are reduced between pools
        "recompute": tuple(dict.fromkeys((scenario.recompute, "none", "selective", "full"))),
        "precision": (scenario.precision,),
    }
    missing = {key: value for key, value in defaults.items() if getattr(wanted, key) is None}
    return wanted.model_copy(update=missing)


def legal_fleet_frames(
    wanted: PlanSpace, scenario: Scenario, pools: FleetPools, shape: ModelShape
) -> tuple[Space, list[Frame], Refusals]:
    """The space, the frames that every pool accepts, and the refused plans, counted as by `legal_frames`."""
    first = pools.parts[0].scenario
    own = wanted.model_copy(update={"sms": (max(1, first.communication.sms),)})  # each pool has its own
    space = with_defaults(own, first, shape, first.machine)
    refused, size = Refusals(), space.size
    for pp in [pp for pp in space.pp if pp % pools.unit or pools.total % pp]:
        reason = (
            f"parallel.pp does not spread over the fleet: a multiple of {pools.unit} that divides its GPUs"
        )
        refused.add(reason, size // len(space.pp), f"PP{pp}")
    kept = replace(space, pp=tuple(pp for pp in space.pp if not (pp % pools.unit or pools.total % pp)))
    if not kept.pp:
        return space, [], refused
    batch = scenario.batch
    sizes, awaited = (batch.sequences, batch.sequence_length), scenario.software.awaited_sends
    kernels = scenario.communication.kernels
    frames, more = legal_frames(kept, shape, first.machine, *sizes, kernels, awaited=awaited)
    refused.merge(more)
    for frame in (frame for frame in frames if frame.pattern.copies > 1):
        reason = f"schedule {frame.schedule} keeps every stage in two pools"
        refused.add(reason, kept.inner, frame.label)
    frames = [frame for frame in frames if frame.pattern.copies == 1]
    for part in pools.parts[1:]:
        frames = _accepted(frames, part, kept.inner, scenario, shape, refused)
    return space, frames, refused


def _accepted(
    frames: Sequence[Frame],
    part: PoolSlice,
    inner: int,
    scenario: Scenario,
    shape: ModelShape,
    refused: Refusals,
) -> list[Frame]:
    """The frames that another pool accepts too."""
    cluster, accepted = part.scenario.machine, []
    for frame in frames:
        try:
            layout = Layout(frame.plan, cluster.n_gpus, cluster.node.n_gpus)
            check_against_model(frame.plan, shape, scenario.batch.sequence_length, 1)
            check_group(scenario.communication.kernels, cluster, layout, scenario.batch.sequence_length)
            microbatches(layout, scenario.batch.sequences)
            accepted.append(frame)
        except InputError as error:
            refused.add_error(str(error), inner, f"{frame.label} on {part.label}")
    return accepted


# -- bound -------------------------------------------------------------------------------------------
# Lower bounds of a fleet's step time, before the layout is known and for a given layout (pure).

Blocks = dict[BlockKind, int]


class PoolSeconds:
    """Seconds of the actions of a plan's stages on one pool, with even transfers."""

    def __init__(self, book: BoundBook, frame: Frame, recipe: int, policy: int) -> None:
        """`recipe` and `policy` are positions in the book's lists."""
        self.kinds, self.routed = book.costs.kinds, book.costs.routed
        kept = book.least_kept(frame)
        self.compute = book.compute(frame.plan, kept)[recipe, book.class_of[policy]]
        self.moved = book.transfer(frame.plan, kept)[recipe, 0]
        weights = book.weights(frame.plan, frame.pattern.paired)[recipe, book.class_of[policy]]
        self.weights = dict(zip(self.kinds, map(float, weights), strict=True))

    def work(self, uses: Sequence[str], blocks: Blocks) -> tuple[float, float]:
        """Seconds (compute, small kernels and transfers) of actions of some blocks, each run alone."""
        work, moved = [0.0], [0.0]
        for use in uses:
            n = ACTIONS.index(use)
            for kind, count in blocks.items():
                own = self.compute[self.kinds.index(kind), n]
                work.append(count * float(own[0]))
                moved.append(count * float(own[1]))
                if use != "W" and kind in self.routed:
                    moved.append(count * float(self.moved[n]))
        return fsum(work), fsum(moved)

    def block(self, kind: BlockKind, paired: bool) -> float:
        """Seconds of a block's forward and backward pass.

        Compute and transfers run in series; in a schedule of overlapped pairs the busier stream counts.
        """
        work, moved = self.work(ACTIONS, {kind: 1})
        return max(work, moved) if paired else work + moved


def ideal_bound_s(
    pools: Sequence[PoolSeconds], ranks: Sequence[int], frame: Frame, blocks: Blocks, clock_cv: float
) -> float:
    """Least seconds of a step with any layout (docs/model.md, eq. S4).

    If a block of kind k is worth y_k, a rank of pool p, which needs w_p(k) seconds for it, does work worth at
    most max_k y_k / w_p(k) a second. Any positive y_k gives a bound; here it is the mean of the pools'
    seconds.
    """
    paired = frame.pattern.paired
    each = [{kind: pool.block(kind, paired) for kind in blocks} for pool in pools]
    worth = {kind: fsum(own[kind] for own in each) / len(each) for kind in blocks}
    rate = fsum(
        n * max(worth[kind] / own[kind] if own[kind] else inf for kind in blocks if worth[kind])
        for n, own in zip(ranks, each, strict=True)
    )
    total = fsum(count * worth[kind] for kind, count in blocks.items())
    return frame.microbatches * total / rate * _least(frame, clock_cv)


def layout_bound_s(
    pools: Sequence[PoolSeconds],
    owners: Sequence[int],
    frame: Frame,
    assignment: StageAssignment,
    clock_cv: float,
) -> float:
    """Least seconds of a step of a plan with these stages (eq. P1, with each rank on its own pool)."""
    pattern = frame.pattern
    route = pattern.samples[0].routes[0]
    kinds_of = [dict(Counter(block.kind for block in stage)) for stage in assignment.stages]
    count = np.array([frame.microbatches], dtype=np.float64)

    each = {
        (kind, stage): fsum(pools[owners[route[stage]]].work(ACTIONS_OF[kind], kinds_of[stage]))
        for stage in range(pattern.n_stages)
        for kind in ACTIONS_OF
    }

    def seconds(key: Key, rank: int) -> float:
        kind, forward, backward = key
        if kind not in ("F&B", "F&I"):
            return each[kind, max(forward, backward)]
        pool = pools[owners[rank]]
        one, two = (
            pool.work("F", kinds_of[forward]),
            pool.work("IW" if kind == "F&B" else "I", kinds_of[backward]),
        )
        return max(one[0] + two[0], one[1] + two[1])

    most = 0.0
    back = "I" if pattern.split else "B"
    for rank in range(pattern.pp):
        first, last, ends = pattern.counts[0][rank], pattern.counts[-1][rank], pattern.ends[rank]
        often = {key: pattern.along(first.get(key, 0), last.get(key, 0), count) for key in {*first, *last}}
        busy = fsum(float(often[key][0]) * seconds(key, rank) for key in sorted(often))
        head = fsum(each["F", stage] for stage in range(ends.first_stage))
        trailing = fsum(each["W", stage] for stage in ends.trailing_weights)
        tail = fsum(each[back, stage] for stage in range(ends.last_stage))
        most = max(most, head + max(busy, busy - trailing + tail))
    return most * _least(frame, clock_cv)


def blocks_by_kind(shape: ModelShape) -> Blocks:
    """Number of blocks of each kind in a model."""
    return dict(Counter(block.kind for block in blocks_of(shape)))


def _least(frame: Frame, clock_cv: float) -> float:
    return max(0.0, 1.0 - STANDARD_ERRORS * clock_cv / sqrt(members_per_program(frame.layout)))


MOST_EXPANDED = 10_000
"""Most combinations of frame, precision and recompute that are expanded; a search that stops here says so."""

RESOLUTION = 64
"""Steps into which a first-pool layer's seconds are divided when block seconds are rounded for a layout."""


class FleetPlan(Struct, frozen=True):
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


class _Node(Struct, frozen=True):
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
