"""The search tries the numbers of SMs with which kernels were published, and says what fewer would change."""

from __future__ import annotations

import pytest

from moesim.simulator.dispatchers.registry import dispatcher
from moesim.simulator.planner.result import simulate_plan
from moesim.simulator.planner.search import RISK, plan
from moesim.simulator.planner.space import PlanSpace, with_defaults
from moesim.simulator.scenario import Scenario, load_scenario

SPACE = {
    "tp": (1,), "pp": (2,), "cp": (1,), "vpp": (1,), "microbatch": (1,), "zero_stage": (1,),
    "schedule": ("1f1b", "dualpipev"), "recompute": ("full",), "precision": ("bf16",),
}  # fmt: skip


def small(*more: str) -> Scenario:
    return load_scenario(
        "deepseek-v3-2048xh800",
        [
            "model=qwen3-30b-a3b", "profile=h200-measured", "precision=bf16",
            "cluster={node: hgx-h200, nodes: 4, network: mrft-ib-400g}",
            "parallel={pp: 2, ep: 8, zero_stage: 1}", "schedule=1f1b", "batch.sequences=128", *more,
        ],
    )  # fmt: skip


def tried(scenario: Scenario) -> tuple[int, ...]:
    return with_defaults(PlanSpace(), scenario, scenario.shape, scenario.machine).sms


def test_the_default_numbers_are_the_published_ones() -> None:
    assert tried(small()) == (20, 24)
    assert tried(small("communication.sms=12")) == (12, 20, 24)
    assert tried(small("communication.kernels=nccl", "communication.sms=16")) == (16,)
    assert tried(small("model=llama-3-8b", "parallel={pp: 2}")) == (20,)


@pytest.mark.parametrize("kernels", ["deepep-2025-02", "deepep-2025-04"])
def test_every_range_has_its_source(kernels: str) -> None:
    found = dispatcher(kernels).sms
    assert found is not None
    assert 0 < found.fewer < found.least.n < found.most.n
    assert "deepseek-ai/DeepEP@" in found.least.source and "deepseek-ai/DeepEP@" in found.most.source
    assert dispatcher("nccl").sms is None


def test_a_note_says_what_fewer_would_change() -> None:
    found = plan(small(), PlanSpace(**SPACE, ep=(8,)), top=1, workers=1)
    assert {row.sms for row in found.ranked} <= {20, 24}
    note = next(note for note in found.notes if "no fewer are tried" in note)
    assert note.startswith("deepep-2025-02 was published with 20 to 24 SMs") and note.endswith(RISK)
    stated = float(note.partition("best plan by ")[2].partition("%")[0])
    best = found.ranked[0]
    few = best.scenario.replace(communication={"sms": 10})
    fewer_s = simulate_plan(few).time_s
    assert fewer_s is not None
    assert stated == pytest.approx(100 * (fewer_s / best.time_s - 1.0), abs=1.5)


def test_no_note_where_the_numbers_are_stated_or_nothing_is_sent() -> None:
    for space in (PlanSpace(**SPACE, ep=(8,), sms=(8, 20)), PlanSpace(**SPACE, ep=(1,))):
        assert not any("no fewer are tried" in n for n in plan(small(), space, top=1, workers=1).notes)
