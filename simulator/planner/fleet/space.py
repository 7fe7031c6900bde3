"""The space of a fleet's search: its default values, and the frames that every pool accepts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import fsum, inf, sqrt
from typing import Any

import numpy as np

from moesim.hwmodels.calibration import CalibrationProfile
from moesim.hwmodels.errors import InputError
from moesim.simulator.dispatchers.registry import check_known
from moesim.simulator.layout.dispatch_limits import check_group
from moesim.simulator.layout.job import (
    PoolSlice,
    check_supported,
    pool_clusters,
    pools_of,
    pricing_scenario,
    rank_unit,
)
from moesim.simulator.layout.parallel import Layout, check_against_model, members_per_program, microbatches
from moesim.simulator.layout.stages import MOST_WITHOUT_LAYERS, StageAssignment, blocks_of
from moesim.simulator.model.operator import BlockKind
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.planner.bound import ACTIONS_OF, STANDARD_ERRORS, BoundBook
from moesim.simulator.planner.closed_form import ACTIONS
from moesim.simulator.planner.frames import Frame, legal_frames
from moesim.simulator.planner.refusals import Refusals
from moesim.simulator.planner.replay import Key
from moesim.simulator.planner.space import PlanSpace, Space, with_defaults
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.machine import check_profile
from moesim.simulator.schedules import fleet_defaults

SEARCHED = (
    "tp", "pp", "ep", "cp", "vpp", "expert_tp", "microbatch", "zero_stage", "schedule", "recompute",
    "precision", "layout", "headroom",
)  # fmt: skip
"""Keys of a space that a fleet's search supports."""


@dataclass(frozen=True, slots=True)
class FleetPools:
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
    for key, field in PlanSpace.model_fields.items():
        if key not in SEARCHED and getattr(wanted, key) != field.get_default(call_default_factory=True):
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
