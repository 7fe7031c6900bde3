"""Sparse attention over keys that an indexer chooses: of DeepSeek (DSA), and block-sparse (MiniMax-M3).

DSA is latent attention over the chosen keys (arXiv 2512.02556). Its operators are those of the sparse
training stage (section 2.1.1): the indexer scores all causal keys, the core attention reads the chosen ones
in the absorbed form (all heads share one latent key), and the indexer learns the attention's distribution
over the chosen keys by a KL loss of its own, with detached inputs. The dense warm-up, which trains the
indexer alone for 1,000 steps, is not priced. Sequences of at most `top_k` tokens run dense, in the form of
latent attention, beside the indexer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from msgspec.structs import replace
from pydantic import PositiveInt

from moesim.simulator.model.attention.grouped_query import GQA
from moesim.simulator.model.attention.mla import MLA
from moesim.simulator.model.attention.softmax import Reach, copy, mean_keys, rope
from moesim.simulator.model.operator import Dtype, GemmShape, Operator, Work
from moesim.simulator.model.parameters import ModelPart
from moesim.simulator.model.precision import Precision, row_bytes
from moesim.simulator.model.primitives import (
    BF16,
    FP32,
    cast,
    channel_casts,
    gemm,
    linear_forward,
    linear_input_gradient,
    move,
    norm,
    recomputed,
    weight_gradient,
)
from moesim.simulator.model.recompute import CachedTensor, GemmOutput, Module, Recompute

# -- what kinds of sparse attention share: the core over chosen keys, indexer scores and top-k -----------

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


class DSA(MLA):
    """Multi-head latent attention in which every query reads `indexer.top_k` keys (DeepSeek-V3.2, GLM-5)."""

    kind: Literal["dsa"] = "dsa"  # type: ignore[assignment]
    indexer: Indexer

    # -- counts --------------------------------------------------------------------------------------

    def parameters(self, hidden: int) -> int:
        """Parameters of the latent attention and of the indexer."""
        return super().parameters(hidden) + self.uncounted_parameters(hidden)

    def uncounted_parameters(self, hidden: int) -> int:
        """Parameters of the indexer, whose work model FLOPs leave out."""
        return self.indexer.parameters(hidden, self.q_lora_rank or hidden)

    def state_bytes(self, tokens: int, element_bytes: float) -> float:
        """Bytes of every token's latent, rotated key and indexer key."""
        index = 0 if self.indexer.shared else self.indexer.head_dim
        return super().state_bytes(tokens, element_bytes) + index * tokens * element_bytes

    @property
    def reach(self) -> Reach:
        """The chosen keys (eq. A1), in the form that is not absorbed.

        So a share of the peak means the same as for dense models; neither the indexer nor what absorbing adds
        counts.
        """
        return Reach("chosen", self.indexer.top_k)

    # -- operators -----------------------------------------------------------------------------------

    def core(self, sequence: int) -> SparseCore:
        """Sizes of the absorbed core attention."""
        latent = self.kv_lora_rank + self.qk_rope_dim
        return SparseCore(
            self.heads,
            latent,
            self.kv_lora_rank,
            latent,
            self.reach.mean_keys(sequence),
            self.sizes.qk_head_dim + self.v_dim,
        )

    def forward(self, w: Work) -> list[Operator]:
        """Latents, the indexer's choice, core attention over the chosen keys, output projection."""
        return super().forward(w) if self.reach.limits(w.sequence) else [*self._index(w), *super().forward(w)]

    def _index(self, w: Work) -> list[Operator]:
        return self.indexer.forward(w, self.q_lora_rank or w.hidden, self.qk_rope_dim)

    def core_forward(self, w: Work) -> list[Operator]:
        """The indexer's choice and the core attention over it in the absorbed form, or dense."""
        if not self.reach.limits(w.sequence):
            return super().core_forward(w)
        return [*self._index(w), *self._absorbed_core(w)]

    def _absorbed_core(self, w: Work) -> list[Operator]:
        return [*sparse_forward(w, self.core(w.sequence)), self._absorbed(w, "absorb_values", "F")]

    def _absorbed(self, w: Work, name: str, d: Literal["F", "I"]) -> Operator:
        """One GEMM a head between the latent and the head's keys or values, in BF16."""
        own = self.qk_nope_dim if name == "absorb_keys" else self.v_dim
        heads, latent = self.heads // w.tp, self.kv_lora_rank
        widens = (name == "absorb_keys") == (d == "F")
        n, k = (latent, own) if widens else (own, latent)
        suffix = "" if d == "F" else ".dgrad"
        return gemm(f"{name}{suffix}", d, w.tokens * heads, n, k, "bf16", groups=heads)

    def _up(self, w: Work) -> list[Operator]:
        if not self.reach.limits(w.sequence):
            return super()._up(w)
        t, heads, name, q_in = w.tokens, self.heads // w.tp, *self._query(w)
        return [
            *linear_forward(w, name, t, heads * self.sizes.qk_head_dim, q_in),
            *([rope("rope_k", "F", t * self.qk_rope_dim)] if self.rotary else []),
            *([rope("rope_q", "F", t * heads * self.qk_rope_dim)] if self.rotary else []),
            self._absorbed(w, "absorb_keys", "F"),
            copy("latent_pack", "F", t * (heads + 1) * self.qk_rope_dim, "pack"),
        ]

    def input_gradient(self, w: Work) -> list[Operator]:
        """Input gradients, and the indexer's loss; the indexer passes no gradient on."""
        gradient = super().input_gradient(w)
        return gradient if self.reach.limits(w.sequence) else [*self._loss(w), *gradient]

    def core_again(self, w: Work) -> list[Operator]:
        """The core attention over the chosen keys run again, without the choice, or dense."""
        if not self.reach.limits(w.sequence):
            return super().core_again(w)
        return recomputed(self._absorbed_core(w)) if w.repeats("core_attn") else []

    def core_backward(self, w: Work) -> list[Operator]:
        """Input gradients of the core attention over the chosen keys with the indexer's loss, or dense."""
        if not self.reach.limits(w.sequence):
            return super().core_backward(w)
        values = self._absorbed(w, "absorb_values", "I")
        return [values, *self._loss(w), *sparse_backward(w, self.core(w.sequence))]

    def _loss(self, w: Work) -> list[Operator]:
        """The attention's probabilities of the chosen keys, summed over heads, then the indexer's gradient.

        They are the indexer's target. The kernel computes all scores again; model FLOPs leave it out.
        """
        if self.indexer.shared:
            return []
        core = self.core(w.sequence)
        (forward,) = sparse_forward(w, core)
        flop = 2.0 * w.tokens * (self.heads // w.tp) * core.keys * core.qk_dim
        target = replace(
            forward,
            name="indexer.target",
            direction="I",
            flop=flop,
            uncounted_flop=flop,
            bytes_written=w.tokens * core.keys * FP32,
        )
        return [target, *self.indexer.backward(w)]

    def inputs_gradient(self, w: Work) -> list[Operator]:
        """Input gradients of the absorbed products, of the query's projection and of the latents."""
        if not self.reach.limits(w.sequence):
            return super().inputs_gradient(w)
        t, heads, name, q_in = w.tokens, self.heads // w.tp, *self._query(w)
        width = heads * self.sizes.qk_head_dim
        out = [
            self._absorbed(w, "absorb_keys", "I"),
            *([rope("rope_q.backward", "I", t * heads * self.qk_rope_dim)] if self.rotary else []),
            *linear_input_gradient(w, name, t, width, q_in),
            *([rope("rope_k.backward", "I", t * self.qk_rope_dim)] if self.rotary else []),
        ]
        return [*out, *channel_casts(w, name, t, width, q_in), *self._latent_gradient(w)]

    def inputs_weight_gradient(self, w: Work) -> list[Operator]:
        """Weight gradients of the projections, in the absorbed form head by head, and of the indexer."""
        index = self.indexer.weight_gradient(w, self.q_lora_rank or w.hidden)
        up, *rest = super().inputs_weight_gradient(w)
        if not self.reach.limits(w.sequence):
            return [up, *rest, *index]
        heads, latent = self.heads // w.tp, self.kv_lora_rank
        absorbed = [
            gemm(f"{name}.wgrad", "W", own, latent, w.tokens * heads, "bf16", cls="wgrad_gemm", groups=heads)
            for name, own in (("absorb_keys", self.qk_nope_dim), ("absorb_values", self.v_dim))
        ]
        return [*absorbed, *rest, *index]

    # -- memory --------------------------------------------------------------------------------------

    def cached_tensors(
        self, precision: Precision, policy: Recompute, unfused: bool
    ) -> Iterator[CachedTensor]:
        """Tensors of latent attention, the absorbed queries and outputs, and those of the indexer.

        Keys and values are kept as latents; the absorbed form is taken at any length.
        """
        latent = self.heads * self.kv_lora_rank
        up: frozenset[Module] = frozenset({"mla_up_proj"})
        core: frozenset[Module] = frozenset({"core_attn"})
        for tensor in super().cached_tensors(precision, policy, False):
            if tensor.name == "q, k, v":
                queries = self.heads * self.sizes.qk_head_dim + latent + self.heads * self.qk_rope_dim
                size = row_bytes(queries, "bf16")
                yield CachedTensor("queries, absorbed queries", size, "expanded", "width", modules=up)
            else:
                yield tensor
        output = row_bytes(latent, "bf16")
        yield CachedTensor("latent output", output, "kept", "width", kept_by_op=True, modules=core)
        yield from self.indexer.cached()

    def inputs_gemm_outputs(self) -> Iterator[GemmOutput]:
        """Outputs of the projections; the products of single heads do not count as dense GEMMs."""
        yield from (out for out in super().inputs_gemm_outputs() if out.name != "kv_up")
        if not self.indexer.shared:
            yield GemmOutput("indexer.q_up", self.indexer.width, "none")
            yield GemmOutput("indexer.key", self.indexer.head_dim, "none")

    def unfused_scores(self, sequence: int) -> float:
        """0 where keys are left out: the sparse kernels are fused."""
        return 0.0 if self.reach.limits(sequence) else super().unfused_scores(sequence)

    def context_elements(self, sequence: int) -> float:
        """Elements of the latent, the rotated key and the indexer's key of a token, for all heads."""
        index = 0 if self.indexer.shared else self.indexer.head_dim
        return self.kv_lora_rank + self.qk_rope_dim + index


class BlockSparse(GQA):
    """Grouped-query attention over the `top_k_blocks` blocks of `block` keys that score best."""

    kind: Literal["block_sparse"] = "block_sparse"  # type: ignore[assignment]
    index_heads: PositiveInt
    """Query heads of the indexer, each with a choice of its own for one group of query heads."""
    index_dim: PositiveInt
    block: PositiveInt
    """Keys of one block."""
    top_k_blocks: PositiveInt

    @property
    def reach(self) -> Reach:
        """Keys of the chosen blocks; without a choice, sequences run dense beside the indexer."""
        return Reach("chosen", self.block * self.top_k_blocks)

    @property
    def _index_width(self) -> int:
        return self.index_heads * self.index_dim

    def uncounted_parameters(self, hidden: int) -> int:
        """Query and key projection of the indexer."""
        return hidden * (self.index_heads + 1) * self.index_dim

    def parameters(self, hidden: int) -> int:
        """Parameters of grouped-query attention and of the indexer."""
        return super().parameters(hidden) + self.uncounted_parameters(hidden)

    def norm_parameters(self) -> int:
        """Norms of queries and keys, and those of the indexer's query and key."""
        return super().norm_parameters() + 2 * self.index_dim

    def state_bytes(self, tokens: int, element_bytes: float) -> float:
        """Bytes of keys and values, and of the indexer's key, of every token."""
        return self.context_elements(tokens) * tokens * element_bytes

    # -- operators -----------------------------------------------------------------------------------

    def core(self, sequence: int) -> SparseCore:
        """Sizes of the core attention; keys and values of all groups are read."""
        heads, kv_heads, qk, v = self.sizes
        kv = kv_heads * (qk + v)
        return SparseCore(heads, qk, v, kv, self.reach.mean_keys(sequence), qk + v, "block")

    def forward(self, w: Work) -> list[Operator]:
        """Projections, the indexer's choice of blocks, core attention over them, output projection."""
        return super().forward(w) if self.reach.limits(w.sequence) else [*self._index(w), *super().forward(w)]

    def core_forward(self, w: Work) -> list[Operator]:
        """The indexer's choice of blocks and the core attention over them, or dense."""
        if not self.reach.limits(w.sequence):
            return super().core_forward(w)
        return [*self._index(w), *sparse_forward(w, self.core(w.sequence))]

    def _index(self, w: Work) -> list[Operator]:
        """Scores of all causal keys in BF16, and the choice among the best score of every block."""
        t, keys = w.tokens, w.sequence / 2.0
        projections = [
            *linear_forward(w, "indexer.q_proj", t, self._index_width, w.hidden),
            *linear_forward(w, "indexer.k_proj", t, self.index_dim, w.hidden),
        ]
        return [
            *uncounted(projections),
            norm("indexer.norm", "F", t * (self.index_heads + 1), self.index_dim),
            rope("indexer.rope", "F", t * (self.index_heads + 1) * self.index_dim),
            index_scores(w, "indexer.scores", self.index_heads, self.index_dim, keys, "bf16"),
            choose_keys(w, self.index_heads * keys / self.block, float(self.top_k_blocks * self.index_heads)),
        ]

    def input_gradient(self, w: Work) -> list[Operator]:
        """Input gradients; the indexer is trained on the chosen keys with detached inputs, as in DSA."""
        gradient = super().input_gradient(w)
        return gradient if self.reach.limits(w.sequence) else [self._index_gradient(w), *gradient]

    def _index_gradient(self, w: Work) -> Operator:
        keys = self.reach.mean_keys(w.sequence)
        return index_scores(
            w, "indexer.scores.backward", self.index_heads, self.index_dim, keys, "bf16", backward=True
        )

    def core_again(self, w: Work) -> list[Operator]:
        """The core attention over the chosen blocks, without the choice, and the indexer's gradient."""
        if not self.reach.limits(w.sequence):
            return super().core_again(w)
        core = sparse_forward(w, self.core(w.sequence))
        return [*(recomputed(core) if w.repeats("core_attn") else []), self._index_gradient(w)]

    def core_backward(self, w: Work) -> list[Operator]:
        """Input gradients of the core attention over the chosen blocks, or dense."""
        if not self.reach.limits(w.sequence):
            return super().core_backward(w)
        return sparse_backward(w, self.core(w.sequence))

    def weight_gradient(self, w: Work) -> list[Operator]:
        """Weight gradients of all projections."""
        index = [
            weight_gradient(w, "indexer.q_proj", w.tokens, self._index_width, w.hidden),
            weight_gradient(w, "indexer.k_proj", w.tokens, self.index_dim, w.hidden),
        ]
        return [*super().weight_gradient(w), *uncounted(index)]

    # -- memory --------------------------------------------------------------------------------------

    def cached_tensors(
        self, precision: Precision, policy: Recompute, unfused: bool
    ) -> Iterator[CachedTensor]:
        """Tensors of grouped-query attention, queries and key of the indexer, and the chosen blocks."""
        yield from super().cached_tensors(precision, policy, False)
        elements = self._index_width + self.index_dim
        yield CachedTensor("indexer queries and key", row_bytes(elements, "bf16"), "kept", "none")
        chosen = 4.0 * self.index_heads * self.top_k_blocks
        yield CachedTensor("chosen blocks", chosen, "kept", "none", kept_by_op=True)

    def inputs_gemm_outputs(self) -> Iterator[GemmOutput]:
        """Outputs of the projections, the indexer's behind the others."""
        yield from super().inputs_gemm_outputs()
        yield GemmOutput("indexer.q_proj", self._index_width, "none")
        yield GemmOutput("indexer.k_proj", self.index_dim, "none")

    def unfused_scores(self, sequence: int) -> float:
        """0 where keys are left out: the sparse kernels are fused."""
        return 0.0 if self.reach.limits(sequence) else super().unfused_scores(sequence)

    def context_elements(self, sequence: int) -> float:
        """Elements of keys, values and the indexer's key of a token."""
        _, kv_heads, qk, v = self.sizes
        return float(kv_heads * (qk + v) + self.index_dim)
