"""Families of one or two models each, such as ERNIE 4.5, dots.llm1, DBRX, Jamba and GPT-2."""

from __future__ import annotations

from typing import Any

from moesim.simulator.model.block import DENSE, ROUTED
from moesim.simulator.model.huggingface.core import core, mtp
from moesim.simulator.model.huggingface.experts import deepseek_experts, routed, shared
from moesim.simulator.model.huggingface.grouped_query import gqa, with_windows
from moesim.simulator.model.huggingface.layers import attention_fields, dense_first, ffn_fields
from moesim.simulator.model.huggingface.reader import Reader


def ernie(r: Reader) -> dict[str, Any]:
    """ERNIE 4.5 with experts; the balance bias is part of the modelling code (Ernie4_5_MoeStatics)."""
    fields = core(r)
    layers = fields["n_layers"]
    r.refuse_unless("use_bias", False, "bias of the projections")
    moe = routed(r, "softmax", score_bias=True)
    moe |= shared(r, moe["expert_ffn"], "moe_num_shared_experts")
    start = r.integer("moe_layer_start_index", meaning="first layer that may have experts", least=0)
    # -1 and null mean the last layer (Ernie4_5_MoeConfig).
    last = {"absent": layers - 1, "null": layers - 1}
    end = r.integer("moe_layer_end_index", meaning="last layer that may have experts", least=-1, **last)
    end = layers - 1 if end == -1 else end
    every = r.integer("moe_layer_interval", meaning="every n-th layer between has experts", absent=1)
    names = [ROUTED if start <= i <= end and (i + 1) % every == 0 else DENSE for i in range(layers)]
    width = r.integer("intermediate_size", meaning="width of the dense FFN")
    return fields | {"attention": gqa(r)} | ffn_fields(names, moe, width) | mtp(r)


def dots1(r: Reader) -> dict[str, Any]:
    """dots.llm1: norms of queries and keys, and DeepSeek-V3's gate (Dots1TopkRouter)."""
    fields = core(r)
    attention = with_windows(r, gqa(r, bias_key="attention_bias", qk_norm=True), fields["n_layers"])
    moe = deepseek_experts(r, method="noaux_tc", scoring="sigmoid")
    width = r.integer("intermediate_size", meaning="width of the dense FFN")
    return fields | attention | ffn_fields(dense_first(r, fields["n_layers"]), moe, width)


def phimoe(r: Reader) -> dict[str, Any]:
    """Phi-3.5-MoE: layer norms with biases, biases of all projections of the attention."""
    fields = core(r) | {"norm": "layernorm"}  # PhimoeDecoderLayer has LayerNorm whatever the eps is called
    notes = []
    if r.flag("lm_head_bias", "bias of the head", False):
        notes.append("the bias of the head (one number a token of the vocabulary) is left out")
    moe = routed(r, "softmax", width=("intermediate_size",))
    attention = with_windows(r, gqa(r, bias_key="attention_bias"), fields["n_layers"])
    return fields | attention | {"moe": moe, "not_modelled": notes}


def dbrx(r: Reader) -> dict[str, Any]:
    """DBRX: its layer norms have no bias, so they have RMSNorm's sizes."""
    fields = core(r, layers=r.layers("n_layers"), activation="silu")
    attention, ffn = r.inner("attn_config", "attention"), r.inner("ffn_config", "experts")
    heads = r.integer("n_heads", meaning="query heads")
    hidden = fields["hidden"]
    if hidden % heads:
        raise r.error(f"{r.prefix}n_heads={heads} does not divide d_model={hidden}")
    gated = {
        "experts": ffn.integer("moe_num_experts", meaning="routed experts"),
        "top_k": ffn.integer("moe_top_k", meaning="experts a token"),
        "expert_ffn": ffn.integer("ffn_hidden_size", meaning="width of one expert"),
        "scoring": "softmax",
    }
    kv_heads = attention.integer("kv_n_heads", meaning="key and value heads")
    grouped = {"kind": "gqa", "heads": heads, "kv_heads": kv_heads, "head_dim": hidden // heads}
    return fields | {"attention": grouped, "moe": gated}


def olmoe(r: Reader) -> dict[str, Any]:
    """OLMoE: norms over all heads of queries and keys together (OlmoeAttention)."""
    fields = core(r)
    moe = routed(r, "softmax", width=("intermediate_size",))
    attention = gqa(r, kv_default=True, bias_key="attention_bias", qk_norm="all-heads")
    return fields | {"attention": attention, "moe": moe}


def jamba(r: Reader) -> dict[str, Any]:
    """Jamba: Mamba layers, some an attention without rotary embedding; experts in every second layer."""
    fields = core(r)
    layers, hidden = fields["n_layers"], fields["hidden"]
    r.refuse_unless("mamba_proj_bias", False, "bias of the mixer's projections")
    rank = (
        r.integer("mamba_dt_rank", meaning="rank of the step width")
        if r.config.get("mamba_dt_rank") != "auto"
        else 0
    )
    r.seen.add("mamba_dt_rank")
    r.refuse_unless("mamba_conv_bias", True, "bias of the mixer's convolution")
    mamba = {
        "kind": "mamba",
        "inner": hidden * r.integer("mamba_expand", meaning="inner width over the hidden size"),
        "state": r.integer("mamba_d_state", meaning="state of the mixer"),
        "dt_rank": rank or -(-hidden // 16),  # "auto" means the hidden size / 16, rounded up (JambaConfig)
        "conv": r.integer("mamba_d_conv", meaning="tokens of the convolution"),
        "inner_norms": True,
    }
    kinds = {"mamba": mamba, "attention": gqa(r) | {"rotary": False}}
    names = ["attention" if chosen else "mamba" for chosen in _every(r, layers, "attn_layer")]
    halves = [ROUTED if chosen else DENSE for chosen in _every(r, layers, "expert_layer")]
    moe = routed(r, "softmax", width=("intermediate_size",))
    if moe["experts"] == 1:
        halves = [DENSE] * layers
    width = r.integer("intermediate_size", meaning="width of the dense FFN")
    return fields | attention_fields(names, kinds) | ffn_fields(halves, moe, width)


def _every(r: Reader, layers: int, name: str) -> list[bool]:
    period = r.integer(f"{name}_period", meaning="every n-th layer")
    offset = r.integer(f"{name}_offset", meaning="first such layer", least=0)
    return [i % period == offset for i in range(layers)]


def gpt2(r: Reader) -> dict[str, Any]:
    """GPT-2: learned positions, layer norms and biases; the head is the table (GPT2LMHeadModel)."""
    gelu = ("gelu_new", "gelu", "gelu_pytorch_tanh")
    fields = core(
        r, layers=r.layers("n_layer"), activations=gelu, activation_key="activation_function", tied=True
    )
    hidden = fields["hidden"]
    heads = r.integer("n_head", meaning="heads")
    if hidden % heads:
        raise r.error(f"{r.prefix}n_head={heads} does not divide n_embd={hidden}")
    attention = {
        "kind": "gqa", "heads": heads, "kv_heads": heads, "head_dim": hidden // heads,
        "qkv_bias": True, "o_bias": True, "rotary": False,
    }  # fmt: skip
    # An absent or null n_inner means four times the hidden size (GPT2Config).
    width = r.integer("n_inner", meaning="width of the FFN", absent=4 * hidden, null=4 * hidden)
    return fields | {
        "attention": attention,
        "dense_ffn": width,
        "ffn_gated": False,
        "ffn_bias": True,
        "norm": "layernorm",
        "learned_positions": r.integer("n_positions", "n_ctx", meaning="rows of the table of positions"),
    }
