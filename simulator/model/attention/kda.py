"""Kimi delta attention: a gated delta rule with a decay per channel (arXiv 2510.26692)."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from moesim.simulator.model.attention.convolved import ConvolvedMixer
from moesim.simulator.model.attention.delta_rule import delta_rule_scan
from moesim.simulator.model.attention.recurrent import Projection, Saved
from moesim.simulator.model.attention.scan import Scan
from moesim.simulator.model.primitives import BF16, FP32


class KDA(ConvolvedMixer):
    """Kimi delta attention; its gates go through a projection as narrow as one head, or are of full rank."""

    kind: Literal["kda"] = "kda"
    heads: PositiveInt
    head_dim: PositiveInt
    full_rank_gate: bool = False
    """Whether the output gate is one full projection (Kimi K3) instead of two narrow ones."""
    full_rank_decay: bool = False
    """Whether the decay is one full projection (Ling 3.0) instead of two narrow ones."""

    @property
    def width(self) -> int:
        """Elements of all heads."""
        return self.heads * self.head_dim

    @property
    def convolved(self) -> int:
        """Queries, keys and values."""
        return 3 * self.width

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Queries, keys and values; then decay, learning rate and output gate."""
        return (
            Projection("qkv_proj", 3 * self.width),
            *self._gate("decay", self.full_rank_decay),
            Projection("beta_proj", self.heads),
            *self._gate("gate", self.full_rank_gate),
        )

    def _gate(self, name: str, full_rank: bool) -> tuple[Projection, ...]:
        if full_rank:
            return (Projection(f"{name}_proj", self.width),)
        return (
            Projection(f"{name}_down", self.head_dim, sharding="none"),
            Projection(f"{name}_up", self.width, self.head_dim),
        )

    @property
    def vectors(self) -> int:
        """A decay per head, a step bias per channel, and the weight of the gated norm, which heads share."""
        return self.heads + self.width + self.head_dim

    @property
    def scan(self) -> Scan:
        """The gated delta rule with a decay per channel of a key."""
        return delta_rule_scan(
            self.kind,
            heads=self.heads,
            key_heads=self.heads,
            key_dim=self.head_dim,
            value_dim=self.head_dim,
            gates=self.width,
        )

    def saved_by_scan(self) -> tuple[Saved, ...]:
        """Tensors of `save_for_backward` in fla-core 0.6.0, `fla/ops/kda/chunk.py`."""
        chunk = self.scan.chunk
        return (
            Saved("q, k, v", 3 * self.width * BF16),
            Saved("decay and learning rate", (self.width + self.heads) * BF16),
            Saved("norms of q and k", 2 * self.heads * FP32, inside_scan=True),
            Saved("learning rate after its sigmoid", self.heads * FP32, inside_scan=True),
            Saved("scores and inverse in each chunk", 2 * self.heads * chunk * BF16, inside_scan=True),
        )

    @property
    def tp_heads(self) -> tuple[tuple[int, str], ...]:
        """Heads."""
        return ((self.heads, f"heads={self.heads}"),)
