"""Memory of a deployment: weights by format against published checkpoints, what a share of memory counts."""

from typing import Any

import pytest
from msgspec.structs import replace

from moesim.hwmodels.calibration import load_profile
from moesim.hwmodels.cluster import load_cluster
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.provenance import SourcedWatts
from moesim.simulator.model.catalogue import load_model
from moesim.simulator.model.huggingface import shape_from_config
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario.serving import Serving, ServingPool
from moesim.simulator.serving.deployment import (
    Deployment,
    engine,
    engines,
    notes_of,
    published_formats,
    weight_bytes,
)


def _deployment(**keys: object) -> Deployment:
    serving = Serving.model_validate({"tp": 8, **keys})
    cluster = load_cluster("h200-1024")
    return Deployment(load_model("deepseek-v3"), cluster, load_profile("h200-measured"), serving, serving)


@pytest.mark.parametrize(
    ("model", "checkpoint"),
    [
        (
            "deepseek-v3",
            688.6e9,
        ),  # model.safetensors.index.json on Hugging Face, with 11.6e9 bytes of MTP layer
        ("gpt-oss-120b", 65.3e9),  # 60.8 GiB, openai/gpt-oss README
    ],
)
def test_weights_in_published_formats_are_as_large_as_the_checkpoint(model: str, checkpoint: float) -> None:
    pool, published = ServingPool(draft_tokens=model == "deepseek-v3"), published_formats(load_model(model))
    assert published.linear is not None and published.experts is not None
    assert weight_bytes(load_model(model), pool, published.linear, published.experts) == pytest.approx(
        checkpoint, rel=0.02
    )


def test_a_draft_model_takes_memory_and_keeps_keys_and_values() -> None:
    """One more layer of 48, and a projection of 2 x 2,048 x 2,048 in BF16."""
    shape, cluster = load_model("qwen3-30b-a3b"), load_cluster("h200-1024")
    plain, drafting = (
        Deployment(shape, cluster, load_profile("h200-measured"), one, one)
        for one in (Serving(draft_tokens=n) for n in (0, 3))
    )
    tables = 2 * shape.vocab * shape.hidden * 2
    layer = (plain.weight_bytes - tables) / 48
    assert drafting.weight_bytes - plain.weight_bytes == pytest.approx(layer + 4 * shape.hidden**2, rel=0.01)
    room = drafting.cache_room_bytes / plain.cache_room_bytes
    assert drafting.cache_tokens / plain.cache_tokens == pytest.approx(room * 48 / 49, rel=1e-3)


def test_kernels_of_mxfp4_follow_card_and_engine() -> None:
    shape, profile = load_model("gpt-oss-120b"), load_profile("h200-measured")
    found = {}
    for card, name in (("h100", "vllm-0.19"), ("h200", "trtllm-1.2"), ("b200", "vllm-0.19")):
        serving = Serving.model_validate({"tp": 8, "engine": name})
        cluster = load_cluster(f"{card}-1024")
        found[card] = Deployment(shape, cluster, profile, serving, serving).split
    assert {card: split.kernels for card, split in found.items()} == {
        "h100": "marlin", "h200": "triton", "b200": "fused",
    }  # fmt: skip
    assert [split.attention for split in found.values()] == ["fa3", "", ""]


MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
    "vocab_size": 32000, "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "max_position_embeddings": 32768, "rope_theta": 1e6, "sliding_window": None,
}  # fmt: skip
FP8 = {"quant_method": "fp8"}
GROUP = {"weights": {"num_bits": 4, "type": "int"}}
INT4 = {"quant_method": "compressed-tensors", "config_groups": {"g": GROUP}, "ignore": ["re:.*self_attn.*"]}


