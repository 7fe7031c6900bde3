"""Granite 3 (dense and with experts) and Granite 4, a hybrid of Mamba-2 and attention."""

from __future__ import annotations

from typing import Any

from moesim.simulator.model.huggingface.core import core
from moesim.simulator.model.huggingface.experts import routed
from moesim.simulator.model.huggingface.families.llama import dense_ffn
from moesim.simulator.model.huggingface.grouped_query import gqa
from moesim.simulator.model.huggingface.layers import attention_fields
from moesim.simulator.model.huggingface.reader import Reader


def granite(r: Reader) -> dict[str, Any]:
    """Granite 3, dense: Llama's layers with factors that change no size."""
    fields = core(r)
    attention = gqa(r, kv_default=True, bias_key="attention_bias")
    return fields | {"attention": attention, "dense_ffn": dense_ffn(r)}


def granite_moe(r: Reader) -> dict[str, Any]:
    """Granite 3 with experts; `shared_intermediate_size` adds a shared expert (GraniteMoeShared)."""
    fields = core(r)
    moe = routed(r, "softmax", width=("intermediate_size",))
    width = r.integer("shared_intermediate_size", meaning="width of the shared expert", least=0, absent=0)
    moe |= {"shared_experts": 1, "shared_ffn": width} if width else {}
    return fields | {"attention": gqa(r, kv_default=True, bias_key="attention_bias"), "moe": moe}


def granite_hybrid(r: Reader) -> dict[str, Any]:
    """Granite 4 H: Mamba-2 in most layers, and a feed-forward half in every layer.

    The shared FFN stands alone where there are no experts (GraniteMoeHybridDecoderLayer).
    """
    fields = core(r)
    layers, hidden = fields["n_layers"], fields["hidden"]
    r.refuse_unless("mamba_proj_bias", False, "bias of the mixer's projections")
    heads = r.integer("mamba_n_heads", meaning="heads of the mixer")
    inner = hidden * r.integer("mamba_expand", meaning="inner width over the hidden size")
    stated = r.take(("mamba_d_head",), "width of a mixer's head")
    if stated not in ("auto", inner // heads) or inner % heads:
        raise r.error(
            f"{r.prefix}mamba_d_head={stated!r} and mamba_n_heads={heads} must multiply to mamba_expand "
            f"times hidden_size, {inner}"
        )
    mixer = {
        "kind": "mamba2",
        "heads": heads,
        "head_dim": inner // heads,
        "groups": r.integer("mamba_n_groups", meaning="groups of the mixer's heads"),
        "state": r.integer("mamba_d_state", meaning="state of a mixer's head"),
        "conv": r.integer("mamba_d_conv", meaning="tokens of the convolution"),
        "conv_bias": r.flag("mamba_conv_bias", "bias of the convolution"),
        "chunk": r.integer("mamba_chunk_size", meaning="tokens of one chunk"),
    }
    rotary = r.take(("position_embedding_type",), "rope for a rotary embedding", None) == "rope"
    attention = gqa(r, kv_default=True, bias_key="attention_bias") | ({} if rotary else {"rotary": False})
    legal = {"mamba": "mamba", "linear_attention": "mamba", "attention": "full", "full_attention": "full"}
    names = r.per_layer(
        "layer_types", "layers_block_type", layers=layers, legal=legal, meaning="mixer or attention"
    )
    fields |= attention_fields(names, {"mamba": mixer, "full": attention})
    width = r.integer("shared_intermediate_size", meaning="width of the shared FFN")
    if not r.has("num_local_experts") or r.config["num_local_experts"] == 0:
        r.seen.update(("num_local_experts", "num_experts_per_tok", "intermediate_size"))
        return fields | {"dense_ffn": width}
    moe = routed(r, "softmax", width=("intermediate_size",))
    return fields | {"moe": moe | {"shared_experts": 1, "shared_ffn": width}}
