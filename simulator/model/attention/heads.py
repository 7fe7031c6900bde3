"""Sizes of the heads of softmax attention (plain data)."""

from __future__ import annotations

from typing import NamedTuple


class HeadSizes(NamedTuple):
    """Numbers of query heads and of key-value heads, and elements of one query or key and of one value."""

    heads: int
    kv_heads: int
    qk_head_dim: int
    v_head_dim: int
