"""Trainers refuse models whose features their plans cannot say, with one reason for each feature."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from model_kinds import EVERY, GPT_OSS, LATENT, LONGCAT, MAVERICK, saved, shape_of

from moesim.hwmodels.errors import InfeasibleError
from moesim.simulator.model.attention import ATTENTION_KINDS
from moesim.simulator.model.catalogue import load_model
from moesim.simulator.planner.search import plan
from moesim.simulator.planner.space import PlanSpace
from moesim.simulator.scenario import Scenario, load_scenario
from moesim.simulator.trainers.registry import TRAINERS, trainer_of
from moesim.simulator.trainers.rules import FEATURES, feature_exclusions, missing_features
from moesim.simulator.trainers.trainer import description


def scenario(data: dict[str, Any], folder: Path, *more: str) -> Scenario:
    return load_scenario(
        "deepseek-v3-2048xh800",
        [
            f"model={saved(data, folder)}",
            "cluster={node: hgx-h200, nodes: 2, network: mrft-ib-400g, price_per_gpu_hour: $2.5/h}",
            "profile=h200-measured",
            "precision=bf16",
            "parallel={pp: 1, ep: 8, zero_stage: 1}",
            "schedule=1f1b",
            "batch.sequences=128",
            "recompute=full",
            "run.tokens=1e11",
            *more,
        ],
    )


def test_every_feature_has_words() -> None:
    """Also those of kinds of attention that a later file registers."""
    assert ATTENTION_KINDS.keys() <= FEATURES.keys() | {"linear"}
    for data in EVERY.values():
        assert shape_of(data).features <= FEATURES.keys()
    assert missing_features(shape_of(GPT_OSS), ["gqa"]) == tuple(
        FEATURES[name]
        for name in ("attention-sinks", "expert-biases", "router-bias", "several-attentions", "sliding")
    )


def test_features_are_what_is_not_plain() -> None:
    for name in ("deepseek-v3", "kimi-k2", "qwen3-235b-a22b", "mixtral-8x22b", "llama-3-70b"):
        assert load_model(name).features <= {"gqa", "mla"}
    assert {"attention-sinks", "sliding", "several-attentions"} <= load_model("gpt-oss-120b").features
    latent = {"gqa", "latent-experts", "ungated-experts"}
    assert shape_of(LATENT).features == latent
    assert shape_of(LONGCAT).features == {"mla", "zero-experts"}
    assert shape_of(MAVERICK).features == {
        "gqa",
        "chunked",
        "several-attentions",
        "attention-without-rotation",
    }
    more = {"norm": "layernorm", "norm_position": "sandwich", "learned_positions": 8, "residual_streams": 4}
    named = {"layernorm", "sandwich-norms", "learned-positions", "residual-streams"}
    assert shape_of(LATENT, **more).features == latent | named
    hybrid = shape_of(LATENT, ffn_layers=["moe", "none"])
    assert "missing-halves" in hybrid.features


@pytest.mark.parametrize("name", TRAINERS)
def test_a_plan_of_another_model_is_refused_in_words(name: str, tmp_path: Path) -> None:
    trainer = trainer_of(name)
    own = scenario(LATENT, tmp_path)
    reasons = trainer.problems_of(own)
    assert any("experts on latent rows" in reason for reason in reasons), reasons
    assert any("experts without a gate projection" in reason for reason in reasons)
    export = trainer.arguments(own)
    assert any("experts on latent rows" in sentence for sentence in export.unspelled)
    with pytest.raises(InfeasibleError, match="cannot train latent as the scenario says"):
        plan(own, PlanSpace(), trainer=name)


def test_a_kind_of_attention_that_nobody_named_is_excluded_too() -> None:
    exclusions = feature_exclusions(("gqa",))
    assert not any(e.applies({"features": ("gqa",)}) for e in exclusions)
    (caught,) = (e for e in exclusions if e.applies({"features": ("gqa", "of-next-year")}))
    assert "a part of this model" in caught.because
    assert [e.because for e in exclusions if e.applies({"features": ("sliding",)})] == [
        "moesim knows no setting of it for attention over sliding windows"
    ]


def test_megatron_bridge_trains_gpt_oss_from_its_own_recipe(tmp_path: Path) -> None:
    assert {"sliding", "attention-sinks", "expert-biases"} <= set(description("bridge").features)
    reasons = trainer_of("bridge").problems_of(scenario(GPT_OSS, tmp_path))
    assert not any("moesim knows no setting" in reason for reason in reasons)
