"""Reads the keys of multi-head latent attention, dense or with DeepSeek's indexer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moesim.simulator.model.huggingface.layers import attention_fields
from moesim.simulator.model.huggingface.reader import Reader

_FULL, _SHARED = "full", "shared"


def mla(r: Reader, *, full_query: bool = False, **more: Any) -> dict[str, Any]:
    """Fields of multi-head latent attention; `more` are further fields, left out where False.

    With `full_query` a missing q_lora_rank means that queries are not compressed.
    """
    r.refuse_unless("attention_bias", False, "bias of the attention projections")
    absent: dict[str, Any] = {"absent": None} if full_query else {}
    # The file repeats numbers that follow from the others: MLA expands keys and values to all heads.
    r.seen.update(("num_key_value_heads", "head_dim", "qk_head_dim"))
    return {
        "kind": "mla",
        "heads": r.integer("num_attention_heads", meaning="heads"),
        "q_lora_rank": r.integer(
            "q_lora_rank",
            meaning="width of the compressed query; null for none",
            null=None,
            **absent,
        ),
        "kv_lora_rank": r.integer("kv_lora_rank", meaning="width of the compressed keys and values"),
        "qk_nope_dim": r.integer("qk_nope_head_dim", meaning="query-key width without rotation"),
        "qk_rope_dim": r.integer("qk_rope_head_dim", meaning="query-key width with rotation"),
        "v_dim": r.integer("v_head_dim", meaning="value width of one head"),
        **{key: value for key, value in more.items() if value is not False},
    }


def dsa_fields(r: Reader, layers: int) -> dict[str, Any]:
    """Fields of DeepSeek sparse attention; `indexer_types` says which layers take another layer's choice."""
    attention = mla(r) | {"kind": "dsa"}
    indexer = {
        "heads": r.integer("index_n_heads", meaning="heads of the indexer"),
        "head_dim": r.integer("index_head_dim", meaning="width of one indexer head"),
        "top_k": r.integer("index_topk", meaning="keys that the indexer keeps for one query"),
    }
    kinds = {
        _FULL: attention | {"indexer": indexer},
        _SHARED: attention | {"indexer": indexer | {"shared": True}},
    }
    if not r.has("indexer_types"):
        _refuse_unread_sharing(r)
        r.seen.add("indexer_types")
        return attention_fields((_FULL,) * layers, kinds)
    r.seen.update(("index_topk_freq", "index_skip_topk_offset", "index_topk_pattern"))
    legal: Mapping[str, str] = {_FULL: _FULL, _SHARED: _SHARED}
    names = r.per_layer(
        "indexer_types", layers=layers, legal=legal, meaning="layers with an indexer of their own"
    )
    return attention_fields(names, kinds)


def _refuse_unread_sharing(r: Reader) -> None:
    """Refuse files that share indexers by other keys than `indexer_types`."""
    r.refuse_unless("index_topk_freq", 1, "layers that share an indexer; state them in indexer_types")
    r.refuse_used("index_topk_pattern", why="layers that share an indexer; state them in indexer_types")
