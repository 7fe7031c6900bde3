"""Lag of the slowest member of a group, computed from the spreads that a scenario states."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from moesim.simulator.common.order_statistics import expected_maximum
from moesim.simulator.layout.gradient_sync import GradientSync
from moesim.simulator.layout.groups import gpus_in_step, members_per_program
from moesim.simulator.layout.parallel import tokens_per_gpu
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.planner.frames import Frame
from moesim.simulator.scenario import Scenario


@dataclass(frozen=True, slots=True)
class MemberLag:
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
    n, sync = (
        members_per_program(frame.layout),
        GradientSync.of(frame.plan, scenario.software, frame.microbatches),
    )
    z = expected_maximum(n)
    # All GPUs of a pipeline rank meet at the end of the step, so the slowest decides (eq. E1b).
    clock = expected_maximum(frame.layout.gpus_per_pipeline_rank) * scenario.variation.clock_cv.value
    # Behind a member are GPUs that meet in every layer, so a phase lasts as long as on the latest (E1a).
    clock += expected_maximum(gpus_in_step(frame.layout, sync)) * scenario.variation.jitter_cv.value
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
