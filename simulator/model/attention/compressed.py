"""Compressed attention of DeepSeek-V4 (arXiv 2606.19348, section 2.3): a window and compressed older keys.

All query heads share one head of keys, which are the values too. Behind a sliding window, a layer of ratio 4
(CSA) reads the `indexer.top_k` compressed keys that its indexer chooses, a layer of ratio 128 (HCA) reads all
of them, and a layer of ratio 0 has the window only. The output projection is low-rank in groups of heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Self

from pydantic import NonNegativeInt, PositiveInt, model_validator

from moesim.simulator.model.attention.dsa import (
    Indexer,
    SparseCore,
    choose_keys,
    index_scores,
    sparse_backward,
    sparse_forward,
    uncounted,
)
from moesim.simulator.model.attention.protocol import Attention
from moesim.simulator.model.attention.softmax import copy, mean_keys, recomputed_attention_norm, rope
from moesim.simulator.model.operator import Operator, Work
from moesim.simulator.model.precision import BYTES_PER_ELEMENT, Precision, row_bytes
from moesim.simulator.model.primitives import (
    BF16,
    gemm,
    linear_backward,
    linear_forward,
    move,
    norm,
    norm_backward,
    recomputed,
    weight_gradient,
)
from moesim.simulator.model.recompute import CachedTensor, GemmOutput, Module, Recompute


class Compressed(Attention):
    """Sliding-window attention with compressed older keys; a file names one per `ratio` of its layers."""

    kind: Literal["compressed"] = "compressed"
    heads: PositiveInt
    head_dim: PositiveInt
    rope_dim: PositiveInt
    q_lora_rank: PositiveInt
    o_groups: PositiveInt
    """Groups of heads, each with its own projection to `o_lora_rank` elements."""
    o_lora_rank: PositiveInt
    window: PositiveInt
    """Last tokens whose keys are read without compression."""
    ratio: NonNegativeInt
    """Tokens behind one compressed key; 0 without compressed keys."""
    indexer: Indexer | None = None
    """Indexer of compressed keys; without it all of them are read."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.heads % self.o_groups:
            raise ValueError(f"o_groups={self.o_groups} does not divide heads={self.heads}")
        if self.rope_dim > self.head_dim:
            raise ValueError(f"rope_dim={self.rope_dim} is above head_dim={self.head_dim}")
        if self.indexer is not None and self.ratio == 0:
            raise ValueError("indexer: a layer with ratio=0 has no compressed keys to choose from")
        return self

    # -- counts --------------------------------------------------------------------------------------

    @property
    def _width(self) -> int:
        return self.heads * self.head_dim

    @property
    def _series(self) -> int:
        """Series of compressed keys that a token takes part in: two where windows overlap (CSA)."""
        return 2 if self.indexer is not None else 1

    @property
    def _own_indexer(self) -> Indexer | None:
        """The indexer, unless there is none or it is another layer's."""
        return None if self.indexer is None or self.indexer.shared else self.indexer

    def parameters(self, hidden: int) -> int:
        """Parameters of projections, compressor and indexer, with position biases and attention sinks."""
        query = (hidden + self._width) * self.q_lora_rank
        output = self._width * self.o_lora_rank + self.o_groups * self.o_lora_rank * hidden
        compressor = (2 * hidden + self.ratio) * self._series * self.head_dim if self.ratio else 0
        own = query + hidden * self.head_dim + output + compressor + self.heads
        return own + self.uncounted_parameters(hidden)

    def norm_parameters(self) -> int:
        """Norms of the query latent, the keys, the compressed keys and the indexer's compressed keys."""
        compressed = self.head_dim if self.ratio else 0
        index = self.indexer.head_dim if self.indexer is not None else 0
        return self.q_lora_rank + self.head_dim + compressed + index

    def uncounted_parameters(self, hidden: int) -> int:
        """Parameters of the indexer: its queries, head weights, and its own compressor of keys."""
        i = self._own_indexer
        if i is None:
            return 0
        compressor = (2 * hidden + self.ratio) * self._series * i.head_dim
        return self.q_lora_rank * i.width + hidden * i.heads + compressor

    def mean_keys(self, sequence: float) -> float:
        """Mean keys that one query reads: those of the window and the compressed ones (eq. A5)."""
        keys = mean_keys(sequence, self.window)
        if self.ratio:
            compressed = sequence / self.ratio
            chosen = compressed if self.indexer is None else self.indexer.top_k
            keys += mean_keys(compressed, chosen)
        return keys

    def flop_per_token(self, sequence: int, causal: bool) -> float:
        """Model FLOPs of the core attention over the keys that it reads, three times the forward.

        The keys are those of a causal sequence in either convention, as a choice of keys has no other.
        """
        return 3.0 * 4.0 * self._width * self.mean_keys(sequence)

    def state_bytes(self, tokens: int, element_bytes: float) -> float:
        """Bytes of the window's keys, of the compressed keys and of the indexer's compressed keys."""
        elements = min(tokens, self.window) * self.head_dim
        if self.ratio:
            index = self.indexer.head_dim if self.indexer is not None else 0
            elements += tokens // self.ratio * (self.head_dim + index)
        return elements * element_bytes

    # -- operators -----------------------------------------------------------------------------------

    def core(self, sequence: float) -> SparseCore:
        """Sizes of the core attention for one sequence length."""
        d = self.head_dim
        return SparseCore(self.heads, d, d, d, self.mean_keys(sequence), 2 * d, "compressed")

    def forward(self, w: Work) -> list[Operator]:
        """Projections, compression, the indexer's choice, core attention, grouped output projection."""
        t, h, heads, d = w.tokens, w.hidden, self.heads // w.tp, self.head_dim
        groups, rank = max(1, self.o_groups // w.tp), self.o_lora_rank
        return [
            *linear_forward(w, "q_down", t, self.q_lora_rank, h),
            *linear_forward(w, "kv_proj", t, d, h),
            norm("q_norm", "F", t, self.q_lora_rank),
            norm("kv_norm", "F", t, d),
            *self._queries(w),
            rope("rope_q", "F", t * heads * self.rope_dim),
            rope("rope_k", "F", t * self.rope_dim),
            *self._compression(w),
            *self._choice(w),
            *sparse_forward(w, self.core(w.sequence)),
            rope("rope_out", "F", t * self.heads / w.tp * self.rope_dim),
            gemm("o_down", "F", t * groups, rank, self._width // self.o_groups, "bf16", groups=groups),
            *linear_forward(w, "o_proj", t, h, groups * rank),
        ]

    def _queries(self, w: Work) -> list[Operator]:
        width = self._width // w.tp
        up = linear_forward(w, "q_up", w.tokens, width, self.q_lora_rank)
        return [*up, norm("q_head_norm", "F", w.tokens * width / self.head_dim, self.head_dim)]

    def _compression(self, w: Work) -> list[Operator]:
        """Keys and gates of every token, and their sum over the tokens of a window (not of its gradient)."""
        out: list[Operator] = []
        for name, width in self._compressors():
            linear = linear_forward(w, name, w.tokens, 2 * width, w.hidden)
            out += uncounted(linear) if name.startswith("indexer") else linear
            size = w.tokens * width * BF16
            out.append(move(f"{name}.compress", "elementwise", "F", 2 * size, size / self.ratio, launches=2))
        return out

    def _compressors(self) -> list[tuple[str, int]]:
        if not self.ratio:
            return []
        own = [("compressor", self._series * self.head_dim)]
        if self._own_indexer is not None:
            own.append(("indexer.compressor", self._series * self._own_indexer.head_dim))
        return own

    def _choice(self, w: Work) -> list[Operator]:
        i = self._own_indexer
        if i is None:
            return []
        keys = w.sequence / self.ratio / 2
        projections = [
            *linear_forward(w, "indexer.q_up", w.tokens, i.width, self.q_lora_rank),
            gemm("indexer.weights", "F", w.tokens, i.heads, w.hidden, "bf16", cls="gate_gemm"),
        ]
        return [
            *uncounted(projections),
            rope("indexer.rope", "F", w.tokens * i.heads * self.rope_dim),
            index_scores(w, "indexer.scores", i.heads, i.head_dim, keys, "fp8" if w.fp8 else "bf16"),
            choose_keys(w, keys, mean_keys(w.sequence / self.ratio, i.top_k)),
        ]

    def input_gradient(self, w: Work) -> list[Operator]:
        """Input gradients of output projection, core attention, compression and projections."""
        t, heads, d = w.tokens, self.heads // w.tp, self.head_dim
        groups, rank = max(1, self.o_groups // w.tp), self.o_lora_rank
        core, i = self.core(w.sequence), self._own_indexer
        chosen = mean_keys(w.sequence / self.ratio, i.top_k) if i else 0.0
        return [
            *linear_backward(w, "o_proj", t, w.hidden, groups * rank),
            gemm("o_down.dgrad", "I", t * groups, self._width // self.o_groups, rank, "bf16", groups=groups),
            rope("rope_out.backward", "I", t * self.heads / w.tp * self.rope_dim),
            *(recomputed(self._queries(w)) if w.repeats("mla_up_proj") else []),
            *(recomputed(sparse_forward(w, core)) if w.repeats("core_attn") else []),
            *sparse_backward(w, core),
            *([i.score_gradient(w, chosen)] if i else []),
            rope("rope_q.backward", "I", t * heads * self.rope_dim),
            rope("rope_k.backward", "I", t * self.rope_dim),
            norm_backward("q_head_norm.backward", t * heads, d),
            *linear_backward(w, "q_up", t, heads * d, self.q_lora_rank),
            norm_backward("q_norm.backward", t, self.q_lora_rank),
            norm_backward("kv_norm.backward", t, d),
            *self._compression_gradient(w),
            *recomputed_attention_norm(w),
            *linear_backward(w, "kv_proj", t, d, w.hidden),
            *linear_backward(w, "q_down", w.tokens, self.q_lora_rank, w.hidden),
            copy("hidden_gradient.join", "I", t * w.hidden, "join"),
        ]

    def _compression_gradient(self, w: Work) -> list[Operator]:
        """Gradient of the compressed keys; the indexer's inputs are detached, so it ends at its weights."""
        out: list[Operator] = []
        for name, width in self._compressors():
            size = w.tokens * width * BF16
            read = 2 * size + size / self.ratio
            out.append(move(f"{name}.compress.backward", "elementwise", "I", read, 2 * size, launches=2))
            if name == "compressor":
                out += linear_backward(w, name, w.tokens, 2 * width, w.hidden)
        return out

    def weight_gradient(self, w: Work) -> list[Operator]:
        """Weight gradients of all projections, the compressor's and the indexer's included."""
        t, groups = w.tokens, max(1, self.o_groups // w.tp)
        per_group, rank = self._width // self.o_groups, self.o_lora_rank
        out = [
            weight_gradient(w, "o_proj", t, w.hidden, groups * rank),
            gemm("o_down.wgrad", "W", rank, per_group, t * groups, "bf16", cls="wgrad_gemm", groups=groups),
            weight_gradient(w, "q_up", t, self._width // w.tp, self.q_lora_rank),
            weight_gradient(w, "kv_proj", t, self.head_dim, w.hidden),
            weight_gradient(w, "q_down", t, self.q_lora_rank, w.hidden),
        ]
        for name, width in self._compressors():
            own = [weight_gradient(w, name, t, 2 * width, w.hidden)]
            out += uncounted(own) if name.startswith("indexer") else own
        i = self._own_indexer
        if i is not None:
            out += uncounted([weight_gradient(w, "indexer.q_up", t, i.width, self.q_lora_rank), i.weights(w)])
        return out

    # -- memory --------------------------------------------------------------------------------------

    def cached_tensors(
        self, precision: Precision, policy: Recompute, unfused: bool
    ) -> Iterator[CachedTensor]:
        """Latents, queries, keys, inputs of the compressor, tensors of the indexer, output with its sums."""
        cache, up = precision.activation_cache, frozenset[Module]({"mla_up_proj"})
        yield CachedTensor("latents", row_bytes(self.q_lora_rank + self.head_dim, "bf16"), "latent", "none")
        normalised = row_bytes(self.q_lora_rank, cache)
        yield CachedTensor("normalised latent", normalised, "norm output", "none")
        yield CachedTensor("keys", row_bytes(self.head_dim, "bf16"), "kept", "none")
        queries = row_bytes(2 * self._width, "bf16")  # before and behind the norm of every head
        yield CachedTensor("queries", queries, "expanded", "width", modules=up)
        for name, width in self._compressors():
            yield CachedTensor(f"{name} inputs", row_bytes(2 * width, "bf16"), "kept", "none")
        if (i := self._own_indexer) is not None:
            yield CachedTensor("indexer queries", row_bytes(i.width + i.heads, "bf16"), "kept", "none")
            yield CachedTensor("chosen keys", i.top_k * 4.0, "kept", "none", kept_by_op=True)
        out = row_bytes(self._width, "bf16")
        yield CachedTensor("attention output", out, "kept", "width", kept_by_op=True)
        low = row_bytes(self.o_groups * self.o_lora_rank, cache)
        yield CachedTensor("low-rank output", low, "linear input", "width")
        lse = self.heads * BYTES_PER_ELEMENT["fp32"]
        core: frozenset[Module] = frozenset({"core_attn"})
        yield CachedTensor("log-sum-exp", lse, "kept", "width", kept_by_op=True, modules=core)

    def gemm_outputs(self, hidden: int) -> Iterator[GemmOutput]:
        """Outputs of the projections in the order of their calls."""
        yield GemmOutput("q_down", self.q_lora_rank, "none")
        yield GemmOutput("kv_proj", self.head_dim, "none")
        yield GemmOutput("q_up", self._width, "width")
        for name, width in self._compressors():
            yield GemmOutput(name, 2 * width, "none")
        if self._own_indexer is not None:
            yield GemmOutput("indexer.q_up", self._own_indexer.width, "none")
        yield GemmOutput("o_down", self.o_groups * self.o_lora_rank, "width")
        yield GemmOutput("o_proj", hidden, "tokens")

    @property
    def modules(self) -> frozenset[Module]:
        """The core attention, and the up-projection of the queries."""
        return frozenset({"core_attn", "mla_up_proj"})

    @property
    def context_modules(self) -> frozenset[Module]:
        """The core attention, which reads keys of other ranks."""
        return frozenset({"core_attn"})

    # -- parallelism ---------------------------------------------------------------------------------

    def tp_limits(self, tp: int) -> tuple[tuple[int, str], ...]:
        """Limits of heads and of the groups of the output projection."""
        heads = (self.heads, f"attention heads={self.heads}")
        return (heads, (self.o_groups, f"o_groups={self.o_groups}"))

    def context_elements(self, sequence: int) -> float:
        """Elements of the compressed keys per token; the window comes from the neighbouring rank only."""
        window = min(1.0, self.window / sequence) * self.head_dim
        if not self.ratio:
            return window
        index = self.indexer.head_dim if self.indexer is not None else 0
        return window + (self.head_dim + index) / self.ratio
