"""Reads the keys of attention (grouped-query and latent) and of routed and shared experts."""

from __future__ import annotations

from typing import Any

from moesim.simulator.model.huggingface.reader import (
    Reader,
    Understood,
    attention_fields,
    dense_first,
    ffn_fields,
)

# -- grouped-query attention, over the whole sequence, a sliding window or chunks ----------------------


def gqa(
    r: Reader,
    *,
    heads: int | None = None,
    kv_default: bool = False,
    own_head_dim: bool = False,
    bias_key: str | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    qk_norm: bool | str = False,
    hidden: int | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Fields of grouped-query attention.

    `own_head_dim` is true for families whose head_dim is independent of the hidden size; in the others an
    absent or null head_dim means hidden size / heads by definition of the format, not by a class default.
    With `kv_default` an absent or null num_key_value_heads means num_attention_heads (Llama). `bias_key`
    names the key that gives all four projections a bias; else `qkv_bias` and `o_bias` are the family's.
    `more` are further fields, of which those that are False are left out.
    """
    heads = heads or r.integer("num_attention_heads", "n_head", "n_heads", meaning="query heads")
    kv_absent = {"absent": heads, "null": heads} if kv_default else {}
    kv_heads = r.integer(
        "num_key_value_heads", "num_attention_groups", meaning="key and value heads", **kv_absent
    )
    bias = r.flag(bias_key, "bias of the attention projections", False) if bias_key else False
    return {
        "kind": "gqa",
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim(r, heads, hidden or r.config.get("hidden_size"), required=own_head_dim),
        "qkv_bias": bias or qkv_bias,
        "o_bias": bias or o_bias,
        "qk_norm": qk_norm,
        **{key: value for key, value in more.items() if value is not False},
    }


def head_dim(r: Reader, heads: int, hidden: Any, *, required: bool = False) -> int:
    """Width of one head: stated, or the hidden size over the heads."""
    keys = ("head_dim", "attention_head_dim", "kv_channels")
    stated = [key for key in keys if r.has(key)]
    r.seen.update(keys)
    if stated or required:
        width: int = r.integer(*(stated or keys[:1]), meaning="width of one head")
        return width
    if not isinstance(hidden, int) or isinstance(hidden, bool) or hidden % heads:
        raise r.error(
            f"{r.prefix}num_attention_heads={heads} does not divide hidden_size={hidden!r} and "
            "head_dim is absent; add head_dim"
        )
    r.understood.append(
        Understood(f"{r.prefix}head_dim", hidden // heads, "hidden_size / num_attention_heads")
    )
    return hidden // heads


def windowed(attention: dict[str, Any], window: int) -> dict[str, Any]:
    """The same attention over the last `window` tokens."""
    return attention | {"kind": "sliding", "window": window}


def with_windows(r: Reader, attention: dict[str, Any], layers: int) -> dict[str, Any]:
    """Fields of an attention that has a window where the file states one (Mistral, Mixtral, Qwen).

    `layer_types` names the layers that have it; else those from `max_window_layers` on (Qwen), else all. A
    window that is not below the longest position reaches all tokens, so it is no window.
    """
    window, none = None, {"absent": None, "null": None}
    if r.flag("use_sliding_window", "sliding-window attention is used", True):
        window = r.integer("sliding_window", meaning="attention window, tokens", least=0, **none) or None
    else:
        r.seen.add("sliding_window")
    if r.has("layer_types"):
        r.seen.add("max_window_layers")
        legal = {"full_attention": "full"} | ({"sliding_attention": "sliding"} if window else {})
        listed = r.per_layer("layer_types", layers=layers, legal=legal, meaning="attention of a layer")
        return attention_fields(listed, {"full": attention, "sliding": windowed(attention, window or 1)})
    longest = r.config.get("max_position_embeddings")
    if window is None or (isinstance(longest, int) and window >= longest):
        r.seen.add("max_window_layers")
        return {"attention": attention}
    first = r.integer("max_window_layers", meaning="first layer with a window", least=0, absent=0, null=0)
    names = ["full" if i < first else "sliding" for i in range(layers)]
    return attention_fields(names, {"full": attention, "sliding": windowed(attention, window)})


# -- multi-head latent attention, dense or with DeepSeek's indexer -------------------------------------

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
        why = "layers that share an indexer; state them in indexer_types"
        r.refuse_unless("index_topk_freq", 1, why)
        r.refuse_used("index_topk_pattern", why=why)
        r.seen.add("indexer_types")
        return attention_fields((_FULL,) * layers, kinds)
    r.seen.update(("index_topk_freq", "index_skip_topk_offset", "index_topk_pattern"))
    legal, meaning = {_FULL: _FULL, _SHARED: _SHARED}, "layers with an indexer of their own"
    return attention_fields(r.per_layer("indexer_types", layers=layers, legal=legal, meaning=meaning), kinds)


# -- routed and shared experts -------------------------------------------------------------------------

_COUNT = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
_TOP_K = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "top_k_experts",
    "moe_top_k",
    "moe_topk",
    "moe_k",
)
_WIDTH = ("moe_intermediate_size", "expert_ffn_hidden_size")
_SCORING = {name: name for name in ("softmax", "sigmoid", "sqrtsoftplus")}
_TOPK_METHODS: dict[str, tuple[str | None, bool]] = {
    "noaux_tc": ("top2-sum", True),
    "group_limited_greedy": ("best", False),
    "greedy": (None, False),
}
"""(ranking of the groups, whether a balance bias enters the choice) for every topk_method."""


def routed(r: Reader, scoring: str, *, width: tuple[str, ...] = _WIDTH, **more: Any) -> dict[str, Any]:
    """Fields of routed experts; `more` are further fields, left out where False."""
    return {
        "experts": r.integer(*_COUNT, meaning="routed experts"),
        "top_k": r.integer(*_TOP_K, meaning="experts a token"),
        "expert_ffn": r.integer(*width, meaning="width of one expert"),
        "scoring": scoring,
        **{key: value for key, value in more.items() if value is not False},
    }


def scoring_of(r: Reader, *keys: str, absent: str | None = None) -> str:
    """How scores come from logits; `absent` where the modelling code of a family fixes it."""
    keys = keys or ("scoring_func",)
    return r.choice(
        *keys, legal=_SCORING, meaning="scores from logits", **({} if absent is None else {"absent": absent})
    )


def shared(r: Reader, width: int, *keys: str, absent: Any = 0) -> dict[str, Any]:
    """Fields of shared experts of `width`; no key or null means none."""
    keys = keys or ("n_shared_experts", "num_shared_experts")
    count = r.integer(*keys, meaning="shared experts", least=0, absent=absent, null=0)
    return {"shared_experts": count, "shared_ffn": width} if count else {}


def dense_then_experts(
    r: Reader, layers: int, moe: dict[str, Any], meaning: str = "width of the dense FFN"
) -> dict[str, Any]:
    """Fields of dense FFNs first and experts behind them, by the keys of DeepSeek's files."""
    width = r.integer("intermediate_size", meaning=meaning)
    return ffn_fields(dense_first(r, layers), moe, width)


def groups(r: Reader, score: str | None, *keys: str) -> dict[str, Any]:
    """Fields of a gate that reaches some groups of experts only; keys default to DeepSeek's."""
    count_key, reach_key = keys or ("n_group", "topk_group")
    count = r.integer(count_key, meaning="groups of experts", absent=1, null=1)
    per_token = r.integer(reach_key, meaning="groups that a token may reach", absent=1, null=1)
    if per_token > count:
        raise r.error(
            f"{r.prefix}{reach_key}={per_token} is above {count_key}={count}: a token cannot reach more "
            "groups than there are; correct one of them"
        )
    if per_token == count or score is None:
        return {}
    return {"groups": count, "groups_per_token": per_token, "group_score": score}


def deepseek_experts(
    r: Reader, *, method: str | None = None, scoring: str | None = None, required: bool = False
) -> dict[str, Any]:
    """Fields of DeepSeek's experts.

    `method` and `scoring` are what the modelling code fixes in families whose files leave them out. With
    `required` the keys of groups and shared experts must be there.
    """
    if required:
        for key in ("n_group", "topk_group", "n_shared_experts"):
            r.take((key,), "experts of DeepSeek's models")
            r.understood.pop()
    score, bias = r.choice(
        "topk_method", legal=_TOPK_METHODS, meaning="how groups are ranked",
        **({} if method is None else {"absent": method}),
    )  # fmt: skip
    fields = routed(r, scoring_of(r, absent=scoring), score_bias=bias)
    return fields | shared(r, fields["expert_ffn"]) | groups(r, score)
