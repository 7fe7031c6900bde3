"""The space of a fleet's search: its default values, and the frames that every pool accepts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from moesim.hwmodels.calibration import CalibrationProfile
from moesim.hwmodels.errors import InputError
from moesim.simulator.dispatchers.registry import check_known
from moesim.simulator.layout.dispatch_limits import check_group
from moesim.simulator.layout.parallel import Layout, check_against_model, microbatches
from moesim.simulator.layout.pools import (
    PoolSlice,
    check_supported,
    pool_clusters,
    pools_of,
    pricing_scenario,
    rank_unit,
)
from moesim.simulator.layout.stages import MOST_WITHOUT_LAYERS
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.planner.frames import Frame, legal_frames
from moesim.simulator.planner.refusals import Refusals
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
        found, first = [], 0
        for part in self.parts:
            ranks = range(first, first + pp * part.cluster.n_gpus // self.total)
            found.append(replace(part, ranks=ranks))
            first = ranks.stop
        return tuple(found)


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
    cluster, found = part.scenario.machine, []
    for frame in frames:
        try:
            layout = Layout(frame.plan, cluster.n_gpus, cluster.node.n_gpus)
            check_against_model(frame.plan, shape, scenario.batch.sequence_length, 1)
            check_group(scenario.communication.kernels, cluster, layout, scenario.batch.sequence_length)
            microbatches(layout, scenario.batch.sequences)
            found.append(frame)
        except InputError as error:
            refused.add_error(str(error), inner, f"{frame.label} on {part.label}")
    return found
