"""Gemma 1 to 4: norms around both halves, GELU, tied embeddings, alternating windows."""

from __future__ import annotations

from typing import Any

from moesim.simulator.model.huggingface.families.llama import dense_ffn
from moesim.simulator.model.huggingface.parts import gqa, routed, windowed
from moesim.simulator.model.huggingface.reader import Reader, attention_fields, core, family

_GELU = ("gelu_pytorch_tanh", "gelu", "gelu_tanh")
_LEGAL = {"sliding_attention": "sliding", "full_attention": "full"}


def _core(r: Reader, vocab: int | None = None, **more: Any) -> dict[str, Any]:
    # Gemma's files leave tie_word_embeddings out; the modelling code ties the head to the table.
    key = "hidden_activation" if r.has("hidden_activation") else "hidden_act"
    return core(r, activations=_GELU, activation_key=key, tied=True, vocab=vocab) | more


@family("gemma", "GemmaForCausalLM")
def gemma(r: Reader) -> dict[str, Any]:
    """Gemma 1."""
    return _core(r) | {
        "attention": gqa(r, own_head_dim=True, bias_key="attention_bias"),
        "dense_ffn": dense_ffn(r),
    }


def _alternating(r: Reader, layers: int, attention: dict[str, Any], every: int) -> dict[str, Any]:
    window = r.integer("sliding_window", meaning="attention window, tokens")
    if r.has("layer_types"):
        r.seen.add("sliding_window_pattern")
        names = r.per_layer("layer_types", layers=layers, legal=_LEGAL, meaning="attention of a layer")
    else:
        step = r.integer("sliding_window_pattern", meaning="every n-th layer sees all tokens", absent=every)
        names = tuple("sliding" if (i + 1) % step else "full" for i in range(layers))
    return attention_fields(names, {"sliding": windowed(attention, window), "full": attention})


@family("gemma2", "Gemma2ForCausalLM")
def gemma2(r: Reader) -> dict[str, Any]:
    """Gemma 2: every second layer sees all tokens (Gemma2Config)."""
    fields = _core(r, norm_position="sandwich")
    attention = gqa(r, own_head_dim=True, bias_key="attention_bias")
    return fields | _alternating(r, fields["n_layers"], attention, 2) | {"dense_ffn": dense_ffn(r)}


@family("gemma3", "Gemma3ForCausalLM", also=("gemma3_text",))
def gemma3(r: Reader) -> dict[str, Any]:
    """Gemma 3: every sixth layer sees all tokens, and queries and keys are normed.

    The published files of the smaller sizes state only what differs from Gemma3TextConfig, whose heads and
    vocabulary are the 4B model's.
    """
    fields = _core(r, vocab=262_208, norm_position="sandwich")
    heads = r.integer("num_attention_heads", meaning="query heads", absent=8)
    attention = {
        "kind": "gqa",
        "heads": heads,
        "kv_heads": r.integer("num_key_value_heads", meaning="key and value heads", absent=4),
        "head_dim": r.integer("head_dim", meaning="width of one head", absent=256),
        "qk_norm": True,
    }
    r.refuse_unless("attention_bias", False, "bias of the attention projections")
    return fields | _alternating(r, fields["n_layers"], attention, 6) | {"dense_ffn": dense_ffn(r)}


@family("gemma4", "Gemma4ForCausalLM", also=("gemma4_text",))
def gemma4(r: Reader) -> dict[str, Any]:
    """Gemma 4: wider heads in the layers that see all tokens, and experts beside the dense FFN.

    The dense FFN runs in every layer beside the experts, so it is read as their shared expert; the experts'
    path has a norm before and behind it, the dense path one behind it, and the gate norms its input (four
    further norms, Gemma4TextDecoderLayer).
    """
    fields = _core(r, norm_position="sandwich")
    r.refuse_used("hidden_size_per_layer_input", why="embeddings that every layer adds")
    r.refuse_used("num_kv_shared_layers", why="layers that share keys and values")
    r.refuse_used("use_double_wide_mlp", why="wider FFNs in some layers")
    layers = fields["n_layers"]
    sliding = gqa(r, own_head_dim=True, bias_key="attention_bias", qk_norm=True)
    window = r.integer("sliding_window", meaning="attention window, tokens")
    wide = r.integer("global_head_dim", meaning="width of a head in full layers", null=sliding["head_dim"])
    shared_kv = r.flag("attention_k_eq_v", "values are the keys in full layers", False)
    heads = sliding["kv_heads"]
    if shared_kv:
        heads = r.integer("num_global_key_value_heads", meaning="key heads in full layers", null=heads)
    full = sliding | {"head_dim": wide, "kv_heads": heads} | ({"key_is_value": True} if shared_kv else {})
    names = r.per_layer("layer_types", layers=layers, legal=_LEGAL, meaning="attention of a layer")
    fields |= attention_fields(names, {"sliding": windowed(sliding, window), "full": full})
    width = dense_ffn(r)
    if not r.flag("enable_moe_block", "layers have experts", False):
        r.seen.update(("num_experts", "top_k_experts", "moe_intermediate_size", "expert_intermediate_size"))
        return fields | {"dense_ffn": width}
    moe = routed(r, "softmax", width=("moe_intermediate_size", "expert_intermediate_size"))
    moe |= {"shared_experts": 1, "shared_ffn": width, "extra_norms": 4}
    note = "Gemma 4's scale of every expert (one number an expert) is left out"
    return fields | {"moe": moe, "not_modelled": [note]}
