from __future__ import annotations

import pytest

from moesim.simulator.layout.parallel import Layout
from moesim.simulator.layout.stages import blocks_of, from_layers_per_stage
from moesim.simulator.memory.gpu import MemoryInputs, memory_by_kind, rank_stages
from moesim.simulator.model.catalogue import load_model
from moesim.simulator.model.precision import PRECISIONS
from moesim.simulator.model.recompute import RecomputePolicy
from moesim.simulator.scenario.parallel import ParallelPlan
from moesim.simulator.schedules import build
from moesim.simulator.schedules.spec import validate


def test_1f1b_holds_one_less_on_each_later_rank() -> None:
    ranks = rank_stages(build("1f1b", 4, 8))
    assert [rank.in_flight for rank in ranks] == [({r: 4 - r},) for r in range(4)]


def test_dualpipe_never_exceeds_one_more_than_the_ranks() -> None:
    schedule = build("dualpipe", 16, 120)
    for rank, report in zip(rank_stages(schedule), validate(schedule).ranks, strict=True):
        peaks = [sum(state.values()) for state in rank.in_flight]
        assert max(peaks) == report.peak_in_flight <= 17
        assert dict(report.peak_stages) in rank.in_flight
        assert set(rank.stages) >= {stage for state in rank.in_flight for stage in state}


@pytest.mark.parametrize(("policy", "fits"), [("deepseek-v3", True), ("none", False)])
def test_home_case_with_its_schedule(policy: RecomputePolicy, fits: bool) -> None:
    shape = load_model("deepseek-v3")
    layout = Layout(ParallelPlan(pp=16, ep=64, zero_stage=1), 2048, 8)
    inputs = MemoryInputs(shape, layout, PRECISIONS["fp8"], policy, 4096, 20, "deepep-2025-02")
    stages = from_layers_per_stage(blocks_of(shape), (4,) * 15 + (1,))
    report = memory_by_kind(inputs, stages, rank_stages(build("dualpipe", 16, 120)), 80e9)
    assert report.fits is fits
