"""The scenario's expert load end to end: keys, files, plan, memory, time."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moesim
from moesim.hwmodels.errors import InputError
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.layout.expert_load import sampled_loads
from moesim.simulator.layout.job import resolve
from moesim.simulator.layout.popularity import max_vio_shares
from moesim.simulator.predict.result import Result
from moesim.simulator.predict.step import Prepared, prepare
from moesim.simulator.scenario import load_scenario
from moesim.simulator.scenario.sections import BiasLoad, MaxVioLoad

SMALL = Path(__file__).parents[2] / "golden" / "scenario-small.yaml"
"""Mixtral 8x22B: 8 experts, top 2, 56 layers, EP8 on nodes of 8."""

HOME = "deepseek-v3-2048xh800"
QWEN = ("model=qwen3-30b-a3b", "batch.sequences=16", "recompute=selective", "stages.layers=[12, 12, 12, 12]")


def small(*overrides: str) -> Prepared:
    return prepare(load_scenario(str(SMALL), overrides))


def predicted(*overrides: str) -> Result:
    return moesim.simulate(str(SMALL), *QWEN, *overrides)


def test_the_home_case_draws_what_it_always_drew(home_case: Any) -> None:
    prepared = home_case[0]
    expected = sampled_loads(0, 59 * 120, 64, 256, 0.16, 32768.0)
    assert np.array_equal(prepared.program.variation.loads.reshape(-1, 64), expected)
    assert prepared.loads is not None and prepared.draws.spec.notes == ()


def test_imbalance_costs_time_and_replicas_buy_it_back_with_memory() -> None:
    even = predicted("routing.load={kind: uniform}")
    steep = "routing.load={kind: zipf, exponent: 0.6}"
    hot = predicted(steep)
    balanced = predicted(steep, "routing.eplb={redundant_experts: 32, policy: global}")
    assert even.step.time_s < balanced.step.time_s < hot.step.time_s
    for result in (even, hot, balanced):
        assert result.step.lower_bound_s <= result.step.time_s <= result.step.upper_bound_s
    for kind in ("weights", "gradients", "optimizer"):
        assert balanced.memory.by_kind_bytes[kind] > hot.memory.by_kind_bytes[kind] * 1.15
    assert any("Zipf" in note for note in hot.extrapolated)


def test_memory_counts_replicas_as_experts() -> None:
    before = small("parallel.zero_stage=0")
    after = small("parallel.zero_stage=0", "routing.eplb={redundant_experts: 8}")
    expert = 3 * 6144 * 16384 * 2  # bytes of one expert in BF16
    grown = after.memory_by_rank.by_rank[0].weights - before.memory_by_rank.by_rank[0].weights
    assert grown == pytest.approx(14 * expert)  # 14 layers a rank, one replica more on every GPU


def test_capacity_is_told_in_the_result() -> None:
    tight = predicted("routing.load={kind: zipf, exponent: 0.6}", "routing.capacity={factor: 1.1, per: rank}")
    free = predicted("routing.load={kind: zipf, exponent: 0.6}")
    assert tight.step.time_s < free.step.time_s
    assert any("drops" in warning and "%" in warning for warning in tight.warnings)
    assert not free.warnings


def test_a_global_placement_gives_up_node_limited_routing() -> None:
    def nodes(policy: str) -> float:
        scenario = load_scenario(HOME, [f"routing.eplb={{redundant_experts: 64, policy: {policy}}}"])
        return Pricer(resolve(scenario)).targets().distinct_nodes

    assert nodes("hierarchical") == pytest.approx(3.97, abs=0.01)
    assert nodes("global") == pytest.approx(8 * (1 - (7 / 8) ** 8), rel=0.01)


def test_a_recorded_step_can_be_chosen(tmp_path: Path) -> None:
    steps = np.full((2, 56, 8), 1000)
    steps[1, :, 0], steps[1, :, 1] = 1900, 100
    np.save(tmp_path / "loads.npy", steps)
    (tmp_path / "run.yaml").write_text(SMALL.read_text())

    def peak(step: int) -> float:
        load = f"routing.load={{kind: histogram, file: loads.npy, step: {step}}}"
        loads = prepare(load_scenario(str(tmp_path / "run.yaml"), [load])).loads
        assert loads is not None
        return float(loads.rows.mean(axis=0)[0])

    assert peak(0) == pytest.approx(1.0, abs=0.03) and peak(1) == pytest.approx(1.9, abs=0.05)
    with pytest.raises(InputError, match=r"step=2.*steps 0 to 1"):
        peak(2)


def test_bias_dynamics_as_a_load() -> None:
    keys = "kind: bias, affinity_spread: 0.5, drift_steps: 1000"
    start, late = (
        prepare(load_scenario(HOME, [f"routing.load={{{keys}, step: {n}}}", "batch.sequences=4096"]))
        for n in (1, 200)
    )
    assert start.loads is not None and late.loads is not None
    assert late.loads.rows.max(axis=1).mean() < start.loads.rows.max(axis=1).mean() - 0.3
    assert "MaxVio after 200" in late.draws.spec.notes[0]
    load = late.scenario.routing.load
    assert isinstance(load, BiasLoad) and load.gamma.value == 0.001 and "2412.19437" in load.gamma.source


@pytest.mark.parametrize("max_vio", [0.0, 0.04, 0.52, 31.0])
def test_the_busiest_expert_has_the_published_excess(max_vio: float) -> None:
    shares = max_vio_shares(max_vio, layers=5, experts=256, top_k=8, seed=1)
    assert shares.sum(axis=1) == pytest.approx(np.ones(5))
    assert shares.max(axis=1) * 256 - 1 == pytest.approx(max_vio, abs=1e-6)
    assert len({int(row.argmax()) for row in shares}) > 1 or max_vio == 0.0


def test_published_imbalance_falls_while_training() -> None:
    def load(step: int) -> MaxVioLoad:
        number = {"kind": "assumed", "source": "test", "date": "2026-11-22"}
        return MaxVioLoad.model_validate(
            {
                "kind": "maxvio",
                "max_vio": {"value": 0.04, **number},
                "start": {"value": 2.0, **number},
                "settling_steps": {"value": 100, **number},
                "step": step,
            }
        )

    assert load(0).now == 2.0
    assert load(100).now == pytest.approx(0.04 + 1.96 / math.e)
    assert load(10_000).now == pytest.approx(0.04)


@pytest.mark.parametrize(
    ("settings_", "words"),
    [
        (("routing.load.kind=zipff",), "zipff.*zipf"),
        (("routing.load={kind: zipf}",), "routing.load.exponent is missing"),
        (("routing.load={kind: zipf, exponent: 12}",), "exponent: 12 .*0 to 10"),
        (("routing.load={kind: zipf, exponent: -1}",), "exponent=-1"),
        (("routing.load={kind: zipf, exponent: 1, shufle: true}",), "shufle.*shuffle_per_layer"),
        (("routing.load={kind: uniform, exponent: 1}",), r"exponent: unknown key; the keys here are kind$"),
        (("routing.load={kind: histogram, file: absent.csv}",), "absent.csv"),
        (("routing.load={kind: bias, affinity_spread: 1, drift_steps: 9, step: 1}",), "softmax"),
        (("routing.load={kind: bias, affinity_spread: 1, drift_steps: 9, step: 0}",), "step=0"),
        (("routing.load={kind: maxvio, max_vio: 8}",), "max_vio=8 .*0 to 3.*nearest: 3"),
        (("routing.load={kind: maxvio, max_vio: 1, start: 2}",), "start and settling_steps"),
        (("routing.load={kind: maxvio, max_vio: 1, step: 5}",), "step=5 makes no difference"),
        (("routing.capacity={factor: 0}",), "factor"),
        (("routing.capacity={factor: 1, per: gpu}",), "'gpu'.*expert, rank"),
        (("routing.eplb={redundant_experts: 4}",), "redundant_experts=4 .*ep=8.*nearest: 0, 8"),
        (("routing.eplb={redundant_experts: -8}",), "redundant_experts=-8"),
        (("routing.eplb={redundant_experts: 64}",), "at most 56"),
        (("routing.eplb={redundant_experts: 8, groups: 3}",), "groups=3.*nearest: 2, 4"),
        (("routing.eplb={redundant_experts: 16, policy: globl}",), "globl.*global"),
        (("parallel.ep=1", "routing.load={kind: uniform}"), "parallel.ep=1"),
        (("model=llama-3-8b", "parallel.ep=1", "routing.load={kind: uniform}"), "llama-3-8b has no experts"),
    ],
)
def test_bad_loads(settings_: tuple[str, ...], words: str) -> None:
    with pytest.raises(InputError, match=f"(?s){words}"):
        small(*settings_)


def test_groups_that_do_not_fill_nodes() -> None:
    with pytest.raises(InputError, match=r"4 groups .*8 nodes.*global"):
        prepare(load_scenario(HOME, ["routing.eplb={redundant_experts: 64, groups: 4}"]))
