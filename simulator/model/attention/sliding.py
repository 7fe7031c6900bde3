"""Grouped-query attention over a sliding window: a query attends to the last tokens (arXiv 2004.05150)."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from moesim.simulator.model.attention.grouped_query import GroupedQueryAttention
from moesim.simulator.model.attention.reach import Reach


class SlidingAttention(GroupedQueryAttention):
    """Grouped-query attention whose queries attend to the last `window` tokens, their own included."""

    kind: Literal["sliding"] = "sliding"
    window: PositiveInt

    @property
    def reach(self) -> Reach:
        """The last `window` tokens."""
        return Reach("window", self.window)
