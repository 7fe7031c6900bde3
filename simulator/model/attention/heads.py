"""Sizes of the heads of softmax attention (plain data)."""

from __future__ import annotations

from typing import NamedTuple


class HeadSizes(NamedTuple):
    """Heads of queries, heads of keys and values, and elements of one query or key and of one value."""

    heads: int
    kv_heads: int
    qk_head_dim: int
    v_head_dim: int
