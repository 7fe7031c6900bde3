"""Expert loads under each placement: which plans can have it, and how unevenly the ranks receive rows."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from msgspec import Struct, field

from moesim.hwmodels.errors import InputError
from moesim.simulator.cost.layer_collectives import expected_maximum
from moesim.simulator.layout.expert_load import (
    LoadSpec,
    Popularity,
    RankLoads,
    check_eplb,
    check_load_has_ep,
    draw_rank_loads,
    load_spec,
    popularity_of,
    stated_load_keys,
)
from moesim.simulator.layout.gradient_sync import GradientSync
from moesim.simulator.layout.parallel import Layout, gpus_in_step, members_per_program, tokens_per_gpu
from moesim.simulator.layout.stages import blocks_of
from moesim.simulator.model.block import may_route
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.planner.frames import Frame
from moesim.simulator.planner.placements import Placement, with_placement
from moesim.simulator.scenario import Scenario

# -- member lag --------------------------------------------------------------------------------------
# Lag of the slowest member of a group, computed from the spreads that a scenario states.


class MemberLag(Struct, frozen=True):
    """Relative lag of the slowest member (docs/model.md, eq. P3 and P5).

    `clock`: lag that lasts, of sustained speed and of phases that wait for the GPUs behind a member. `jitter`
    and `rows`: lag of one phase, from run-to-run variation and from received rows; they take effect at
    barriers only. `payload` and `node_payload`: lag of a transfer. `kept`: mean share of the rows that
    capacity does not drop. `hot`: rows above `kept` that one member has in all layers. `lasting`: whether the
    same member always has the most rows of a layer.
    """

    clock: float
    jitter: float
    rows: float
    payload: float
    node_payload: float
    kept: float = 1.0
    hot: float = 0.0
    lasting: bool = False


def member_lag_of(scenario: Scenario, shape: ModelShape, frame: Frame) -> MemberLag:
    """The lag of a plan's slowest member from clocks, jitter and expert load (eq. R3)."""
    z, clock = expected_maximum(members_per_program(frame.layout)), clock_lag_of(scenario, frame)
    if frame.plan.ep == 1 or shape.moe is None:
        return MemberLag(clock, 0.0, 0.0, 0.0, 0.0)
    plan = frame.plan
    tokens = tokens_per_gpu(plan, scenario.batch.sequence_length)
    popularity = scenario.routing.expert_load_cv.value / sqrt(shape.moe.experts / plan.ep)
    dealt = 1.0 / sqrt(tokens * shape.moe.routed_rows)
    load = sqrt(popularity**2 + dealt**2) if popularity else 0.0
    per_node = min(plan.ep, frame.layout.gpus_per_node)
    nodes = plan.ep // per_node
    return MemberLag(
        clock,
        z * scenario.variation.jitter_cv.value,
        z * load,
        z * load,
        expected_maximum(nodes) * load / sqrt(per_node),
    )


def clock_lag_of(scenario: Scenario, frame: Frame) -> float:
    """The part of a plan's lag that lasts, `MemberLag.clock`."""
    sync = GradientSync.of(frame.plan, scenario.software, frame.microbatches)
    # All GPUs of a pipeline rank meet at the end of the step, so the slowest decides (eq. E1b).
    clock = expected_maximum(frame.layout.gpus_per_pipeline_rank) * scenario.variation.clock_cv.value
    # Behind a member are GPUs that meet in every layer, so a phase lasts as long as on the latest (E1a).
    return clock + expected_maximum(gpus_in_step(frame.layout, sync)) * scenario.variation.jitter_cv.value


SAMPLED_MICROBATCHES = 4
"""Micro-batches of every routed layer over which loads are averaged."""


class _Load(Struct, frozen=True):
    """Received rows of the ranks of a group, relative to even routing.

    `kept`: mean rows that capacity does not drop. `rank` and `node`: rows above `kept` of the fullest rank
    and node, mean over layers and micro-batches. `hot`: rows above `kept` of the rank with the most rows
    over all layers together. `least`: mean over the ranks in the layer and micro-batch with the most drops.
    """

    kept: float
    rank: float
    node: float
    hot: float
    least: float

    @classmethod
    def of(cls, loads: RankLoads) -> _Load:
        """The statistics of drawn rows."""
        rows, kept = loads.rows, min(1.0, float(loads.rows.mean()))
        rank, node = (max(0.0, float(part.max(axis=1).mean()) - kept) for part in (rows, loads.node_rows))
        hot = float(rows.mean(axis=0).max()) - kept
        return cls(kept, rank, node, max(0.0, min(rank, hot)), min(1.0, float(rows.mean(axis=1).min())))


