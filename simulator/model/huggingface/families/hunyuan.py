"""Hunyuan A13B and Hunyuan 3."""

from __future__ import annotations

from typing import Any

from moesim.simulator.model.huggingface.core import core, mtp
from moesim.simulator.model.huggingface.experts import routed, shared
from moesim.simulator.model.huggingface.grouped_query import gqa
from moesim.simulator.model.huggingface.layers import dense_first, ffn_fields
from moesim.simulator.model.huggingface.reader import Reader


def hunyuan(r: Reader) -> dict[str, Any]:
    """Hunyuan A13B: one shared expert as wide as a routed one; numbers may be lists with one entry a layer.

    Norms of queries and keys and the shared expert are part of the modelling code (HunYuanMoEV1)."""
    fields = core(r)
    layers = fields["n_layers"]
    r.refuse_unless("use_cla", False, "layers that share keys and values")
    r.refuse_unless("mlp_bias", False, "bias of the FFN projections")
    r.refuse_unless("use_mixed_mlp_moe", True, "experts beside a shared FFN")
    r.refuse_unless("use_qk_norm", True, "norms of queries and keys")
    r.refuse_unless("moe_layer_num_skipped", 0, "layers without experts")
    width_key = "moe_intermediate_size" if r.has("moe_intermediate_size") else "intermediate_size"
    r.seen.update(("intermediate_size", "num_shared_expert"))
    count = (
        r.uniform("num_shared_expert", layers=layers, meaning="shared experts")
        if r.has("num_shared_expert")
        else 1
    )
    width = r.uniform(width_key, layers=layers, meaning="width of one expert")
    moe = {
        "experts": r.uniform("num_experts", layers=layers, meaning="routed experts"),
        "top_k": r.uniform("moe_topk", layers=layers, meaning="experts a token"),
        "expert_ffn": width,
        "scoring": "softmax",
        "shared_experts": count,
        "shared_ffn": width,
    }
    return fields | {"attention": gqa(r, bias_key="attention_bias", qk_norm=True), "moe": moe}


def hunyuan_v3(r: Reader) -> dict[str, Any]:
    """Hunyuan 3; norms of queries and keys, a sigmoid and a balance bias are fixed in the code (HYV3)."""
    fields = core(r)
    r.refuse_unless("mlp_bias", False, "bias of the FFN projections")
    attention = gqa(r, own_head_dim=True, bias_key="attention_bias", qk_norm=True)
    width = ("moe_intermediate_size", "expert_hidden_dim")
    moe = routed(r, "sigmoid", width=width, score_bias=True)
    moe |= shared(r, moe["expert_ffn"])
    dense = r.integer("intermediate_size", meaning="width of the dense FFN")
    return (
        fields
        | {"attention": attention}
        | ffn_fields(dense_first(r, fields["n_layers"]), moe, dense)
        | mtp(r)
    )
