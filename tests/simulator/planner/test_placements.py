"""Placement of experts in a search, and memory and prices of what the framework does."""

from __future__ import annotations

import random
from typing import Any

import pytest
from planner_jobs import candidates_of

from moesim.hwmodels.errors import InfeasibleError
from moesim.simulator.model.catalogue import load_model
from moesim.simulator.planner.placements import default_placements, parse_placement, placement_name
from moesim.simulator.planner.result import closed_form_memory, scenario_of, simulate_plan
from moesim.simulator.planner.search import plan
from moesim.simulator.planner.space import PlanSpace
from moesim.simulator.predict.step import prepare
from moesim.simulator.scenario import load_scenario
from moesim.simulator.scenario.sections import Eplb

SMALL = [
    "model=qwen3-30b-a3b",
    "cluster={node: hgx-h200, nodes: 4, network: mrft-ib-400g, price_per_gpu_hour: $2.5/h}",
    "profile=h200-measured",
    "precision=bf16",
    "parallel={pp: 2, ep: 16, zero_stage: 1}",
    "schedule=1f1b",
    "batch.sequences=128",
    "recompute=selective",
    "run.tokens=1e11",
]
ZIPF = "routing.load={kind: zipf, exponent: {value: 0.6, kind: assumed, source: a test, date: '2026-11-20'}}"
SPACE: dict[str, Any] = {
    "tp": (1,), "pp": (2,), "ep": (1, 16), "cp": (1,), "vpp": (1,), "microbatch": (1,),
    "schedule": ("1f1b", "dualpipev"), "recompute": ("selective",), "precision": ("bf16",), "sms": (8, 20),
    "zero_stage": (1,),
}  # fmt: skip


@pytest.mark.parametrize(
    "software",
    [
        "{attention: unfused, kernels: eager, overlap_tensor_parallel: full, overlap_data_parallel: true}",
        "{parameters_copied: true, kernels: eager, overlap_data_parallel: true}",
        "{overlap_tensor_parallel: weight-gradient, overlap_context_parallel: true}",
    ],
)
@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "llama-3-8b"])
def test_memory_and_time_are_those_of_simulate_whatever_the_framework_does(software: str, model: str) -> None:
    dense = [] if model.startswith("qwen") else ["parallel.ep=1", "batch.sequences=32"]
    fp32_loss = "precision={linear: bf16, loss: fp32}"
    scenario = load_scenario(
        "deepseek-v3-2048xh800",
        [*SMALL, *dense, f"model={model}", f"software={software}", fp32_loss, "software.framework=none"],
    )
    wanted = PlanSpace(
        tp=(1, 2), pp=(1, 2), ep=(1, 8), cp=(1, 2), vpp=(2,), microbatch=(1,), sms=(20,),
        schedule=("1f1b", "interleaved-1f1b", "dualpipev"),
    )  # fmt: skip
    if model.startswith("llama"):
        wanted = wanted.model_copy(update={"ep": (1,)})
    found, study = candidates_of(scenario, wanted)
    draw = random.Random(0)
    once = [n for n in range(len(found.bound)) if found.axes(n)[0].microbatches == 1]
    numbers = draw.sample(range(len(found.bound)), 8) + draw.sample(once, min(4, len(once)))
    study.estimate(numbers)
    for number in numbers:
        chosen = scenario_of(scenario, found, number)
        label = f"{found.axes(number)[0].label} {chosen.recompute} {chosen.parallel.zero_stage}"
        report = prepare(chosen).memory
        assert found.memory[number] == pytest.approx(report.total_bytes, rel=1e-9), label
        alone = closed_form_memory(chosen, study.shape, chosen.machine, found, number)
        assert alone.memory.by_kind_bytes == report.by_kind_bytes
    for number in numbers[:2]:
        simulated = simulate_plan(scenario_of(scenario, found, number)).time_s
        assert found.time_s[number] == pytest.approx(simulated, rel=0.05)


@pytest.mark.parametrize(
    ("text", "placement"),
    [
        ("in order", None),
        ("hierarchical", Eplb(redundant_experts=0)),
        ("global+64", Eplb(redundant_experts=64, policy="global")),
    ],
)
def test_placements_are_written_as_they_are_read(text: str, placement: Eplb | None) -> None:
    assert parse_placement(text) == placement
    assert placement_name(placement) == text


