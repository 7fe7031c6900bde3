"""Seeded vectors of what makes the members of a group differ: expert load, GPU speed (pure)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moesim.simulator.engine.program import Variation
from moesim.simulator.layout.expert_load import LoadSpec, RankLoads, draw_rank_loads
from moesim.simulator.layout.groups import MOST_MEMBERS
from moesim.simulator.layout.parallel import Layout
from moesim.simulator.model.block import may_route
from moesim.simulator.model.operator import BlockKind
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario import Scenario
from moesim.simulator.schedules import Schedule


def routed_layers(kinds: Sequence[Sequence[BlockKind]]) -> int:
    """Blocks with routed experts, where the model has any: MoE layers and MTP modules, in stage order."""
    return sum(may_route(kind) for stage in kinds for kind in stage)


def draw_loads(
    spec: LoadSpec,
    scenario: Scenario,
    shape: ModelShape,
    layout: Layout,
    schedule: Schedule,
    kinds: Sequence[Sequence[BlockKind]],
    received_rows: float,
    group: int = 0,
) -> RankLoads | None:
    """Seeded expert load of one expert-parallel group; None where every rank always receives the same."""
    plan, layers = scenario.parallel, routed_layers(kinds)
    if shape.moe is None or not layers or plan.ep == 1 or spec.even:
        return None
    return draw_rank_loads(
        spec,
        seed=scenario.seed,
        group=group,
        layers=layers,
        microbatches=schedule.microbatches,
        ep=plan.ep,
        gpus_per_node=layout.gpus_per_node,
        experts=shape.moe.experts,
        top_k=shape.moe.top_k,
        rows_per_rank=received_rows,
    )


def draw_variation(
    scenario: Scenario,
    layout: Layout,
    schedule: Schedule,
    layers: int,
    loads: RankLoads | None,
    group: int = 0,
    members: int | None = None,
) -> Variation:
    """Seeded vectors of one value a member: GPU speed, expert load, and the node average of the load.

    Every `group` has a speed of its own; without `members` those of the folded run are drawn.
    """
    plan, folded = scenario.parallel, members is None
    if members is None:
        members = plan.ep if plan.ep > 1 else min(layout.dp, MOST_MEMBERS)
    clock_cv = scenario.variation.clock_cv.value
    own = [group] if group else []
    rng = np.random.default_rng([scenario.seed, 1, *own])
    clock = 1.0 / np.maximum(1.0 + clock_cv * rng.standard_normal((schedule.pp, members)), 0.1)
    full = (layers, schedule.microbatches, members)
    if loads is None:
        flat = np.ones(full)
        if folded and clock_cv == 0.0 and scenario.variation.jitter_cv.value == 0.0:
            clock, flat = clock[:, :1], flat[:, :, :1]  # every member is the same: one stands for all
        return Variation(clock, flat, flat, scenario.variation.jitter_cv.value, scenario.seed)
    rows, nodes = loads.rows.reshape(full), loads.node_rows.reshape(full)
    return Variation(clock, rows, nodes, scenario.variation.jitter_cv.value, scenario.seed)
