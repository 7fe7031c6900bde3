"""Draws the differences between the members of a group, expert load and GPU speed, from a seed (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moesim.simulator.engine.program import MemberVariation
from moesim.simulator.layout.expert_load import LoadSpec, RankLoads, draw_rank_loads
from moesim.simulator.layout.groups import members_per_program
from moesim.simulator.layout.job import ResolvedJob
from moesim.simulator.model.block import may_route
from moesim.simulator.model.operator import BlockKind


def routed_layers(kinds: Iterable[Sequence[BlockKind]]) -> int:
    """Number of blocks that may have routed experts: MoE layers and MTP modules."""
    return sum(may_route(kind) for stage in kinds for kind in stage)


@dataclass(frozen=True)
class Draws:
    """The seeded draws of a job; every group of GPUs has its own draws, which are the same on every call.

    `layers`: number of blocks with routed experts. `microbatches`: number in one pipeline. `received_rows`:
    expert rows that a GPU computes under uniform routing.
    """

    job: ResolvedJob
    spec: LoadSpec
    layers: int
    microbatches: int
    received_rows: float

    @cached_property
    def first_loads(self) -> RankLoads | None:
        """Expert load of the first group, which is the group that folded resolution simulates."""
        return self.loads(0)

    def loads(self, group: int) -> RankLoads | None:
        """Seeded expert load of one expert-parallel group; None where all ranks always receive equal rows."""
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
        """Seeded vectors with one value a member: GPU speed, expert load, and the load averaged over a node.

        Every `group` has its own draws; without `members` the number of the folded run applies.
        """
        scenario, layout, folded = self.job.scenario, self.job.layout, members is None
        plan, spread = scenario.parallel, scenario.variation
        if members is None:
            members = members_per_program(layout)
        clock_cv, jitter_cv = spread.clock_cv.value, spread.jitter_cv.value
        own = [group] if group else []
        rng = np.random.default_rng([scenario.seed, 1, *own])
        clock = 1.0 / np.maximum(1.0 + clock_cv * rng.standard_normal((plan.pp, members)), 0.1)
        full = (self.layers, self.microbatches, members)
        loads = self.loads(group) if group else self.first_loads
        if loads is None:
            flat = np.ones(full)
            if folded and clock_cv == 0.0 and jitter_cv == 0.0:
                clock, flat = clock[:, :1], flat[:, :, :1]  # all members are equal, so one stands for all
            return MemberVariation(clock, flat, flat, jitter_cv, scenario.seed)
        rows, nodes = loads.rows.reshape(full), loads.node_rows.reshape(full)
        return MemberVariation(clock, rows, nodes, jitter_cv, scenario.seed)
