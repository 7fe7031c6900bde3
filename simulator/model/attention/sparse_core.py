"""Operators that kinds of sparse attention share: the core over chosen keys, indexer scores and top-k."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from pydantic import PositiveInt

from moesim.simulator.model.attention.softmax import mean_keys, rope
from moesim.simulator.model.operator import Dtype, GemmShape, Operator, Work
from moesim.simulator.model.parameters import ModelPart
from moesim.simulator.model.precision import row_bytes
from moesim.simulator.model.primitives import (
    BF16,
    FP32,
    cast,
    gemm,
    linear_forward,
    move,
    norm,
    weight_gradient,
)
from moesim.simulator.model.recompute import CachedTensor

INDEX_BYTES = 4.0
"""Bytes of one chosen key's position (int32)."""


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


class Indexer(ModelPart):
    """The indexer of sparse attention, which scores all causal keys in few narrow heads and chooses some.

    DeepSeek-V3.2 report (arXiv 2512.02556), section 2.1: queries come from the latent of the attention's
    queries, one key of `head_dim` elements and one weight per indexer head come from the hidden states.
    """

    heads: PositiveInt
    head_dim: PositiveInt
    top_k: PositiveInt
    shared: bool = False
    """Whether the layer takes the choice of an earlier layer's indexer and has none of its own (GLM-5.2)."""

    @property
    def width(self) -> int:
        """Elements of the queries of all indexer heads."""
        return self.heads * self.head_dim

    def parameters(self, hidden: int, query_in: int) -> int:
        """Projections of queries, key and head weights, and the layer norm of the key; 0 if shared."""
        if self.shared:
            return 0
        return query_in * self.width + hidden * (self.head_dim + self.heads) + 2 * self.head_dim

    # -- operators of the sparse training stage --------------------------------------------------------

    def forward(self, w: Work, query_in: int, rope_dim: int) -> list[Operator]:
        """Projections, scores of all causal keys, choice; every tensor-parallel rank runs all of it."""
        if self.shared:
            return []
        t, keys = w.tokens, w.sequence / 2.0
        out = [
            *linear_forward(w, "indexer.q_up", t, self.width, query_in),
            *linear_forward(w, "indexer.key", t, self.head_dim, w.hidden),
            gemm("indexer.weights", "F", t, self.heads, w.hidden, "bf16", cls="gate_gemm"),
            norm("indexer.key_norm", "F", t, self.head_dim),
            rope("indexer.rope", "F", t * (self.heads + 1) * rope_dim),
        ]
        if w.fp8:
            out.append(cast("indexer.cast", "F", t, self.width + self.head_dim, "token"))
        out.append(
            index_scores(w, "indexer.scores", self.heads, self.head_dim, keys, "fp8" if w.fp8 else "bf16")
        )
        return [*uncounted(out), choose_keys(w, keys, mean_keys(w.sequence, self.top_k))]

    def backward(self, w: Work) -> list[Operator]:
        """Gradient of the loss between its scores and the attention's, over the chosen keys only.

        Its inputs are detached from the model (arXiv 2512.02556, section 2.1.1), so that no gradient flows
        further than to its own weights.
        """
        return [] if self.shared else [self.score_gradient(w, mean_keys(w.sequence, self.top_k))]

    def score_gradient(self, w: Work, keys: float) -> Operator:
        """Gradient of its scores of `keys` keys per query."""
        name = "indexer.scores.backward"
        return index_scores(w, name, self.heads, self.head_dim, keys, "bf16", backward=True)

    def weights(self, w: Work) -> Operator:
        """Weight gradient of the projection into one weight a head."""
        return gemm("indexer.weights.wgrad", "W", self.heads, w.hidden, w.tokens, "bf16", cls="wgrad_gemm")

    def weight_gradient(self, w: Work, query_in: int) -> list[Operator]:
        """Weight gradients of its three projections."""
        if self.shared:
            return []
        t = w.tokens
        return uncounted(
            [
                weight_gradient(w, "indexer.q_up", t, self.width, query_in),
                weight_gradient(w, "indexer.key", t, self.head_dim, w.hidden),
                self.weights(w),
            ]
        )

    def cached(self) -> Iterator[CachedTensor]:
        """Queries, key and head weights in BF16, and the positions of the chosen keys."""
        if not self.shared:
            elements = self.width + self.head_dim + self.heads
            yield CachedTensor("indexer queries and key", row_bytes(elements, "bf16"), "kept", "none")
        yield CachedTensor("chosen keys", 4.0 * self.top_k, "kept", "none", kept_by_op=True)
