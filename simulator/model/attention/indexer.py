"""The indexer of sparse attention, which scores all causal keys in few narrow heads and chooses some of them.

DeepSeek-V3.2 report (arXiv 2512.02556), section 2.1: queries come from the latent of the attention's queries,
one key of `head_dim` elements and one weight per indexer head come from the hidden states.
"""

from __future__ import annotations

from pydantic import PositiveInt

from moesim.simulator.model.part import ModelPart


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