@pytest.mark.parametrize(
    ("stated", "formats"),
    [
        ({}, ("bf16", "bf16")),
        ({"quantization_config": FP8}, ("fp8", "fp8")),
        ({"quantization_config": FP8, "expert_dtype": "fp4"}, ("fp8", "mxfp4")),
        ({"quantization_config": {"quant_method": "mxfp4"}}, ("bf16", "mxfp4")),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, ("nvfp4", "nvfp4")),
        ({"quantization_config": INT4}, ("bf16", "mxfp4")),
    ],
)
def test_an_own_file_is_served_in_the_formats_that_it_states(
    stated: dict[str, Any], formats: tuple[str, str]
) -> None:
    shape = shape_from_config({**MIXTRAL, **stated}, "own/config.json").shape
    own = replace(_deployment(), shape=shape)
    assert own.formats == formats
    assert any("INT4" in note for note in notes_of(own)) == (stated.get("quantization_config") is INT4)
    assert any("taken as BF16" in note for note in notes_of(own)) == (not stated)
    again = ModelShape.model_validate(shape.model_dump(mode="json", exclude_none=True))
    assert again.published == shape.published  # a model file keeps them


def test_a_format_that_nothing_prices_is_refused_until_one_is_stated() -> None:
    awq = {"quantization_config": {"quant_method": "awq"}}
    shape = shape_from_config({**MIXTRAL, **awq}, "config.json").shape
    with pytest.raises(InputError, match=r"'awq'.*state serving.weights"):
        _ = replace(_deployment(), shape=shape).formats
    assert replace(_deployment(weights="fp8"), shape=shape).formats == ("fp8", "fp8")


def test_experts_are_shared_out_and_attention_is_copied_over_dp() -> None:
    shape, formats = load_model("deepseek-v3"), ("fp8", "fp8")
    split, copied = (
        weight_bytes(shape, ServingPool(tp=tp, dp=dp, ep=8), *formats)  # type: ignore[arg-type]
        for tp, dp in ((8, 1), (1, 8))
    )
    attention = 61 * 187.1e6
    assert copied - split > 0.7 * attention
    assert copied < weight_bytes(shape, ServingPool(), *formats) / 4  # type: ignore[arg-type]


def test_engines_count_memory_in_their_own_way() -> None:
    room = {
        name: _deployment(engine=name).cache_room_bytes for name in ("vllm-0.19", "sglang-0.5", "trtllm-1.2")
    }
    one = _deployment()
    total = one.cluster.accelerator.hbm_bytes
    assert room["vllm-0.19"] == pytest.approx(0.9 * total - one.weight_bytes - one.buffer_bytes)
    assert room["sglang-0.5"] == pytest.approx(0.9 * total - one.weight_bytes)
    assert room["trtllm-1.2"] == pytest.approx(0.9 * (total - one.weight_bytes - one.buffer_bytes))


def test_engines_have_sorted_buckets_and_figures_inside_their_ranges() -> None:
    for found in engines().values():
        assert list(found.graph_buckets) == sorted(set(found.graph_buckets))
        for figure in (found.host_s, found.exposed_host_s, found.launch_s):
            assert figure.low <= figure.value <= figure.high
    assert engine("vllm-0.19").graph_buckets[-1] == 512
    with pytest.raises(InputError, match=r"vllm-0\.19"):
        engine("vllm-0.91")


def test_acceptance_of_users_needs_a_chance_a_draft() -> None:
    assert _deployment(draft_tokens=2, acceptance=(0.8, 0.5)).tokens_per_step == pytest.approx(2.2)
    with pytest.raises(InputError, match="give one each"):
        _ = _deployment(draft_tokens=2, acceptance=(0.8,)).tokens_per_step


def test_a_power_limit_is_named_as_not_used() -> None:
    one = _deployment()
    assert not any("power_limit" in note for note in notes_of(one))
    limit = SourcedWatts(value=500.0, kind="assumed", source="stated", date="2026-11-26")
    card = one.cluster.accelerator.model_copy(update={"power_limit": limit})
    node = one.cluster.node.model_copy(update={"accelerator": card})
    capped = replace(one, cluster=one.cluster.model_copy(update={"node": node}))
    assert any("power_limit of" in note and "not used" in note for note in notes_of(capped))