class ExpertLoads(Struct):
    """Expert loads of a search: the legality of placements and the spread of received rows (eqs. P3, P5)."""

    scenario: Scenario
    shape: ModelShape
    _popularity: Popularity | None = None
    _problems: dict[object, str | None] = field(default_factory=dict)
    _specs: dict[object, LoadSpec] = field(default_factory=dict)
    _loads: dict[object, _Load] = field(default_factory=dict)

    def problem(self, layout: Layout, placement: Placement) -> str | None:
        """The reason why a plan cannot have a placement; None if it can."""
        plan = layout.plan
        key = (plan.ep, plan.expert_tp, placement)
        if key not in self._problems:
            self._problems[key] = self._problem(layout, placement)
        return self._problems[key]

    def _problem(self, layout: Layout, placement: Placement) -> str | None:
        given = stated_load_keys(with_placement(self.scenario, placement).routing)
        try:
            check_load_has_ep(given, layout.plan.ep)
            if placement is not None and self.shape.moe is not None:
                check_eplb(placement, self.shape.moe, layout)
        except InputError as error:
            return str(error)
        return None

    def spread(self, frame: Frame, placement: Placement) -> MemberLag:
        """How much the slowest member of a group lags behind the mean.

        If ranks differ only by the random assignment of rows, the lag is the expected maximum (eq. P3).
        Lasting popularity, a placement or a capacity make ranks differ throughout the step; the lag then
        comes from rows that are drawn as the engine draws them (eq. P5).
        """
        scenario = with_placement(self.scenario, placement)
        plain = member_lag_of(scenario, self.shape, frame)
        moe = self.shape.moe
        if moe is None or frame.plan.ep == 1 or not stated_load_keys(scenario.routing):
            return plain
        load = self._load(scenario, frame, placement)
        return MemberLag(
            plain.clock,
            plain.jitter,
            max(0.0, load.rank - load.hot),
            load.rank,
            load.node,
            load.kept,
            load.hot,
            lasting=True,
        )

    def least_kept(self, frame: Frame, placements: Sequence[Placement]) -> float:
        """Least share of the routed rows that capacity keeps in any layer, micro-batch and placement.

        It is 1 if nothing is dropped.
        """
        if self.scenario.routing.capacity is None or self.shape.moe is None or frame.plan.ep == 1:
            return 1.0
        legal = [p for p in placements if self.problem(frame.layout, p) is None]
        loads = [self._load(with_placement(self.scenario, p), frame, p) for p in legal]
        return min((load.least for load in loads), default=1.0)

    def _load(self, scenario: Scenario, frame: Frame, placement: Placement) -> _Load:
        """Rows of one group, drawn as the engine draws them, for a few micro-batches."""
        plan, moe = frame.plan, self.shape.moe
        assert moe is not None
        rows = tokens_per_gpu(plan, scenario.batch.sequence_length) * moe.routed_rows
        which = (plan.ep, plan.expert_tp, placement)
        if (which, rows) not in self._loads:
            layers = sum(may_route(block.kind) for block in blocks_of(self.shape))
            if self._popularity is None:
                self._popularity = popularity_of(scenario, moe, layers)
            if which not in self._specs:
                planned = scenario.model_copy(update={"parallel": plan})
                self._specs[which] = load_spec(planned, self.shape, frame.layout, layers, self._popularity)
            loads = draw_rank_loads(
                self._specs[which],
                seed=scenario.seed,
                group=0,
                layers=layers,
                microbatches=SAMPLED_MICROBATCHES,
                ep=plan.ep,
                gpus_per_node=frame.layout.gpus_per_node,
                experts=moe.experts,
                top_k=moe.top_k,
                rows_per_rank=rows,
            )
            self._loads[which, rows] = _Load.of(loads)
        return self._loads[which, rows]
