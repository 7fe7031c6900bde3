"""Seeded vectors of what makes the members of a group differ: expert load, GPU speed (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moesim.simulator.engine.program import MemberVariation
from moesim.simulator.layout.expert_load import LoadSpec, RankLoads, draw_rank_loads
from moesim.simulator.layout.groups import MOST_MEMBERS
from moesim.simulator.layout.job import ResolvedJob
from moesim.simulator.model.block import may_route
from moesim.simulator.model.operator import BlockKind


def routed_layers(kinds: Iterable[Sequence[BlockKind]]) -> int:
    """Blocks with routed experts, where the model has any: MoE layers and MTP modules, in stage order."""
    return sum(may_route(kind) for stage in kinds for kind in stage)


@dataclass(frozen=True)
class Draws:
    """The seeded draws of a job: every group of GPUs has its own, and the same ones each time it is asked.

    `layers`: blocks with routed experts; `microbatches`: of one pipeline; `received_rows`: expert rows that
    a GPU computes under uniform routing.
    """

    job: ResolvedJob
    spec: LoadSpec
    layers: int
    microbatches: int
    received_rows: float

    @cached_property
    def first_loads(self) -> RankLoads | None:
        """Expert load of the first group, the one that folded resolution carries."""
        return self.loads(0)

    def loads(self, group: int) -> RankLoads | None:
        """Seeded expert load of one expert-parallel group; None where every rank always receives the same."""
        scenario, shape = self.job.scenario, self.job.shape
        if shape.moe is None or not self.layers or scenario.parallel.ep == 1 or self.spec.even:
            return None
        return draw_rank_loads(
            self.spec,
            seed=scenario.seed,
            group=group,
            layers=self.layers,
            microbatches=self.microbatches,
            ep=scenario.parallel.ep,
            gpus_per_node=self.job.layout.gpus_per_node,
            experts=shape.moe.experts,
            top_k=shape.moe.top_k,
            rows_per_rank=self.received_rows,
        )

    def variation(self, group: int = 0, members: int | None = None) -> MemberVariation:
        """Seeded vectors of one value a member: GPU speed, expert load, and the node average of the load.

        Every `group` has a speed of its own; without `members` those of the folded run are drawn.
        """
        scenario, layout, folded = self.job.scenario, self.job.layout, members is None
        plan, spread = scenario.parallel, scenario.variation
        if members is None:
            members = plan.ep if plan.ep > 1 else min(layout.dp, MOST_MEMBERS)
        clock_cv, jitter_cv = spread.clock_cv.value, spread.jitter_cv.value
        own = [group] if group else []
        rng = np.random.default_rng([scenario.seed, 1, *own])
        clock = 1.0 / np.maximum(1.0 + clock_cv * rng.standard_normal((plan.pp, members)), 0.1)
        full = (self.layers, self.microbatches, members)
        loads = self.loads(group) if group else self.first_loads
        if loads is None:
            flat = np.ones(full)
            if folded and clock_cv == 0.0 and jitter_cv == 0.0:
                clock, flat = clock[:, :1], flat[:, :, :1]  # every member is the same: one stands for all
            return MemberVariation(clock, flat, flat, jitter_cv, scenario.seed)
        rows, nodes = loads.rows.reshape(full), loads.node_rows.reshape(full)
        return MemberVariation(clock, rows, nodes, jitter_cv, scenario.seed)
