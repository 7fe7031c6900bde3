"""Dense Llama and its like, Llama 4 (experts, chunks) and Llama-Nemotron (layers that differ in size)."""

from __future__ import annotations

from typing import Any

from moesim.simulator.model.block import DENSE, ROUTED
from moesim.simulator.model.huggingface.parts import gqa, routed, with_windows
from moesim.simulator.model.huggingface.reader import (
    MOST,
    Reader,
    attention_fields,
    core,
    family,
    ffn_fields,
    shortest_pattern,
)

_BLOCK_PARTS = ("replace_with_linear", "sparsify", "window_length", "num_sink_tokens")
"""Parts of Llama-Nemotron's blocks that the published models do not use."""


def dense_ffn(r: Reader) -> int:
    """Width of the dense FFN without biases."""
    r.refuse_unless("mlp_bias", False, "bias of the FFN projections")
    width: int = r.integer("intermediate_size", meaning="width of the dense FFN")
    return width


@family("llama", "LlamaForCausalLM")
def llama(r: Reader) -> dict[str, Any]:
    """Llama 2 and 3."""
    fields = core(r)
    return fields | {
        "attention": gqa(r, kv_default=True, bias_key="attention_bias"),
        "dense_ffn": dense_ffn(r),
    }


@family("mimo", "MiMoForCausalLM")
def mimo(r: Reader) -> dict[str, Any]:
    """MiMo-7B: Qwen2's layers with MTP modules."""
    fields = core(r)
    modules = r.integer("num_nextn_predict_layers", meaning="MTP modules", least=0, absent=0)
    r.take(("attention_bias",), "bias of queries, keys and values", False)
    attention = gqa(r, qkv_bias=r.config.get("attention_bias") is True)
    ffn = {"dense_ffn": dense_ffn(r), "mtp_layers": modules}
    return fields | with_windows(r, attention, fields["n_layers"]) | ffn


@family("llama4", "Llama4ForCausalLM", also=("llama4_text",))
def llama4(r: Reader) -> dict[str, Any]:
    """Llama 4: experts in every n-th layer, and chunked attention in the layers with rotary embedding.

    What the files leave out is fixed by Llama4TextConfig and Llama4TextAttention of transformers: every
    fourth layer has no rotary embedding and sees all tokens; norms of queries and keys have no weight; the
    gate is a sigmoid; one shared expert as wide as a routed one.
    """
    fields = core(r, tied=False)
    layers = fields["n_layers"]
    r.flag("use_qk_norm", "norm of queries and keys, without weights", True)
    attention = gqa(r, bias_key="attention_bias")
    chunk = r.integer("attention_chunk_size", meaning="tokens of one attention chunk", null=None, absent=None)
    kinds = {
        "full": attention | {"rotary": False},
        "chunked": attention | {"kind": "chunked", "chunk": chunk} if chunk else attention,
    }
    if r.config.get("no_rope_layers"):
        legal = {0: "full", 1: "chunked"}
        names = r.per_layer("no_rope_layers", layers=layers, legal=legal, meaning="1 for rotary embedding")
    else:
        r.seen.add("no_rope_layers")
        meaning = "every n-th layer has no rotary embedding"
        interval = r.integer("no_rope_layer_interval", meaning=meaning, absent=4)
        names = tuple("full" if (i + 1) % interval == 0 else "chunked" for i in range(layers))
    moe = routed(r, "sigmoid", width=("intermediate_size",))
    moe |= {"shared_experts": 1, "shared_ffn": moe["expert_ffn"]}
    width = r.integer("intermediate_size_mlp", meaning="width of the dense FFN")
    step = r.integer("interleave_moe_layer_step", meaning="every n-th layer has experts")
    chosen = {i for i in range(layers) if (i + 1) % step == 0}
    if r.has("moe_layers"):
        chosen = set(r.indices("moe_layers", layers=layers, meaning="layers with experts"))
    halves = [ROUTED if i in chosen else DENSE for i in range(layers)]
    return fields | attention_fields(names, kinds) | ffn_fields(halves, moe, width)


