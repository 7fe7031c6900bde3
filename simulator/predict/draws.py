"""Draws the differences between the members of a group, expert load and GPU speed, from a seed (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
from msgspec import Struct

from moesim.hwmodels.arrays import FloatArray
from moesim.simulator.common.bounded_cache import BoundedCache, Same, read_only
from moesim.simulator.engine.program import MemberVariation
from moesim.simulator.layout.expert_load import LoadSpec, RankLoads, draw_rank_loads
from moesim.simulator.layout.gradient_sync import GradientSync
from moesim.simulator.layout.job import ResolvedJob
from moesim.simulator.layout.parallel import gpus_in_step, independent_groups, members_per_program
from moesim.simulator.model.block import may_route
from moesim.simulator.model.operator import BlockKind

_VARIATIONS: BoundedCache[MemberVariation] = BoundedCache(
    48_000_000, lambda own: own.clock.nbytes + own.loads.nbytes + own.node_loads.nbytes
)
"""Variations drawn before, of at most 48 MB."""

_EVEN: BoundedCache[FloatArray] = BoundedCache(48_000_000, lambda loads: loads.nbytes)
"""Even loads by shape; variations with the same ones share what follows from them."""

MOST_GROUPS = 4096
"""Most groups whose speeds are drawn to find the slowest."""


def routed_layers(kinds: Iterable[Sequence[BlockKind]]) -> int:
    """Number of blocks that may have routed experts: MoE layers and MTP modules."""
    return sum(may_route(kind) for stage in kinds for kind in stage)


class Draws(Struct, frozen=True, dict=True):
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

    def slowest_group(self, rank_s: Sequence[float]) -> int:
        """Number of the group that folded resolution simulates: the one that ends last (eq. E1b).

        All groups meet at the end of the step, which therefore waits for the slowest. `rank_s`: compute of a
        micro-batch on every pipeline rank.
        """
        count = min(independent_groups(self.job.layout, self._sync), MOST_GROUPS)
        if count == 1 or self.job.scenario.variation.clock_cv.value == 0.0:
            return 0
        members = members_per_program(self.job.layout)
        # Seconds of pipelines whose ranks are as slow as their slowest member, without overlap or waits.
        ranks = [self._clock(g, members).max(axis=1) * np.asarray(rank_s) for g in range(count)]
        return int(np.argmax([float(s.sum() + (self.microbatches - 1) * s.max()) for s in ranks]))

    def variation(self, group: int = 0, members: int | None = None) -> MemberVariation:
        """Seeded vectors with one value a member: GPU speed, expert load, and the load averaged over a node.

        Every `group` has its own draws; without `members` the number of the folded run applies.
        """
        spread, seed = self.job.scenario.variation, self.job.scenario.seed
        loads = self.loads(group) if group else self.first_loads
        key = (
            (
                self.job.layout,
                self._sync,
                seed,
                spread.clock_cv.value,
                spread.jitter_cv.value,
                group,
                members,
            ),
            (self.layers, self.microbatches, None if loads is None else Same(loads)),
        )
        return _VARIATIONS.get(key, lambda: self._variation(group, members, loads))

    @property
    def _sync(self) -> GradientSync:
        return GradientSync.of(self.job.scenario.parallel, self.job.scenario.software, self.microbatches)

    def _variation(self, group: int, members: int | None, loads: RankLoads | None) -> MemberVariation:
        scenario, layout, folded = self.job.scenario, self.job.layout, members is None
        spread = scenario.variation
        if members is None:
            members = members_per_program(layout)
        clock_cv, jitter_cv = spread.clock_cv.value, spread.jitter_cv.value
        stands_for, in_step = gpus_in_step(layout, self._sync), 1
        if not folded and layout.plan.ep == 1:  # every GPU is a member of its own
            together = layout.plan.tp * layout.plan.cp
            stands_for, in_step = 1, together if members % together == 0 else 1
        clock = self._clock(group, members // in_step, stands_for * in_step)
        if folded and layout.plan.ep == 1 and not self._sync.inside_step:
            clock = self._with_slowest(clock)
        clock = np.repeat(clock, in_step, axis=1)
        full = (self.layers, self.microbatches, members)
        if loads is None:
            if folded and clock_cv == 0.0 and jitter_cv == 0.0:
                clock, full = clock[:, :1], (*full[:2], 1)  # all members are equal, so one is drawn
            rows = nodes = _EVEN.get(full, lambda: np.ones(full))
        else:
            rows, nodes = loads.rows.reshape(full), loads.node_rows.reshape(full)
        for array in (clock, rows, nodes):
            read_only(array)
        return MemberVariation(clock, rows, nodes, jitter_cv, scenario.seed, stands_for, in_step)

    def _clock(self, group: int, members: int, gpus: int | None = None) -> FloatArray:
        """Time factors [pipeline ranks, members]; a member is as slow as the slowest of its `gpus` GPUs."""
        scenario, layout = self.job.scenario, self.job.layout
        gpus = gpus_in_step(layout, self._sync) if gpus is None else gpus
        rng = np.random.default_rng([scenario.seed, 1, *([group] if group else [])])
        drawn = rng.standard_normal((layout.plan.pp, members, gpus)).min(axis=2)
        return np.asarray(1.0 / np.maximum(1.0 + scenario.variation.clock_cv.value * drawn, 0.1))

    def _with_slowest(self, clock: FloatArray) -> FloatArray:
        """Put the slowest replica beyond `MOST_MEMBERS` in the place of the last simulated one (eq. E1b)."""
        layout = self.job.layout
        beyond = layout.dp - clock.shape[1]
        if beyond <= 0 or self.job.scenario.variation.clock_cv.value == 0.0:
            return clock
        others = self._clock(1, beyond)
        slowest = others[:, [int(np.argmax(others.max(axis=0)))]]
        if slowest.max() <= clock[:, :-1].max():
            return clock
        return np.concatenate([clock[:, :-1], slowest], axis=1)
