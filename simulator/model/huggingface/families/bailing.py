"""Ling and Ring (Bailing): grouped-query attention with experts; Ling 3.0 has delta attention too."""

from __future__ import annotations

from typing import Any

from moesim.simulator.model.huggingface.core import core, mtp
from moesim.simulator.model.huggingface.experts import groups, routed, scoring_of, shared
from moesim.simulator.model.huggingface.grouped_query import gqa
from moesim.simulator.model.huggingface.latent import mla
from moesim.simulator.model.huggingface.layers import attention_fields, dense_first, ffn_fields
from moesim.simulator.model.huggingface.reader import Reader


def bailing_moe(r: Reader) -> dict[str, Any]:
    """Ling-lite, Ling-plus and Ling 2.0.

    What the first generation leaves out is as in modeling_bailing_moe.py: a softmax, no balance bias, no
    norms of queries and keys.
    """
    fields = core(r)
    layers = fields["n_layers"]
    r.refuse_unless("norm_head", False, "normalised weights of the head")
    r.refuse_unless("multi_gate", False, "gates of their own for images and sound")
    qkv_bias = r.flag("use_qkv_bias", "bias of queries, keys and values")
    o_bias = r.flag("use_bias", "bias of the attention's output and of the FFN", False)
    if o_bias:
        raise r.error(
            f"{r.prefix}use_bias=true is not modelled (bias of the experts); only false can be imported"
        )
    norms = r.flag("use_qk_norm", "norms of queries and keys", False)
    bias = r.flag("moe_router_enable_expert_bias", "balance bias of the gate", False)
    moe = routed(r, scoring_of(r, "score_function", absent="softmax"), score_bias=bias)
    width = r.integer(
        "moe_shared_expert_intermediate_size", meaning="width of one shared expert", absent=moe["expert_ffn"]
    )
    moe |= shared(r, width) | groups(r, "top2-sum")
    dense = r.integer("intermediate_size", meaning="width of the dense FFN")
    attention = gqa(r, qkv_bias=qkv_bias, qk_norm=norms)
    return fields | {"attention": attention} | ffn_fields(dense_first(r, layers), moe, dense) | mtp(r)


def bailing_hybrid(r: Reader) -> dict[str, Any]:
    """Ling 3.0 Flash: delta attention with full-rank gates, and latent attention with a gate a head.

    Both gates and the sigmoid of the router are fixed in the modelling code (BailingHybrid).
    """
    fields = core(r)
    layers = fields["n_layers"]
    r.seen.update(("short_conv_kernel_size", "layer_group_size"))
    delta = {
        "kind": "kda",
        "heads": r.integer("linear_num_heads", meaning="heads of the delta attention"),
        "head_dim": r.integer("linear_head_dim", meaning="width of a head of the delta attention"),
        "conv": r.integer("linear_conv_kernel_dim", meaning="tokens of the convolution"),
        "full_rank_gate": True,
        "full_rank_decay": True,
    }
    kinds = {"kda": delta, "mla": mla(r, full_query=True, output_gate="head")}
    legal = {"linear_attention": "kda", "full_attention": "mla"}
    names = r.per_layer("layer_types", layers=layers, legal=legal, meaning="attention of a layer")
    moe = routed(r, "sigmoid", score_bias=True)
    moe |= shared(r, moe["expert_ffn"]) | groups(r, "top2-sum", "num_expert_group", "topk_group")
    width = r.integer("intermediate_size", meaning="width of the dense FFN")
    return fields | attention_fields(names, kinds) | ffn_fields(dense_first(r, layers), moe, width) | mtp(r)
