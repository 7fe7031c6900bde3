"""DeepSeek sparse attention: latent attention over the keys that an indexer chooses (arXiv 2512.02556)."""

from __future__ import annotations

from typing import Literal

from moesim.simulator.model.attention.indexer import Indexer
from moesim.simulator.model.attention.mla import MLA


class DSA(MLA):
    """Multi-head latent attention in which every query reads `indexer.top_k` keys (DeepSeek-V3.2, GLM-5)."""

    kind: Literal["dsa"] = "dsa"  # type: ignore[assignment]
    indexer: Indexer

    def parameters(self, hidden: int) -> int:
        """Parameters of the latent attention and of the indexer."""
        return super().parameters(hidden) + self.uncounted_parameters(hidden)

    def uncounted_parameters(self, hidden: int) -> int:
        """Parameters of the indexer, whose work published FLOP counts leave out."""
        query_in = hidden if self.q_lora_rank is None else self.q_lora_rank
        return self.indexer.parameters(hidden, query_in)

    def state_bytes(self, tokens: int, element_bytes: float) -> float:
        """Bytes of every token's latent, rotated key and indexer key."""
        index = 0 if self.indexer.shared else self.indexer.head_dim
        return super().state_bytes(tokens, element_bytes) + index * tokens * element_bytes
