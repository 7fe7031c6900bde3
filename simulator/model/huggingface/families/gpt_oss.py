"""gpt-oss: alternating windows, attention sinks, and biases everywhere."""

from __future__ import annotations

from typing import Any

from moesim.simulator.model.huggingface.core import core
from moesim.simulator.model.huggingface.experts import routed
from moesim.simulator.model.huggingface.grouped_query import gqa, windowed
from moesim.simulator.model.huggingface.layers import attention_fields
from moesim.simulator.model.huggingface.reader import Reader


def gpt_oss(r: Reader) -> dict[str, Any]:
    """gpt-oss 20B and 120B; sinks, router bias and expert biases are fixed in the modelling code (GptOss)."""
    fields = core(r)
    attention = gqa(r, own_head_dim=True, bias_key="attention_bias", sinks=True)
    window = r.integer("sliding_window", meaning="attention window, tokens")
    legal = {"sliding_attention": "sliding", "full_attention": "full"}
    names = r.per_layer("layer_types", layers=fields["n_layers"], legal=legal, meaning="attention of a layer")
    kinds = {"sliding": windowed(attention, window), "full": attention}
    moe = routed(r, "softmax", width=("intermediate_size",), router_bias=True, expert_bias=True)
    if "numerics" in fields and r.has("swiglu_limit"):
        r.take(("swiglu_limit",), "clamp of the experts' activation; for trainers only")
    return fields | attention_fields(names, kinds) | {"moe": moe}
