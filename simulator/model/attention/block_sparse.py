"""Block-sparse grouped-query attention: an indexer chooses blocks of keys for every query (MiniMax-M3)."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from moesim.simulator.model.attention.gqa import GQA


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
    def top_k(self) -> int:
        """Keys that one query reads at most."""
        return self.block * self.top_k_blocks

    def uncounted_parameters(self, hidden: int) -> int:
        """Query and key projection of the indexer."""
        return hidden * (self.index_heads + 1) * self.index_dim

    def parameters(self, hidden: int) -> int:
        """Parameters of grouped-query attention and of the indexer."""
        return super().parameters(hidden) + self.uncounted_parameters(hidden)

    def norm_parameters(self) -> int:
        """Norms of queries and keys, and those of the indexer's query and key."""
        return super().norm_parameters() + 2 * self.index_dim
