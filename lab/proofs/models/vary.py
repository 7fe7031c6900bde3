"""Draws other sizes of a configuration: layers, heads, widths and experts, as far as the family allows."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

LEFT_OUT = {
    "quantization_config",
    "compression_config",
    "auto_map",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "use_cache",
    "initializer_range",
    "attention_dropout",
    "hidden_dropout",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "eod_id",
    "rope_scaling",
    "rope_parameters",
    "output_router_logits",
    "router_aux_loss_coef",
    "_name_or_path",
    "id2label",
    "label2id",
    "vision_config",
    "audio_config",
    "bad_words_ids",
    "begin_suppress_tokens",
    "max_position_embeddings",
    "task_specific_params",
}
"""Keys that decide no parameter of the language model."""
LISTS = (
    "layer_types",
    "mlp_layer_types",
    "moe_layer_freq",
    "hybrid_layer_pattern",
    "attn_type_list",
    "indexer_types",
    "moe_intermediate_size",
    "moe_topk",
    "num_shared_expert",
    "layers_block_type",
)
"""Lists with one entry a layer, which are cut or repeated when the number of layers changes."""
WIDTHS = (
    "intermediate_size",
    "moe_intermediate_size",
    "intermediate_size_mlp",
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "moe_latent_size",
    "dense_intermediate_size",
    "ffn_hidden_size",
    "expert_ffn_hidden_size",
    "n_inner",
)
COUNTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")


def deciding(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration without the keys that decide no parameter."""
    kept = {
        key: value for key, value in config.items() if key not in LEFT_OUT and not key.endswith("token_id")
    }
    if isinstance(kept.get("text_config"), dict):
        kept["text_config"] = deciding(kept["text_config"])
    return kept


def variations(config: dict[str, Any], name: str, seeds: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """`seeds` configurations with other sizes, the same for the same name."""
    for seed in range(seeds):
        varied = copy.deepcopy(config)
        inner = varied.get("text_config", varied)
        vary(inner, random.Random(f"{name} {seed}"))
        yield seed, json.loads(json.dumps(varied))


def vary(config: dict[str, Any], draw: random.Random) -> None:
    """Change the sizes of one configuration in place."""
    _layers(config, draw)
    if isinstance(config.get("vocab_size"), int):
        config["vocab_size"] = 1000 + 8 * draw.randrange(1, 500)
    _hidden(config, draw)
    if "mamba_n_heads" in config:
        config["mamba_d_head"] = 32
        config["mamba_n_heads"] = config["hidden_size"] * config["mamba_expand"] // 32
    for key in WIDTHS:
        value = config.get(key)
        if isinstance(value, int):
            config[key] = 64 * draw.randrange(1, 40)
        elif isinstance(value, list) and value:
            config[key] = [64 * draw.randrange(1, 40)] * len(value)
    if "moe_topk" in config and isinstance(config.get("moe_intermediate_size"), list):
        config["intermediate_size"] = config["moe_intermediate_size"][0]  # Hunyuan's files repeat it
    for key in COUNTS:
        if isinstance(config.get(key), int):
            config[key] = draw.choice((32, 48, 64))
    config.pop("kv_channels", None)  # transformers takes the hidden size over the heads
    for key in ("linear_num_value_heads", "mamba_num_heads"):
        if isinstance(config.get(key), int):
            config[key] = config[key] * draw.choice((1, 2))
    for key in ("q_lora_rank", "kv_lora_rank"):
        if isinstance(config.get(key), int):
            config[key] = 64 * draw.randrange(1, 12)


def _layers(config: dict[str, Any], draw: random.Random) -> None:
    for key in ("num_hidden_layers", "n_layers", "n_layer", "num_layers"):
        if not isinstance(config.get(key), int):
            continue
        old, new = config[key], draw.randrange(4, 20)
        config[key] = new
        for name in LISTS:
            if isinstance(config.get(name), list):
                config[name] = (config[name] * 20)[:new]
        if isinstance(config.get("compress_ratios"), list):
            ratios = config["compress_ratios"]
            config["compress_ratios"] = [draw.choice((0, 4, 128)) for _ in range(new)] + ratios[old:]
        if isinstance(config.get("hybrid_override_pattern"), str):
            letters = sorted(set(config["hybrid_override_pattern"]))
            config["hybrid_override_pattern"] = "".join(
                [*letters, *(draw.choice(letters) for _ in range(new))][:new]
            )
        if isinstance(config.get("sparse_attention_config"), dict):
            flags = [draw.choice((0, 1)) for _ in range(new)]
            config["sparse_attention_config"]["sparse_attention_freq"] = flags
        if isinstance(config.get("linear_attn_config"), dict):
            full = sorted(draw.sample(range(1, new + 1), max(1, new // 4)))
            config["linear_attn_config"]["full_attn_layers"] = full
            config["linear_attn_config"]["kda_layers"] = [i for i in range(1, new + 1) if i not in full]
        if isinstance(config.get("moe_layer_end_index"), int):
            config["moe_layer_end_index"] = new - 1
    if isinstance(config.get("first_k_dense_replace"), int) and not (
        {"moe_layer_freq", "mlp_layer_types", "share_expert_dim"} & config.keys()
    ):
        config["first_k_dense_replace"] = draw.randrange(0, 4)


def _hidden(config: dict[str, Any], draw: random.Random) -> None:
    """Heads, then a hidden size that they divide."""
    heads_key = next((key for key in ("num_attention_heads", "n_heads", "n_head") if key in config), None)
    if heads_key is None:
        return
    kv_heads = config.get("num_key_value_heads", config[heads_key])
    multiple = draw.choice((1, 2, 3))
    if kv_heads == config[heads_key]:
        config[heads_key] = 8 * multiple
        if "num_key_value_heads" in config:
            config["num_key_value_heads"] = config[heads_key]
    elif kv_heads != 1:
        groups = draw.choice((2, 4))
        config["num_key_value_heads"], config[heads_key] = groups, groups * 4 * multiple
        for key, value in (
            ("swa_num_attention_heads", config[heads_key]),
            ("swa_num_key_value_heads", 2 * groups),
        ):
            if key in config:
                config[key] = value
        if "num_global_key_value_heads" in config:
            config["num_global_key_value_heads"] = groups
    for key in ("hidden_size", "d_model", "n_embd"):
        if key in config:
            config[key] = config[heads_key] * 32 * draw.choice((1, 2, 3))