@family("nemotron-nas", "DeciLMForCausalLM")
def nemotron_nas(r: Reader) -> dict[str, Any]:
    """Llama-Nemotron: `block_configs` lists the attention and the FFN of every layer.

    The FFN is 2/3 of ffn_mult times the hidden size, rounded up to a multiple of 256, and the heads of keys
    and values are the query heads over n_heads_in_group (modeling_decilm.py of the published models).
    """
    fields = core(r)
    layers, hidden = fields["n_layers"], fields["hidden"]
    heads = r.integer("num_attention_heads", meaning="query heads")
    r.refuse_unless("mlp_bias", False, "bias of the FFN projections")
    r.refuse_unless("attention_bias", False, "bias of the attention projections")
    blocks = r.take(("block_configs",), "attention and FFN of every layer")
    r.seen.update(("num_key_value_heads", "intermediate_size", "head_dim"))
    if not isinstance(blocks, list) or len(blocks) != layers:
        raise r.error(f"{r.prefix}block_configs must list the {layers} layers that num_hidden_layers states")
    if hidden % heads:
        raise r.error(f"{r.prefix}num_attention_heads={heads} does not divide hidden_size={hidden}")
    names, halves, kinds, widths = [], [], {}, {}
    for index, block in enumerate(blocks):
        groups, multiple = _block(r, index, block)
        if groups and heads % groups:
            raise r.error(
                f"{r.prefix}block_configs: layer {index}: n_heads_in_group={groups} must divide {heads}"
            )
        names.append(f"kv{heads // groups}" if groups else "none")
        if groups:
            kinds[names[-1]] = {
                "kind": "gqa", "heads": heads, "kv_heads": heads // groups, "head_dim": hidden // heads,
            }  # fmt: skip
        width = -(-int(2 * multiple * hidden / 3) // 256) * 256 if multiple else 0
        halves.append(f"ffn{width}" if width else "none")
        if width:
            widths[halves[-1]] = width
    ffn: dict[str, Any] = {"dense_ffns": widths, "ffn_layers": shortest_pattern(halves)}
    if len(widths) == 1 and "none" not in halves:
        ffn = {"dense_ffn": next(iter(widths.values()))}
    return fields | attention_fields(names, kinds) | ffn


def _block(r: Reader, index: int, block: Any) -> tuple[int, float]:
    """(query heads that share one head of keys, width factor of the FFN) of a layer; 0 for a missing half."""
    where = f"{r.prefix}block_configs: layer {index}"
    parts = [block.get(part) if isinstance(block, dict) else None for part in ("attention", "ffn")]
    attention, ffn = (part if isinstance(part, dict) else {} for part in parts)
    if not attention or not ffn:
        raise r.error(f"{where} must have the keys attention and ffn")
    for part in (attention, ffn):
        used = [key for key in _BLOCK_PARTS if part.get(key)]
        if used:
            raise r.error(f"{where}: {used[0]} is not modelled; only null or false can be imported")
    groups = 0 if attention.get("no_op") else attention.get("n_heads_in_group")
    multiple = 0.0 if ffn.get("no_op") else ffn.get("ffn_mult")
    if isinstance(groups, bool) or not isinstance(groups, int) or not 0 <= groups <= MOST:
        raise r.error(f"{where}: n_heads_in_group={groups!r} must be a whole number")
    if isinstance(multiple, bool) or not isinstance(multiple, int | float) or not 0 <= multiple <= 1000:
        raise r.error(f"{where}: ffn_mult={multiple!r} must be a number from 0 to 1000")
    return groups, float(multiple)


@family("mistral", "MistralForCausalLM", also=("ministral", "ministral3", "mistral3"))
def mistral(r: Reader) -> dict[str, Any]:
    """Mistral 7B to Large 2, Ministral and Devstral: no biases; some layers may have a window."""
    fields = core(r, tied=False)  # text parts of multimodal files leave the key out (MistralConfig)
    return fields | with_windows(r, gqa(r), fields["n_layers"]) | {"dense_ffn": dense_ffn(r)}


@family("mixtral", "MixtralForCausalLM")
def mixtral(r: Reader) -> dict[str, Any]:
    """Mixtral 8x7B and 8x22B."""
    fields = core(r, tied=False)  # as Mistral's
    moe = routed(r, "softmax", width=("intermediate_size",))
    return fields | with_windows(r, gqa(r), fields["n_layers"]) | {"moe": moe}
