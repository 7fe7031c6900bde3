"""Operators that kinds of sparse attention share: the core over chosen keys, indexer scores and top-k.

Keys are counted as in dense causal attention: the query at position i of a sequence reads i keys, so n / 2 on
average over n tokens (eq. C2). A choice of at most k of them leaves `mean_keys`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from moesim.simulator.model.operator import Dtype, GemmShape, Operator
from moesim.simulator.model.primitives import BF16, FP32, move
from moesim.simulator.model.work import Work

INDEX_BYTES = 4.0
"""Bytes of one chosen key's position (int32)."""


def mean_keys(sequence: float, top_k: float) -> float:
    """Mean over a causal sequence of the keys that one query reads, at most `top_k` (eq. A1)."""
    if sequence <= top_k:
        return sequence / 2.0
    return top_k - top_k * top_k / (2.0 * sequence)


class SparseCore(NamedTuple):
    """Sizes of a core attention that reads chosen keys; one key-value head serves all `heads` query heads."""

    heads: int
    qk_dim: int
    v_dim: int
    kv_dim: int
    """Elements of one key with its value; the same elements where the value is part of the key."""
    keys: float
    """Mean number of keys of one query."""
    counted_dims: int
    """FLOPs of one score and its value per head, halved, as model FLOPs count them."""
    variant: str = ""
    """Kernel family, which has rates of its own."""


def sparse_forward(w: Work, core: SparseCore) -> list[Operator]:
    """Core attention over chosen keys, with flop = 2 x tokens x heads x keys x (d_qk + d_v) (eq. A2)."""
    heads = core.heads // w.tp
    scores = w.tokens * heads * core.keys
    read = w.tokens * (heads * core.qk_dim + core.kv_dim) * BF16 + w.tokens * core.keys * INDEX_BYTES
    return [
        Operator(
            "attention",
            "sparse_attention_forward",
            "F",
            "bf16",
            flop=2.0 * scores * (core.qk_dim + core.v_dim),
            uncounted_flop=2.0 * scores * (core.qk_dim + core.v_dim - core.counted_dims),
            bytes_read=read,
            bytes_written=w.tokens * heads * (core.v_dim * BF16 + FP32),
            gemm=GemmShape(w.tokens, max(1, round(core.keys)), core.qk_dim, heads),
            variant=core.variant,
        )
    ]


def sparse_backward(w: Work, core: SparseCore) -> list[Operator]:
    """Backward of that core: five GEMMs over the chosen keys, and a scatter of their gradients (eq. A3).

    Queries that chose the same key add to one FP32 gradient of it, so the kernel adds atomically: every
    chosen key is one read-modify-write of `kv_dim` elements per query and group of query heads. The GEMM that
    computes the scores again does not count as model FLOPs.
    """
    heads = core.heads // w.tp
    scores = w.tokens * heads * core.keys
    q, out, kv = w.tokens * heads * core.qk_dim, w.tokens * heads * core.v_dim, w.tokens * core.kv_dim
    backward = Operator(
        "attention.backward",
        "sparse_attention_backward",
        "I",
        "bf16",
        flop=scores * (6 * core.qk_dim + 4 * core.v_dim),
        uncounted_flop=scores * (6 * core.qk_dim + 4 * core.v_dim - 4 * core.counted_dims),
        bytes_read=(q + out + kv) * BF16 + w.tokens * core.keys * INDEX_BYTES,
        bytes_written=q * BF16 + w.tokens * core.keys * core.kv_dim * FP32,
        gemm=GemmShape(w.tokens, max(1, round(core.keys)), core.qk_dim, heads),
        variant=core.variant,
    )
    return [
        move("attention.backward_pre", "attention_pre_post", "I", 2 * out * BF16, out / core.v_dim * FP32,
             variant="pre"),
        backward,
        move("attention.key_gradient", "attention_pre_post", "I", kv * FP32, kv * BF16, variant="post"),
    ]  # fmt: skip


def index_scores(
    w: Work, name: str, heads: int, dim: int, keys: float, dtype: Dtype, backward: bool = False
) -> Operator:
    """Scores of `keys` keys per query in the indexer's heads, weighted and summed over them (eq. A4).

    Model FLOPs leave the indexer out. Its backward runs over the chosen keys only: gradients of queries and
    keys, after the scores are computed again.
    """
    element = 1.0 if dtype == "fp8" else BF16
    flop = 2.0 * w.tokens * heads * dim * keys * (3.0 if backward else 1.0)
    inputs = w.tokens * (heads + 1) * dim * element + w.tokens * heads * FP32
    written = w.tokens * (heads + 1) * dim * FP32 if backward else w.tokens * keys * FP32
    return Operator(
        name,
        "indexer",
        "I" if backward else "F",
        dtype,
        flop=flop,
        uncounted_flop=flop,
        bytes_read=inputs,
        bytes_written=written,
        gemm=GemmShape(w.tokens, max(1, round(keys)), dim, heads),
        variant="backward" if backward else "",
    )


def uncounted(operators: Iterable[Operator]) -> list[Operator]:
    """Return operators of which model FLOPs count nothing, such as the indexer's projections."""
    return [replace(op, uncounted_flop=op.flop) for op in operators]


def choose_keys(w: Work, keys: float, chosen: float) -> Operator:
    """Choice of the best keys of every query: the scores are read once and positions written."""
    return move("indexer.top_k", "indexer_topk", "F", w.tokens * keys * FP32, w.tokens * chosen * INDEX_BYTES)
