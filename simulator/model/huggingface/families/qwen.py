"""Qwen 2 to 3.5: dense, with experts, and hybrids of gated delta nets and gated attention."""

from __future__ import annotations

from typing import Any

from moesim.simulator.model.block import DENSE, ROUTED
from moesim.simulator.model.huggingface.families.llama import dense_ffn
from moesim.simulator.model.huggingface.parts import gqa, routed, with_windows
from moesim.simulator.model.huggingface.reader import Reader, attention_fields, core, family, ffn_fields, mtp


@family("qwen2", "Qwen2ForCausalLM", also=("qwen2_5_vl", "qwen2_5_vl_text", "qwen2_vl", "qwen2_vl_text"))
def qwen2(r: Reader) -> dict[str, Any]:
    """Qwen2 and 2.5: queries, keys and values have biases in the modelling code."""
    fields = core(r)
    attention = with_windows(r, gqa(r, qkv_bias=True), fields["n_layers"])
    return fields | attention | {"dense_ffn": dense_ffn(r)}


def _qwen3_attention(r: Reader) -> dict[str, Any]:
    return gqa(r, own_head_dim=True, bias_key="attention_bias", qk_norm=True)


@family("qwen3", "Qwen3ForCausalLM", also=("qwen3_vl", "qwen3_vl_text"))
def qwen3(r: Reader) -> dict[str, Any]:
    """Qwen3: norms of queries and keys instead of biases."""
    fields = core(r)
    attention = with_windows(r, _qwen3_attention(r), fields["n_layers"])
    return fields | attention | {"dense_ffn": dense_ffn(r)}


def _feed_forward(r: Reader, layers: int, moe: dict[str, Any], **absent: Any) -> dict[str, Any]:
    width = r.integer("intermediate_size", meaning="width of the dense FFN (unused where no layer is dense)")
    step = r.integer("decoder_sparse_step", meaning="every n-th layer has experts")
    only = r.indices("mlp_only_layers", layers=layers, meaning="layers that stay dense", **absent)
    return ffn_fields([DENSE if i in only or (i + 1) % step else ROUTED for i in range(layers)], moe, width)


def _with_gated_shared(r: Reader, moe: dict[str, Any]) -> dict[str, Any]:
    width = r.integer("shared_expert_intermediate_size", meaning="width of the shared expert")
    return moe | {"shared_experts": 1, "shared_ffn": width, "shared_gate": True}


@family("qwen3_moe", "Qwen3MoeForCausalLM", also=("qwen3_vl_moe", "qwen3_vl_moe_text"))
def qwen3_moe(r: Reader) -> dict[str, Any]:
    """Qwen3 with experts."""
    fields = core(r)
    layers = fields["n_layers"]
    ffn = _feed_forward(r, layers, routed(r, "softmax"))
    return fields | ffn | with_windows(r, _qwen3_attention(r), layers)


@family("qwen2_moe", "Qwen2MoeForCausalLM")
def qwen2_moe(r: Reader) -> dict[str, Any]:
    """Qwen1.5 and Qwen2 with experts; one shared expert with a gate.

    Older files leave mlp_only_layers out, and the class then has no dense layer (Qwen2MoeConfig)."""
    fields = core(r)
    moe = _with_gated_shared(r, routed(r, "softmax"))
    ffn = _feed_forward(r, fields["n_layers"], moe, absent=[])
    return fields | ffn | with_windows(r, gqa(r, qkv_bias=True), fields["n_layers"])


def _hybrid(r: Reader, layers: int) -> dict[str, Any]:
    """Attention halves of Qwen3-Next and Qwen3.5: gated delta nets, and gated full attention."""
    r.flag("attn_output_gate", "gate of the attention's output", True)  # fixed in the modelling code
    full = _qwen3_attention(r)
    if r.config.get("attn_output_gate", True):
        full |= {"output_gate": "element"}
    delta = {
        "kind": "gated_delta",
        "key_heads": r.integer("linear_num_key_heads", meaning="key heads of the delta net"),
        "value_heads": r.integer("linear_num_value_heads", meaning="value heads of the delta net"),
        "key_dim": r.integer("linear_key_head_dim", meaning="width of a key head"),
        "value_dim": r.integer("linear_value_head_dim", meaning="width of a value head"),
        "conv": r.integer("linear_conv_kernel_dim", meaning="tokens of the convolution"),
    }
    kinds = {"linear": delta, "full": full}
    if r.has("layer_types"):
        r.seen.add("full_attention_interval")
        legal = {"linear_attention": "linear", "full_attention": "full"}
        names = r.per_layer("layer_types", layers=layers, legal=legal, meaning="attention of a layer")
    else:
        every = r.integer("full_attention_interval", meaning="every n-th layer has full attention")
        names = tuple("linear" if (i + 1) % every else "full" for i in range(layers))
    return attention_fields(names, kinds)


@family("qwen3_next", "Qwen3NextForCausalLM")
def qwen3_next(r: Reader) -> dict[str, Any]:
    """Qwen3-Next: delta nets and experts."""
    fields = core(r)
    layers = fields["n_layers"]
    moe = _with_gated_shared(r, routed(r, "softmax"))
    return fields | _hybrid(r, layers) | _feed_forward(r, layers, moe) | mtp(r)


@family("qwen3_5_moe", also=("qwen3_5_moe_text",))
def qwen3_5_moe(r: Reader) -> dict[str, Any]:
    """Qwen3.5 with experts in every layer."""
    fields = core(r)
    layers = fields["n_layers"]
    r.refuse_used("mlp_only_layers", why="layers without experts")
    moe = _with_gated_shared(r, routed(r, "softmax"))
    ffn = ffn_fields((ROUTED,) * layers, moe, None)
    return fields | _hybrid(r, layers) | ffn | mtp(r, "mtp_num_hidden_layers")


@family("qwen3_5", also=("qwen3_5_text",))
def qwen3_5(r: Reader) -> dict[str, Any]:
    """Qwen3.5 with dense FFNs."""
    fields = core(r)
    r.seen.add("mlp_only_layers")  # without experts the list has no meaning
    ffn = {"dense_ffn": dense_ffn(r)}
    return fields | _hybrid(r, fields["n_layers"]) | ffn | mtp(r, "mtp_num_hidden_layers")
