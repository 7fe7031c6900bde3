"""MiniMax Text-01 and M1 (lightning attention), M2 (full attention) and M3 (block-sparse attention)."""

from __future__ import annotations

from typing import Any

from moesim.simulator.model.block import DENSE, ROUTED
from moesim.simulator.model.huggingface.parts import gqa, routed, scoring_of, shared
from moesim.simulator.model.huggingface.reader import Reader, attention_fields, core, family, ffn_fields, mtp

_LIGHTNING_BLOCK = 256
"""Tokens of one block of lightning attention (block_size in the published modeling_minimax_m1.py)."""


@family(
    "minimax_m1", "MiniMaxForCausalLM", "MiniMaxM1ForCausalLM", "MiniMaxText01ForCausalLM",
    also=("minimax", "minimax_text_01"),
)  # fmt: skip
def minimax_m1(r: Reader) -> dict[str, Any]:
    """Text-01 and M1: `attn_type_list` or `layer_types` says which layers have lightning attention."""
    fields = core(r)
    layers = fields["n_layers"]
    full = gqa(r, own_head_dim=True)
    # Lightning attention has as many heads of keys and values as of queries (modeling_minimax_m1.py).
    lightning = {
        "kind": "lightning",
        "heads": full["heads"],
        "kv_heads": full["heads"],
        "head_dim": full["head_dim"],
        "chunk": r.integer("block_size", meaning="tokens of one block", absent=_LIGHTNING_BLOCK),
    }
    if r.has("attn_type_list"):
        legal: dict[Any, str] = {0: "lightning", 1: "full"}
        names = r.per_layer("attn_type_list", layers=layers, legal=legal, meaning="0 for lightning attention")
    else:
        legal = {"linear_attention": "lightning", "full_attention": "full"}
        names = r.per_layer("layer_types", layers=layers, legal=legal, meaning="attention of a layer")
    r.refuse_used("shared_intermediate_size", why="a shared expert")
    moe = routed(r, "softmax", width=("intermediate_size",))
    return fields | attention_fields(names, {"full": full, "lightning": lightning}) | {"moe": moe}


def _modules(r: Reader) -> dict[str, Any]:
    if r.config.get("use_mtp") is False:
        r.seen.update(("use_mtp", "num_mtp_modules"))
        return {}
    r.seen.add("use_mtp")
    if "num_nextn_predict_layers" in r.config:
        r.seen.add("num_mtp_modules")
        return mtp(r, "num_nextn_predict_layers")
    return mtp(r, "num_mtp_modules")


@family("minimax_m2", "MiniMaxM2ForCausalLM")
def minimax_m2(r: Reader) -> dict[str, Any]:
    """M2 to M2.7: full attention whose norms have a weight for every element of all heads."""
    fields = core(r)
    if r.config.get("attn_type_list") is not None:
        r.per_layer(
            "attn_type_list", layers=fields["n_layers"], legal={1: "full"}, meaning="1 for full attention"
        )
    norms = _qk_norm(r)
    r.refuse_used("shared_intermediate_size", why="a shared expert")
    bias = r.flag("use_routing_bias", "balance bias of the gate")
    moe = routed(r, scoring_of(r), width=("intermediate_size",), score_bias=bias)
    return fields | {"attention": gqa(r, own_head_dim=True, qk_norm=norms), "moe": moe} | _modules(r)


def _qk_norm(r: Reader) -> bool | str:
    """Norms of queries and keys; files without qk_norm_type have M2's over all heads (MiniMaxM2)."""
    kinds: dict[str, bool | str] = {"per_layer": "all-heads", "per_head": True}
    norm = r.choice("qk_norm_type", legal=kinds, meaning="norms of queries and keys", absent="per_layer")
    return r.flag("use_qk_norm", "norms of queries and keys") and norm


@family(
    "minimax_m3", "MiniMaxM3ForCausalLM", "MiniMaxM3SparseForCausalLM",
    also=("minimax_m3_vl", "minimax_m3_vl_text"),
)  # fmt: skip
def minimax_m3(r: Reader) -> dict[str, Any]:
    """M3: dense layers with full attention first, then experts with block-sparse attention."""
    fields = core(r, activations=("silu", "swigluoai"))
    layers = fields["n_layers"]
    r.refuse_unless("attention_output_gate", False, "gate of the attention's output")
    norms = _qk_norm(r)
    full = gqa(r, own_head_dim=True, qk_norm=norms)
    sparse = r.inner("sparse_attention_config", "block-sparse attention")
    kinds = {
        "full": full,
        "sparse": full
        | {
            "kind": "block_sparse",
            "index_heads": sparse.integer("sparse_num_index_heads", meaning="heads of the indexer"),
            "index_dim": sparse.integer("sparse_index_dim", meaning="width of one indexer head"),
            "block": sparse.integer("sparse_block_size", meaning="keys of one block"),
            "top_k_blocks": sparse.integer("sparse_topk_blocks", meaning="blocks that a query keeps"),
        },
    }
    flags = {0: "full", 1: "sparse"}
    names = sparse.per_layer("sparse_attention_freq", layers=layers, legal=flags, meaning="1 for sparse")
    halves = r.per_layer(
        "moe_layer_freq", layers=layers, legal={0: DENSE, 1: ROUTED}, meaning="1 for experts"
    )
    r.seen.add("first_k_dense_replace")
    bias = r.flag("use_routing_bias", "balance bias of the gate")
    # M3's files state the expert's width as intermediate_size, and newer ones as moe_intermediate_size too.
    r.seen.add("moe_intermediate_size")
    moe = routed(r, scoring_of(r), width=("intermediate_size",), score_bias=bias)
    width = r.integer("shared_intermediate_size", meaning="width of the shared expert", least=0)
    moe |= shared(r, width) if width else {}
    dense = r.integer("dense_intermediate_size", meaning="width of the dense FFN")
    return fields | attention_fields(names, kinds) | ffn_fields(halves, moe, dense) | _modules(r)
