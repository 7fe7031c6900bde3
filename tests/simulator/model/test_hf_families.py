"""What the published files of each family become: kinds of layers, totals and what is left out."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from moesim.simulator.model.block import DENSE, ROUTED
from moesim.simulator.model.catalogue import load_model
from moesim.simulator.model.counts import parameters_mtp, parameters_total
from moesim.simulator.model.huggingface import ImportedModel, shape_from_config, to_yaml
from moesim.simulator.model.huggingface.importer import tower_parameters
from moesim.simulator.model.huggingface.reader import attention_fields, ffn_fields, shortest_pattern

PROOF = Path(__file__).parents[3] / "lab" / "docs" / "proof" / "model-parameters.json"
VERDICTS = {v["name"]: v for v in json.loads(PROOF.read_text())["models"] if "config" in v}
FILES = [name for name in VERDICTS if " seed " not in name]


def imported(name: str, **changes: Any) -> ImportedModel:
    return shape_from_config(json.loads(json.dumps(VERDICTS[name]["config"])) | changes, f"{name}.json")


PATTERNS: dict[str, tuple[tuple[str, ...] | None, tuple[str, ...] | None]] = {
    "openai--gpt-oss-20b": (("sliding", "full"), None),
    "Qwen--Qwen3-Next-80B-A3B-Instruct": (("linear*3", "full"), None),
    "Qwen--Qwen3.5-35B-A3B": (("linear*3", "full"), None),
    "google--gemma-4-26B-A4B": (("sliding*5", "full"), None),
    "meta-llama--Llama-4-Maverick-17B-128E-Instruct": (("chunked*3", "full"), (DENSE, ROUTED)),
    "meta-llama--Llama-4-Scout-17B-16E-Instruct": (("chunked*3", "full"), None),
    "MiniMaxAI--MiniMax-M1-80k": (("lightning*7", "full"), None),
    "MiniMaxAI--MiniMax-M3": (("full*3", "sparse*57"), None),
    "ai21labs--AI21-Jamba-1.5-Mini": (("mamba*4", "attention", "mamba*3"), (DENSE, ROUTED)),
    "meituan-longcat--LongCat-Flash-Chat": (None, (ROUTED, DENSE)),
    "stepfun-ai--Step-3.7-Flash": (
        ("full", "sliding*3", *("full", "sliding*3") * 10, "full"),
        None,
    ),
    "inclusionAI--Ling-3.0-Flash": (("kda*5", "mla"), None),
    "zai-org--GLM-5": (None, None),
    "google--gemma-2-2b": (("sliding", "full"), None),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_layers_are_written_as_the_shortest_pattern(name: str) -> None:
    shape = imported(name).shape
    assert (shape.attention_layers, shape.ffn_layers) == PATTERNS[name]
    attentions = shape.attentions.root if shape.attentions else {None: shape.attention}
    kinds = {name: attention.kind for name, attention in attentions.items() if attention}
    assert set(kinds.values()) <= {
        "gqa", "sliding", "chunked", "gated_delta", "lightning", "block_sparse", "mamba", "kda", "mla", "dsa",
    }  # fmt: skip


def test_a_nemotron_hybrid_has_one_half_a_layer() -> None:
    shape = imported("nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16").shape
    assert Counter(shape.layer_kinds) == {"none/mamba": 23, "none/attention": 6, "moe/none": 23}
    ultra = imported("nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16").shape
    assert ultra.moe is not None and ultra.moe.latent == 2048 and not ultra.moe.expert_gated
    assert (ultra.mtp_layers, ultra.mtp_layer) == (1, "moe/attention") and parameters_mtp(ultra) > 0


def test_deepseek_v4_has_three_kinds_of_attention_and_four_streams() -> None:
    shape = imported("deepseek-ai--DeepSeek-V4-Flash").shape
    kinds = Counter(kind.partition("/")[2] for kind in shape.layer_kinds)
    assert kinds == {"window": 2, "csa": 21, "hca": 20}
    assert shape.residual_streams == 4 and shape.mtp_layer == "moe/window"
    pro = imported("sgl-project--DeepSeek-V4-Pro-FP8").shape  # its model_type is deepseek_ref
    assert pro.source.reference.endswith("(deepseek_v4)")
    assert any("MTP module's window attention" in note for note in pro.not_modelled)


def test_glm_5_2_shares_indexers() -> None:
    shape = imported("zai-org--GLM-5.2").shape
    assert Counter(kind.partition("/")[2] for kind in shape.layer_kinds) == {"full": 21, "shared": 57}


PUBLISHED = {
    # no class in transformers; totals of the model cards, in billions
    "inclusionAI--Ling-lite-1.5": 16.8, "inclusionAI--Ling-mini-2.0": 16.26, "XiaomiMiMo--MiMo-7B-Base": 7.83,
}  # fmt: skip
BAILING = {
    # config.json of inclusionAI/Ling-lite-1.5, then what Ling-mini-2.0's has beside it or instead
    "architectures": ["BailingMoeForCausalLM"], "model_type": "bailing_moe", "first_k_dense_replace": 0,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 1408, "moe_intermediate_size": 1408,
    "num_experts": 64, "num_shared_experts": 2, "num_attention_heads": 16, "num_experts_per_tok": 6,
    "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "use_bias": False, "use_qkv_bias": False, "vocab_size": 126464, "norm_head": False,
}  # fmt: skip
LING_MINI = BAILING | {
    "architectures": ["BailingMoeV2ForCausalLM"], "num_hidden_layers": 20, "intermediate_size": 5120,
    "first_k_dense_replace": 1, "moe_intermediate_size": 512, "moe_shared_expert_intermediate_size": 512,
    "num_shared_experts": 1, "num_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
    "score_function": "sigmoid", "moe_router_enable_expert_bias": True, "head_dim": 128, "use_qk_norm": True,
    "vocab_size": 157184,
}  # fmt: skip
MIMO = {
    "architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_hidden_layers": 36, "hidden_size": 4096,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 11008,
    "vocab_size": 151680, "hidden_act": "silu", "attention_bias": True, "use_sliding_window": False,
    "num_nextn_predict_layers": 1, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "config"), [*zip(PUBLISHED, (BAILING, LING_MINI, MIMO), strict=True)], ids=list(PUBLISHED)
)
def test_families_without_a_class_have_their_published_totals(name: str, config: dict[str, Any]) -> None:
    shape = shape_from_config(dict(config), f"{name}.json").shape
    total = parameters_total(shape) + parameters_mtp(shape)
    assert total / 1e9 == pytest.approx(PUBLISHED[name], rel=0.005)


GEMMA_3_4B = {
    # config.json of google/gemma-3-4b-it, which leaves heads and vocabulary out
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
}  # fmt: skip
DEEPSEEK_MOE_16B = {
    # config.json of deepseek-ai/deepseek-moe-16b-base
    "architectures": ["DeepseekForCausalLM"], "model_type": "deepseek", "attention_bias": False,
    "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10944,
    "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 28, "num_key_value_heads": 16,
    "scoring_func": "softmax", "tie_word_embeddings": False, "vocab_size": 102400,
}  # fmt: skip
STEP_3_5 = {
    # the keys of stepfun-ai/Step-3.5-Flash, whose windowed layers have more heads than the others
    "architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5", "hidden_size": 4096, "head_dim": 128,
    "intermediate_size": 11264, "num_attention_heads": 64, "num_attention_groups": 8, "num_hidden_layers": 45,
    "moe_num_experts": 288, "moe_top_k": 8, "moe_intermediate_size": 1280, "share_expert_dim": 1280,
    "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 12, "sliding_window": 512,
    "attention_other_setting": {
        "attention_type": "sliding_attention", "num_attention_heads": 96, "num_attention_groups": 8,
        "head_dim": 128,
    },
    "moe_layers_enum": ",".join(map(str, range(3, 45))), "num_nextn_predict_layers": 3,
    "use_moe_router_bias": True, "use_head_wise_attn_gate": True, "vocab_size": 128896,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "billions"),
    [(GEMMA_3_4B, 3.88), (DEEPSEEK_MOE_16B, 16.4), (STEP_3_5, 196.9)],
    ids=["gemma-3-4b", "deepseek-moe-16b", "step-3.5"],
)
def test_files_with_keys_of_their_own(config: dict[str, Any], billions: float) -> None:
    shape = shape_from_config(json.loads(json.dumps(config)), "config.json").shape
    assert parameters_total(shape) / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize("name", FILES)
def test_every_imported_model_survives_its_file(name: str, tmp_path: Path) -> None:
    shape = imported(name).shape
    path = tmp_path / "model.yaml"
    path.write_text(to_yaml(shape))
    assert load_model(path) == shape


@pytest.mark.parametrize("name", FILES)
def test_every_key_is_understood_or_ignored(name: str) -> None:
    config = VERDICTS[name]["config"]
    model = imported(name)
    said = {u.key for u in model.understood} | set(model.ignored)
    prefix = "text_config." if "text_config" in config else ""
    keys = {f"{prefix}{key}" for key in config.get("text_config", config)}
    inside = {key.rpartition(".")[0] for key in said}  # of a nested mapping its keys are named
    assert keys <= said | inside
    assert not {u.key for u in model.understood} & set(model.ignored)


def test_llama_nemotron_layers_differ_in_size() -> None:
    block = {
        "attention": {"n_heads_in_group": 8, "no_op": False},
        "ffn": {"ffn_mult": 2.625, "no_op": False},
    }
    hollow = {
        "attention": {"n_heads_in_group": None, "no_op": True},
        "ffn": {"ffn_mult": 1.3125, "no_op": False},
    }
    config = {
        "model_type": "nemotron-nas", "architectures": ["DeciLMForCausalLM"], "hidden_act": "silu",
        "hidden_size": 8192, "num_attention_heads": 64, "num_hidden_layers": 4, "vocab_size": 128256,
        "tie_word_embeddings": False, "block_configs": [block, hollow, hollow, block],
    }  # fmt: skip
    shape = shape_from_config(dict(config), "config.json").shape
    assert shape.ffn_layers == ("ffn14336", "ffn7168*2", "ffn14336")
    assert shape.attention_layers == ("kv8", "none*2", "kv8")
    attention = 2 * 8192 * 8192 + 2 * 8192 * 1024
    ffn = 3 * 8192 * (2 * 14336 + 2 * 7168)
    assert parameters_total(shape) == 2 * attention + ffn + 2 * 128256 * 8192 + 7 * 8192


def test_the_shortest_pattern() -> None:
    assert shortest_pattern(["a"] * 4) == ["a"]
    assert shortest_pattern(["a", "a", "b"] * 5) == ["a*2", "b"]
    assert shortest_pattern(["a", "b", "b", "a", "b"]) == ["a", "b*2", "a", "b"]
    assert attention_fields(["x", "x"], {"x": {"kind": "gqa"}}) == {"attention": {"kind": "gqa"}}
    assert ffn_fields([DENSE, ROUTED, ROUTED], {"experts": 2}, 8) == {
        "moe": {"experts": 2, "dense_layers": [0]}, "dense_ffn": 8,
    }  # fmt: skip


def test_towers_are_counted_by_a_plain_formula() -> None:
    kimi = {
        "vt_hidden_size": 1152,
        "vt_intermediate_size": 4304,
        "vt_num_hidden_layers": 27,
        "patch_size": 14,
    }
    built = VERDICTS["moonshotai--Kimi-K2.5"]["tower"]  # with projector and positions, by transformers
    assert tower_parameters(kimi) == pytest.approx(built, rel=0.15)
    assert tower_parameters({"hidden_size": "wide", "depth": 3}) == 0
    model = imported("moonshotai--Kimi-K2.5", vision_config=kimi)
    assert any("vision_config (about 0.41 billion" in note for note in model.shape.not_modelled)
