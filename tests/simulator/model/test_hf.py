from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moesim.hwmodels.errors import InputError
from moesim.simulator.model.attention import GQA, SlidingAttention
from moesim.simulator.model.catalogue import load_model
from moesim.simulator.model.counts import parameters_total
from moesim.simulator.model.huggingface import FAMILIES, import_hf

GOLDEN = Path(__file__).parents[2] / "golden" / "models"
FILES = sorted(GOLDEN.glob("*.json"))


def config(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text())
    return data


def written(tmp_path: Path, data: dict[str, Any]) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("file", "shipped"),
    [
        ("deepseek-v3", "deepseek-v3"),
        ("mixtral-8x22b-v0.1", "mixtral-8x22b"),
        ("mixtral-8x7b-v0.1", "mixtral-8x7b"),
        ("qwen3-30b-a3b", "qwen3-30b-a3b"),
        ("meta-llama-3.1-8b", "llama-3-8b"),
        ("meta-llama-3.1-70b", "llama-3-70b"),
    ],
)
def test_shipped_models_equal_their_configs(file: str, shipped: str) -> None:
    imported = load_model(GOLDEN / f"{file}.json")
    known = load_model(shipped)
    assert imported.model_copy(update={"name": known.name, "source": known.source}) == known


REQUIRED = [
    *(("deepseek-v3", key) for key in ("n_routed_experts", "kv_lora_rank", "topk_method", "vocab_size",
                                       "tie_word_embeddings", "scoring_func", "n_group")),
    ("mixtral-8x7b-v0.1", "num_key_value_heads"),
    ("qwen3-30b-a3b", "mlp_only_layers"),
    ("qwen3-8b", "head_dim"),
    ("deepseek-v3.2", "index_n_heads"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "key"), REQUIRED)
def test_missing_key_is_named(name: str, key: str, tmp_path: Path) -> None:
    data = config(name)
    del data[key]
    with pytest.raises(InputError, match=key) as caught:
        load_model(written(tmp_path, data))
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("deepseek-v3", "model_type", None),
        ("deepseek-v3", "topk_method", "magic"),
        ("deepseek-v3", "num_hidden_layers", 10**12),
        ("deepseek-v3", "n_routed_experts", "256"),
        ("deepseek-v3", "hidden_size", 7168.5),
        ("deepseek-v3", "vocab_size", -1),
        ("deepseek-v3", "num_experts_per_tok", 500),
        ("deepseek-v3", "tie_word_embeddings", "false"),
        ("meta-llama-3.1-8b", "mlp_bias", True),
        ("meta-llama-3.1-8b", "num_attention_heads", 33),
        ("qwen3-30b-a3b", "mlp_only_layers", 3),
    ],
)
def test_bad_value_is_one_paragraph(name: str, key: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        load_model(written(tmp_path, config(name) | {key: value}))
    assert "\n" not in str(caught.value)
    assert "config.json" in str(caught.value)


def test_unknown_family_lists_the_known(tmp_path: Path) -> None:
    path = written(tmp_path, config("deepseek-v3") | {"model_type": "deepseek_v33", "architectures": ["New"]})
    with pytest.raises(InputError, match="deepseek_v33") as caught:
        import_hf(path)
    assert all(family in str(caught.value) for family in FAMILIES)
    assert "--as deepseek_v3" in str(caught.value) and "kv_lora_rank" in str(caught.value)
    renamed = import_hf(path, as_family="deepseek_v3").shape
    assert renamed.model_dump(exclude={"name", "source"}) == import_hf(
        GOLDEN / "deepseek-v3.json"
    ).shape.model_dump(exclude={"name", "source"})


def test_aliases_and_their_conflict(tmp_path: Path) -> None:
    data = config("qwen3-30b-a3b")
    data["num_local_experts"] = data.pop("num_experts")
    assert import_hf(written(tmp_path, data)).shape.moe == load_model("qwen3-30b-a3b").moe
    with pytest.raises(InputError, match=r"num_experts=64.*num_local_experts=128"):
        import_hf(written(tmp_path, data | {"num_experts": 64}))
    v3 = config("deepseek-v3")
    v3["num_mtp_layers"] = v3.pop("num_nextn_predict_layers")
    assert import_hf(written(tmp_path, v3)).shape.mtp_layers == 1


def test_text_config_is_read_and_the_rest_is_left_out(tmp_path: Path) -> None:
    data = {"model_type": "some_vl", "text_config": config("qwen3-8b"), "vision_config": {"depth": 3}}
    imported = import_hf(written(tmp_path, data))
    assert imported.shape.hidden == 4096
    assert "vision_config" in imported.ignored
    assert any("text_config" in note for note in imported.shape.not_modelled)
    del data["text_config"]["vocab_size"]  # type: ignore[attr-defined]
    with pytest.raises(InputError, match=r"text_config\.vocab_size"):
        import_hf(written(tmp_path, data))


def test_head_dim_absent_or_null_means_hidden_over_heads(tmp_path: Path) -> None:
    for extra in ({}, {"head_dim": None}, {"head_dim": 64}):
        attention = import_hf(written(tmp_path, config("meta-llama-3.1-8b") | extra)).shape.attention
        assert isinstance(attention, GQA)
        assert attention.head_dim == (extra.get("head_dim") or 128)


def test_llama_without_kv_heads_is_multi_head(tmp_path: Path) -> None:
    data = config("meta-llama-3.1-8b")
    del data["num_key_value_heads"]
    attention = import_hf(written(tmp_path, data)).shape.attention
    assert isinstance(attention, GQA) and attention.kv_heads == 32


def test_attention_bias_counts(tmp_path: Path) -> None:
    plain = load_model("llama-3-8b")
    biased = import_hf(written(tmp_path, config("meta-llama-3.1-8b") | {"attention_bias": True})).shape
    assert parameters_total(biased) - parameters_total(plain) == 32 * (4096 + 2 * 1024 + 4096)


def test_a_window_below_the_longest_position_is_an_attention_kind(tmp_path: Path) -> None:
    data = config("mixtral-8x7b-v0.1")
    window = load_model(written(tmp_path, data | {"sliding_window": 4096})).attention
    assert isinstance(window, SlidingAttention) and window.window == 4096
    assert load_model(written(tmp_path, data | {"sliding_window": 32768})).attention == GQA(
        heads=32, kv_heads=8, head_dim=128
    )  # all positions are inside the window


def test_qwen_dense_layers_follow_step_and_list(tmp_path: Path) -> None:
    data = config("qwen3-30b-a3b") | {
        "num_hidden_layers": 6,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    }
    shape = import_hf(written(tmp_path, data)).shape
    assert shape.moe is not None
    assert shape.moe.dense_layers == (0, 2, 3, 4)
    assert shape.dense_ffn == 6144
