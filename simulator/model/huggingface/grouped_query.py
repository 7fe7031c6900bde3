"""Reads the keys of grouped-query attention, over the whole sequence, a sliding window or chunks."""

from __future__ import annotations

from typing import Any

from moesim.simulator.model.huggingface.layers import attention_fields
from moesim.simulator.model.huggingface.reader import Reader, Understood


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


def chunked(attention: dict[str, Any], chunk: int) -> dict[str, Any]:
    """The same attention inside chunks of `chunk` tokens."""
    return attention | {"kind": "chunked", "chunk": chunk}


def window_of(r: Reader, *keys: str, switch: str | None = "use_sliding_window") -> int | None:
    """Attention window in tokens; None where the file has none or switches it off."""
    keys = keys or ("sliding_window",)
    if switch is not None and r.flag(switch, "sliding-window attention is used", True) is False:
        r.seen.update(keys)
        return None
    window: int | None = r.integer(*keys, meaning="attention window, tokens", absent=None, null=None, least=0)
    return window or None


def with_windows(r: Reader, attention: dict[str, Any], layers: int) -> dict[str, Any]:
    """Fields of an attention that has a window where the file states one (Mistral, Mixtral, Qwen).

    `layer_types` names the layers that have it; else those from `max_window_layers` on (Qwen), else all. A
    window that is not below the longest position reaches all tokens, so it is no window.
    """
    window = window_of(r)
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
