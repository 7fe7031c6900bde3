"""How uneven the rows of the ranks are under each placement of the experts, and which plans can have it."""

from __future__ import annotations

from dataclasses import dataclass, field

from moesim.hwmodels.errors import InputError
from moesim.simulator.layout.expert_load import LoadSpec, draw_rank_loads
from moesim.simulator.layout.parallel import Layout
from moesim.simulator.layout.stages import blocks_of
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.planner.frames import Frame
from moesim.simulator.planner.placements import Placement, with_placement
from moesim.simulator.planner.spread import Spread, spread_of
from moesim.simulator.routing_load import (
    Popularity,
    check_eplb,
    check_spread,
    given_load,
    load_spec,
    popularity_of,
)
from moesim.simulator.scenario import Scenario

SAMPLED_MICROBATCHES = 4
"""Micro-batches of every routed layer from which the load of the slowest rank is averaged."""


@dataclass(slots=True)
class ExpertLoads:
    """Expert loads of a search: legality of placements, and the spread of received rows (eqs. P3 and P5)."""

    scenario: Scenario
    shape: ModelShape
    _popularity: Popularity | None = None
    _problems: dict[object, str | None] = field(default_factory=dict)
    _specs: dict[object, LoadSpec] = field(default_factory=dict)
    _uneven: dict[object, tuple[float, float]] = field(default_factory=dict)

    def problem(self, layout: Layout, placement: Placement) -> str | None:
        """Why a plan cannot have a placement; None where it can."""
        plan = layout.plan
        key = (plan.ep, plan.expert_tp, placement)
        if key not in self._problems:
            self._problems[key] = self._problem(layout, placement)
        return self._problems[key]

    def _problem(self, layout: Layout, placement: Placement) -> str | None:
        given = given_load(with_placement(self.scenario, placement).routing)
        try:
            check_spread(given, layout.plan.ep)
            if placement is not None and self.shape.moe is not None:
                check_eplb(placement, self.shape.moe, layout)
        except InputError as error:
            return str(error)
        return None

    def spread(self, frame: Frame, placement: Placement) -> Spread:
        """How much the slowest member of a group lags.

        Where only the dealing of rows differs, by the expected maximum (eq. P3). Lasting popularity, a
        placement or a capacity make ranks differ for good: the slowest of every layer is read off rows
        drawn as the engine draws them.
        """
        scenario = with_placement(self.scenario, placement)
        plain = spread_of(scenario, self.shape, frame)
        moe = self.shape.moe
        if moe is None or frame.plan.ep == 1 or not given_load(scenario.routing):
            return plain
        rows = frame.plan.microbatch * scenario.batch.sequence_length / (frame.plan.cp * frame.plan.tp)
        rank, node = self._slowest(scenario, frame, placement, rows * moe.top_k)
        return Spread(plain.clock, plain.jitter, rank, rank, node)

    def _slowest(
        self, scenario: Scenario, frame: Frame, placement: Placement, rows: float
    ) -> tuple[float, float]:
        """Mean over layers of what the rank, and the node, with the most rows has above the mean."""
        plan, moe = frame.plan, self.shape.moe
        assert moe is not None
        which = (plan.ep, plan.expert_tp, placement)
        if (which, rows) not in self._uneven:
            layers = sum(block.kind in ("moe", "mtp") for block in blocks_of(self.shape))
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
            above = (max(0.0, float(part.max(axis=1).mean()) - 1.0) for part in (loads.rows, loads.node_rows))
            self._uneven[which, rows] = next(above), next(above)
        return self._uneven[which, rows]
