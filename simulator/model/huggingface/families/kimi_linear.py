"""Kimi Linear and Kimi K3: Kimi delta attention beside latent attention without rotation."""

from __future__ import annotations

from typing import Any

from moesim.simulator.model.huggingface.core import core, mtp
from moesim.simulator.model.huggingface.experts import groups, routed, scoring_of, shared
from moesim.simulator.model.huggingface.latent import mla
from moesim.simulator.model.huggingface.layers import attention_fields, dense_first, ffn_fields
from moesim.simulator.model.huggingface.reader import Reader


def kimi_linear(r: Reader) -> dict[str, Any]:
    """Kimi Linear 48B and the language model of Kimi K3."""
    fields = core(r, activations=("silu", "situ"))
    layers = fields["n_layers"]
    linear = r.inner("linear_attn_config", "Kimi delta attention")
    rotary = not r.flag("mla_use_nope", "latent attention has no rotary embedding")
    gate = "element" if r.flag("mla_use_output_gate", "gate of the attention's output", False) else False
    latent = mla(r, output_gate=gate) | ({} if rotary else {"rotary": False})
    kinds = {"kda": _kda(linear), "mla": latent}
    whole = linear.indices("full_attn_layers", layers=layers, first=1, meaning="layers with full attention")
    deltas = linear.indices("kda_layers", layers=layers, first=1, meaning="layers with delta attention")
    if sorted((*whole, *deltas)) != list(range(layers)):
        raise r.error(
            f"{r.prefix}linear_attn_config: full_attn_layers and kda_layers must name each of the {layers} "
            "layers once"
        )
    names = ["mla" if i in set(whole) else "kda" for i in range(layers)]
    moe = routed(r, scoring_of(r, "moe_router_activation_func"), score_bias=True)
    moe |= shared(r, moe["expert_ffn"]) | groups(r, "top2-sum", "num_expert_group", "topk_group")
    r.refuse_unless("topk_method", "noaux_tc", "how experts are chosen")
    row = r.integer(
        "routed_expert_hidden_size", meaning="width of the rows that experts get", absent=None, null=None
    )
    if row is not None:
        normed = r.flag("latent_moe_use_norm", "norm of the experts' rows", False)
        moe |= {"latent": row} | ({"latent_norm": True} if normed else {})
    width = r.integer("intermediate_size", meaning="width of the dense FFN")
    notes = []
    block = r.integer(
        "attn_res_block_size", meaning="layers of one attention residual", absent=None, null=None
    )
    if block is not None:
        notes.append(f"attention residuals over blocks of {block} layers: neither counted nor priced")
    fields |= attention_fields(names, kinds) | ffn_fields(dense_first(r, layers), moe, width)
    return fields | mtp(r) | ({"not_modelled": notes} if notes else {})


def _kda(linear: Reader) -> dict[str, Any]:
    return {
        "kind": "kda",
        "heads": linear.integer("num_heads", meaning="heads of the delta attention"),
        "head_dim": linear.integer("head_dim", meaning="width of one head"),
        "conv": linear.integer("short_conv_kernel_size", meaning="tokens of the convolution"),
        "full_rank_gate": linear.flag("use_full_rank_gate", "gates from one projection, not two", False),
    }
