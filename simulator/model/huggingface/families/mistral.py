"""Mistral, Ministral and Mixtral."""

from __future__ import annotations

from typing import Any

from moesim.simulator.model.huggingface.core import core
from moesim.simulator.model.huggingface.experts import routed
from moesim.simulator.model.huggingface.families.llama import dense_ffn
from moesim.simulator.model.huggingface.grouped_query import everywhere, gqa, windowed
from moesim.simulator.model.huggingface.layers import attention_fields
from moesim.simulator.model.huggingface.reader import Reader


def mistral(r: Reader) -> dict[str, Any]:
    """Mistral 7B to Large 2, Ministral and Devstral: no biases; some layers may have a window."""
    fields = core(r)
    attention = gqa(r)
    if not r.has("layer_types"):
        return fields | {"attention": everywhere(r, attention), "dense_ffn": dense_ffn(r)}
    window = r.integer("sliding_window", meaning="attention window, tokens", null=None, absent=None)
    legal = {"full_attention": "full"} | ({"sliding_attention": "sliding"} if window else {})
    names = r.per_layer("layer_types", layers=fields["n_layers"], legal=legal, meaning="attention of a layer")
    kinds = {"full": attention, "sliding": windowed(attention, window or 1)}
    return fields | attention_fields(names, kinds) | {"dense_ffn": dense_ffn(r)}


def mixtral(r: Reader) -> dict[str, Any]:
    """Mixtral 8x7B and 8x22B."""
    fields = core(r)
    moe = routed(r, "softmax", width=("intermediate_size",))
    return fields | {"attention": everywhere(r, gqa(r)), "moe": moe}