@pytest.mark.parametrize("text", ["", "global+", "global-8", "hierarchical+1000000000", "everywhere"])
def test_unknown_placements_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="is not known"):
        parse_placement(text)
    with pytest.raises(ValueError, match="is not known"):
        PlanSpace(placement=(text,))


def test_only_uneven_experts_make_a_search_place_them() -> None:
    even, shape = load_scenario("deepseek-v3-2048xh800", SMALL), load_model("qwen3-30b-a3b")
    assert default_placements(even, shape) == (None,)
    uneven = load_scenario("deepseek-v3-2048xh800", [*SMALL, ZIPF])
    tried = [placement_name(p) for p in default_placements(uneven, shape)]
    assert tried[0] == "in order" and len(tried) == 9 and "global+32" in tried
    assert default_placements(uneven, load_model("llama-3-8b")) == (None,)


def test_the_search_places_uneven_experts_and_pays_for_the_replicas() -> None:
    scenario = load_scenario("deepseek-v3-2048xh800", [*SMALL, ZIPF])
    found = plan(scenario, PlanSpace(**SPACE), top=3)
    fixed = plan(scenario, PlanSpace(**SPACE, placement=("in order",)), top=3)
    assert found.considered == 9 * fixed.considered
    assert found.considered == found.fitting + sum(row.count for row in found.refused)
    assert found.best.placement != "in order" and found.best.time_s < 0.95 * fixed.best.time_s
    reasons = " ".join(row.reason for row in found.refused)
    assert "routing.load is given, but parallel.ep=n" in reasons
    assert "cannot spread" in reasons
    odd = plan(scenario, PlanSpace(**SPACE, placement=("global", "global+24")), top=1)
    assert "redundant_experts=n is not a multiple" in " ".join(row.reason for row in odd.refused)
    for row in found.ranked:
        assert row.placement == placement_name(row.scenario.routing.eplb)
        assert row.memory_bytes == prepare(row.scenario).memory.total_bytes
        assert row.closed_form_s == pytest.approx(row.time_s, rel=0.05), row.label
    lean = plan(scenario, PlanSpace(**SPACE), objective="memory", top=1)
    assert "+" not in lean.best.placement
    assert lean.best.memory_bytes <= found.best.memory_bytes


def test_placements_with_equal_prices_have_their_own_lag_and_time() -> None:
    """In order and hierarchical without replicas share every price; only the rows of the ranks differ."""
    scenario = load_scenario("deepseek-v3-2048xh800", [*SMALL, ZIPF])
    wanted = PlanSpace(**{**SPACE, "ep": (8,)}, placement=("in order", "hierarchical"))
    found, study = candidates_of(scenario, wanted)
    number = next(n for n in range(len(found.bound)) if len(found.placements_of(n)) == 2)
    study.estimate([number])
    times = {int(found.placement[number]): float(found.time_s[number])}
    times |= {place: seconds for seconds, _, place in found.others[number]}
    frame, layers = found.axes(number)[0], found.assignment(number).layers_per_stage
    alone = {
        n: study.seconds_of(scenario_of(scenario, found, number, n), layers, frame.microbatches)
        for n in times
    }
    assert times == alone
    assert times[1] < 0.99 * times[0]


def test_every_placement_of_a_plan_counts_its_own_memory() -> None:
    scenario = load_scenario("deepseek-v3-2048xh800", [*SMALL, ZIPF])
    found, study = candidates_of(scenario, PlanSpace(**SPACE))
    study.estimate(range(len(found.bound)))
    for number in range(0, len(found.bound), 3):
        tried = [*found.others[number]]
        assert found.time_s[number] <= min(seconds for seconds, _, _ in tried)
        for _, bytes_, placement in tried[::2]:
            chosen = scenario_of(scenario, found, number, placement)
            assert bytes_ == pytest.approx(prepare(chosen).memory.total_bytes, rel=1e-9)


def test_a_load_without_expert_parallelism_is_refused_by_its_reason() -> None:
    scenario = load_scenario("deepseek-v3-2048xh800", [*SMALL, ZIPF])
    with pytest.raises(InfeasibleError, match=r"routing\.load is given, but parallel\.ep=n"):
        plan(scenario, PlanSpace(**{**SPACE, "ep": (1,)}))
