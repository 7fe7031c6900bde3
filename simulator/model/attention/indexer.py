"""The indexer of sparse attention, which scores all causal keys in few narrow heads and chooses some of them.

DeepSeek-V3.2 report (arXiv 2512.02556), section 2.1: queries come from the latent of the attention's queries,
one key of `head_dim` elements and one weight per indexer head come from the hidden states.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import PositiveInt

from moesim.simulator.model.attention.projections import rope
from moesim.simulator.model.attention.sparse_core import choose_keys, index_scores, mean_keys, uncounted
from moesim.simulator.model.cached import CachedTensor
from moesim.simulator.model.operator import Operator
from moesim.simulator.model.part import ModelPart
from moesim.simulator.model.precision import row_bytes
from moesim.simulator.model.primitives import cast, gemm, linear_forward, norm, weight_gradient
from moesim.simulator.model.work import Work


class Indexer(ModelPart):
    """Sizes of an indexer and the number of keys that it keeps for one query."""

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
        if self.shared:
            return []
        keys = mean_keys(w.sequence, self.top_k)
        return [
            index_scores(w, "indexer.scores.backward", self.heads, self.head_dim, keys, "bf16", backward=True)
        ]

    def weight_gradient(self, w: Work, query_in: int) -> list[Operator]:
        """Weight gradients of its three projections."""
        if self.shared:
            return []
        t = w.tokens
        return uncounted(
            [
                weight_gradient(w, "indexer.q_up", t, self.width, query_in),
                weight_gradient(w, "indexer.key", t, self.head_dim, w.hidden),
                gemm("indexer.weights.wgrad", "W", self.heads, w.hidden, t, "bf16", cls="wgrad_gemm"),
            ]
        )

    def cached(self) -> Iterator[CachedTensor]:
        """Queries, key and head weights in BF16, and the positions of the chosen keys."""
        if not self.shared:
            elements = self.width + self.head_dim + self.heads
            yield CachedTensor("indexer queries and key", row_bytes(elements, "bf16"), "kept", "none")
        yield CachedTensor("chosen keys", 4.0 * self.top_k, "kept", "none", kept_by_op=True)
