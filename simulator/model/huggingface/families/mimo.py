"""MiMo-V2-Flash: windows with sinks in most layers, and values narrower than keys."""

from __future__ import annotations

from typing import Any

from moesim.simulator.model.huggingface.core import core, mtp
from moesim.simulator.model.huggingface.experts import deepseek_experts
from moesim.simulator.model.huggingface.grouped_query import windowed
from moesim.simulator.model.huggingface.layers import attention_fields, dense_first, ffn_fields
from moesim.simulator.model.huggingface.reader import Reader


def mimo_v2(r: Reader) -> dict[str, Any]:
    """MiMo-V2-Flash."""
    fields = core(r)
    layers = fields["n_layers"]
    window = r.integer("sliding_window", "sliding_window_size", meaning="attention window, tokens")
    r.seen.add("attention_chunk_size")
    bias = r.flag("attention_bias", "bias of queries, keys and values", False)
    full = _attention(r, "", bias, "add_full_attention_sink_bias")
    sliding = windowed(_attention(r, "swa_", bias, "add_swa_attention_sink_bias"), window)
    names = r.per_layer(
        "hybrid_layer_pattern", layers=layers, legal={0: "full", 1: "sliding"}, meaning="1 for a window"
    )
    moe = deepseek_experts(r, method="noaux_tc")
    width = r.integer("intermediate_size", meaning="width of the dense FFN")
    halves = dense_first(r, layers)
    kinds = {"full": full, "sliding": sliding}
    return fields | attention_fields(names, kinds) | ffn_fields(halves, moe, width) | mtp(r)


def _attention(r: Reader, prefix: str, bias: bool, sinks: str) -> dict[str, Any]:
    return {
        "kind": "gqa",
        "heads": r.integer(f"{prefix}num_attention_heads", meaning="query heads"),
        "kv_heads": r.integer(f"{prefix}num_key_value_heads", meaning="key and value heads"),
        "head_dim": r.integer(f"{prefix}head_dim", meaning="width of a query or key head"),
        "v_head_dim": r.integer(f"{prefix}v_head_dim", meaning="width of a value head"),
        "qkv_bias": bias,
        "sinks": r.flag(sinks, "one logit a head that joins every softmax"),
    }
