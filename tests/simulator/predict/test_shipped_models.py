"""Every shipped model runs through memory, prices and the engine; a search finds plans for hybrid ones."""

from __future__ import annotations

from typing import Any

import pytest

import moesim
from moesim.simulator.model.catalogue import load_model, shipped_models
from moesim.simulator.scenario import Scenario


def on_one_node(name: str, **keys: Any) -> Scenario:
    """Eight H200, with all experts over the node; memory is not asked to suffice."""
    routed = load_model(name).moe is not None
    data = {
        "model": name,
        "cluster": {"accelerator": "h200-sxm", "nodes": 1},
        "profile": "h200-8gpu",
        "parallel": {"ep": 8 if routed else 1, "zero_stage": 3},
        "schedule": "1f1b",
        "batch": {"sequences": 8, "sequence_length": 4096},
    }
    return Scenario.model_validate(data | keys)


@pytest.mark.long
@pytest.mark.parametrize("name", shipped_models())
def test_a_shipped_model_is_predicted_between_its_bounds(name: str) -> None:
    scenario = on_one_node(name)
    result, estimate = moesim.simulate(scenario), moesim.estimate(scenario)
    step = result.step
    assert 0.0 < step.lower_bound_s <= step.time_s <= step.upper_bound_s
    assert estimate.step_time_s == pytest.approx(step.time_s, rel=0.1)
    assert 0.02 < step.mfu_causal < 0.7
    assert result.memory.by_kind_bytes["weights"] > 0 and result.memory.by_kind_bytes["activations"] > 0


HYBRID = ("gpt-oss-120b", "qwen3-next-80b-a3b", "nemotron-3-nano-30b-a3b", "deepseek-v4-flash")
"""Models with windows, gated delta nets, Mamba-2 and halves that are missing, and compressed attention."""


@pytest.mark.parametrize("name", HYBRID)
def test_a_search_finds_a_plan_that_fits_and_beats_the_stated_one(name: str) -> None:
    data = {
        "model": name,
        "cluster": {"accelerator": "h200-sxm", "nodes": 8},
        "profile": "h200-8gpu",
        "parallel": {"pp": 4, "ep": 8, "zero_stage": 1},
        "schedule": "1f1b",
        "recompute": "full",
        "batch": {"sequences": 256, "sequence_length": 4096},
        "software": {"framework": "none"},
    }
    scenario = Scenario.model_validate(data)
    space = moesim.PlanSpace(
        tp=(1,), cp=(1,), pp=(2, 4), ep=(8,), microbatch=(1,), schedule=("1f1b",),
        recompute=("selective", "full"), zero_stage=(1,), sms=(20,),
    )  # fmt: skip
    found = moesim.plan(scenario, space, top=1, workers=1)
    best = found.ranked[0]
    assert best.headroom_bytes > 0.0 and best.source == "simulated"
    assert sum(best.layers) == load_model(name).n_layers
    assert found.own is not None and best.time_s <= 1.001 * found.own.time_s
