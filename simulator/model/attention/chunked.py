"""Grouped-query attention inside chunks of the sequence, as Llama 4's layers with rotary positions have."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from moesim.simulator.model.attention.grouped_query import GroupedQueryAttention
from moesim.simulator.model.attention.reach import Reach


class ChunkedAttention(GroupedQueryAttention):
    """Grouped-query attention whose queries attend to earlier tokens of their own chunk only."""

    kind: Literal["chunked"] = "chunked"
    chunk: PositiveInt
    """Tokens of one chunk; the sequence is cut at its multiples."""

    @property
    def reach(self) -> Reach:
        """The tokens of the query's chunk."""
        return Reach("chunk", self.chunk)
