"""Block-sparse grouped-query attention: an indexer chooses blocks of keys for every query (MiniMax-M3)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import PositiveInt

from moesim.simulator.model.attention.grouped_query import GQA
from moesim.simulator.model.attention.softmax import (
    Reach,
    rope,
)
from moesim.simulator.model.attention.sparse_core import (
    SparseCore,
    choose_keys,
    index_scores,
    sparse_backward,
    sparse_forward,
    uncounted,
)
from moesim.simulator.model.operator import Operator, Work
from moesim.simulator.model.precision import Precision, row_bytes
from moesim.simulator.model.primitives import linear_forward, norm, recomputed, weight_gradient
from moesim.simulator.model.recompute import CachedTensor, GemmOutput, Recompute


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
