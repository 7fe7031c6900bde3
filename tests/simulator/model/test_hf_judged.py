"""Counts of imported models against transformers' own classes (lab/docs/proof/model-parameters.json)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moesim.simulator.model.counts import parameters_by_component, parameters_total
from moesim.simulator.model.huggingface import shape_from_config
from moesim.simulator.model.shape import ModelShape

PROOF = Path(__file__).parents[3] / "lab" / "docs" / "proof" / "model-parameters.json"
DOCUMENT: dict[str, Any] = json.loads(PROOF.read_text())
BUILT = [verdict for verdict in DOCUMENT["models"] if "total" in verdict]
NOT_BUILT = {
    verdict["name"]: verdict["not_built"] for verdict in DOCUMENT["models"] if "total" not in verdict
}
PARTS = ("embedding", "routed_experts")
"""Components whose names mean the same in every class of transformers."""


def imported(verdict: dict[str, Any]) -> ModelShape:
    return shape_from_config(json.loads(json.dumps(verdict["config"])), f"{verdict['name']}.json").shape


def hidden_layers(config: dict[str, Any], key: str) -> int:
    value: int = min(config.get(key, 0), config["num_hidden_layers"])
    return value


def explained(verdict: dict[str, Any], shape: ModelShape) -> int:
    """What moesim counts beyond transformers' class, for the families where the two differ by design."""
    config = verdict["config"]
    family = config["model_type"]
    moe = shape.moe
    if family in ("deepseek_v4", "deepseek_ref"):
        assert moe is not None  # layers routed by a table of tokens have no balance bias
        return hidden_layers(config, "num_hash_layers") * moe.experts
    if family == "gemma4" and moe is not None:  # the scale of every expert is left out
        return -shape.n_layers * moe.experts
    if family == "phimoe":  # the bias of the head is left out
        return -shape.vocab
    if family == "longcat_flash":
        assert (
            moe is not None
        )  # transformers allocates gate and up projections for experts that compute nothing
        return -shape.n_layers // 2 * moe.zero_experts * 2 * moe.expert_ffn * shape.hidden
    return 0


@pytest.mark.parametrize("verdict", BUILT, ids=lambda verdict: verdict["name"])
def test_counts_equal_those_of_transformers(verdict: dict[str, Any]) -> None:
    shape = imported(verdict)
    difference = explained(verdict, shape)
    assert parameters_total(shape) == verdict["total"] + difference
    parts = parameters_by_component(shape).as_dict()
    if verdict["config"]["model_type"] != "longcat_flash":
        assert {part: parts[part] for part in PARTS} == {
            part: verdict["parts"].get(part, 0) for part in PARTS
        }
        assert abs(difference) <= 1e-3 * verdict["total"]


def test_every_family_is_judged_or_named() -> None:
    families = {verdict["config"].get("model_type") for verdict in BUILT}
    assert len(families) >= 35
    assert DOCUMENT["transformers"] == "5.23.0"
    classes = ("XiaomiMiMo--MiMo-7B-Base", "moonshotai--Kimi-K3", "nvidia--Llama-3_3-Nemotron-Super-49B-v1",
               "inclusionAI--Ling-lite-1.5", "inclusionAI--Ling-mini-2.0")  # fmt: skip
    assert set(NOT_BUILT) == set(classes)
    assert all(reason.startswith("KeyError") for reason in NOT_BUILT.values())  # transformers has no class
    seeds = [verdict for verdict in BUILT if " seed " in verdict["name"]]
    assert len(seeds) >= 150
