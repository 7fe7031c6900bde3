"""Whole steps and a plan search of hybrid models with recurrent mixers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import moesim
from moesim.hwmodels.yaml_io import dump_mapping
from moesim.simulator.cost.layer_collectives import LayerCollectives
from moesim.simulator.model.attention import GatedDelta
from moesim.simulator.model.catalogue import load_model
from moesim.simulator.model.counts import parameters_total
from moesim.simulator.predict.step import prepare
from moesim.simulator.scenario import Scenario, load_scenario

SOURCE = {"kind": "published", "reference": "config.json on Hugging Face, fewer layers", "date": "2026-11-22"}
QWEN: dict[str, Any] = {
    # Qwen3.5-35B-A3B with 16 of its 40 layers
    "name": "hybrid-delta", "source": SOURCE, "n_layers": 16, "hidden": 2048, "vocab": 248320,
    "attentions": {
        "linear": {"kind": "gated_delta", "key_heads": 16, "value_heads": 32, "key_dim": 128,
                   "value_dim": 128},
        "full": {"kind": "gqa", "heads": 16, "kv_heads": 2, "head_dim": 256, "qk_norm": True,
                 "output_gate": "element"},
    },
    "attention_layers": ["linear*3", "full"],
    "moe": {"experts": 256, "top_k": 8, "expert_ffn": 512, "scoring": "softmax", "shared_experts": 1,
            "shared_ffn": 512, "shared_gate": True},
    "tied_embeddings": False,
}  # fmt: skip
NEMOTRON: dict[str, Any] = {
    # Nemotron 3 Nano: mixer, experts and attention are layers of their own; 26 of its 52 layers
    "name": "hybrid-mamba", "source": SOURCE, "n_layers": 26, "hidden": 2688, "vocab": 131072,
    "attentions": {
        "mamba": {"kind": "mamba2", "heads": 64, "head_dim": 64, "groups": 8, "state": 128},
        "full": {"kind": "gqa", "heads": 32, "kv_heads": 2, "head_dim": 128, "rotary": False},
    },
    "attention_layers": [*["mamba", "none"] * 5, "full", "none", "mamba", "none", *["mamba", "none"] * 6],
    "ffn_layers": [*["none", "moe"] * 13],
    "moe": {"experts": 128, "top_k": 6, "expert_ffn": 1856, "scoring": "sigmoid", "score_bias": True,
            "expert_gated": False, "shared_experts": 1, "shared_ffn": 3712},
    "tied_embeddings": False,
}  # fmt: skip

QWEN_DELTA = GatedDelta(key_heads=16, value_heads=32, key_dim=128, value_dim=128)


@pytest.fixture(params=[QWEN, NEMOTRON], ids=["delta", "mamba"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    file = tmp_path / "hybrid.yaml"
    file.write_text(dump_mapping(request.param))
    return str(file)


def scenario(model: str, *more: str) -> Scenario:
    return load_scenario(
        "deepseek-v3-2048xh800",
        [
            f"model={model}",
            "cluster={node: hgx-h200, nodes: 2, network: mrft-ib-400g, price_per_gpu_hour: $2.5/h}",
            "profile=h200-measured",
            "precision=bf16",
            "parallel={pp: 2, ep: 8, zero_stage: 1}",
            "schedule=1f1b",
            "batch.sequences=128",
            "run.tokens=1e11",
            *more,
        ],
    )


def test_recompute_takes_time_and_frees_memory(path: str) -> None:
    kept, full = (moesim.simulate(scenario(path, f"recompute={policy}")) for policy in ("none", "full"))
    assert full.step.time_s > kept.step.time_s
    assert full.memory.total_bytes < kept.memory.total_bytes


def test_layers_of_one_half_are_blocks_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "mamba.yaml"
    file.write_text(dump_mapping(NEMOTRON))
    shape = load_model(file)
    assert shape.layer_counts == {"none/mamba": 12, "none/full": 1, "moe/none": 13}
    computed = prepare(scenario(str(file))).program.costs.compute
    assert {kind for kind, _, _ in computed} >= {"none/mamba", "none/full", "moe/none"}
    assert parameters_total(shape) > 13 * 128 * 2 * 1856 * 2688


def test_context_parallel_mixers_exchange_their_states_only(tmp_path: Path) -> None:
    """The exchange of a mixer is one state a sequence and rank, however long the sequence is (eq. X21)."""
    file = tmp_path / "delta.yaml"
    file.write_text(dump_mapping(QWEN))
    exchange: dict[tuple[str, int], float] = {}
    for length in (4096, 16384):
        plan = "parallel={pp: 2, ep: 4, cp: 2, zero_stage: 1}"
        pricer = prepare(scenario(str(file), plan, f"batch.sequence_length={length}")).pricer
        for kind in ("moe/linear", "moe/full"):
            exposed = LayerCollectives(pricer, kind).inside({}).exposed
            exchange[kind, length] = exposed["attn F"]
            assert exposed["attn I"] == exposed["attn F"]
    assert exchange["moe/linear", 4096] == exchange["moe/linear", 16384] > 0.0
    assert exchange["moe/full", 16384] > 1.5 * exchange["moe/full", 4096]
    delta = QWEN_DELTA.context_state_bytes
    assert delta == 32 * 128 * (128 + 128) * 4 + 8192 * 3 * 2, "states, transitions, three tokens of inputs"
