"""Gated delta rules: the gated delta net (arXiv 2412.06464) and Kimi delta attention (arXiv 2510.26692)."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import PositiveInt, model_validator

from moesim.simulator.model.attention.recurrent import (
    ConvolvedMixer,
    Projection,
    Saved,
    Scan,
    delta_rule_scan,
)
from moesim.simulator.model.primitives import BF16, FP32

# -- gated delta -------------------------------------------------------------------------------------
# Gated delta net of Qwen3-Next and Qwen3.5: linear attention with a gated delta rule (arXiv 2412.06464).


class GatedDelta(ConvolvedMixer):
    """Gated delta net; every key head serves the value heads of its group."""

    kind: Literal["gated_delta"] = "gated_delta"
    key_heads: PositiveInt
    value_heads: PositiveInt
    key_dim: PositiveInt
    """Elements of one head's query or key."""
    value_dim: PositiveInt
    """Elements of one head's value."""

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.value_heads % self.key_heads:
            raise ValueError(f"key_heads={self.key_heads} does not divide value_heads={self.value_heads}")
        return self

    @property
    def width(self) -> int:
        """Elements of all value heads."""
        return self.value_heads * self.value_dim

    @property
    def convolved(self) -> int:
        """Queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.width

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Queries, keys, values and output gate in one GEMM; learning rate and decay per head in another."""
        return (
            Projection("qkvz_proj", self.convolved + self.width),
            Projection("ba_proj", 2 * self.value_heads),
        )

    @property
    def vectors(self) -> int:
        """A decay and a step bias per value head, and the weight of the gated norm, which heads share."""
        return 2 * self.value_heads + self.value_dim

    @property
    def scan(self) -> Scan:
        """The gated delta rule, whose gates are one number per value head."""
        return delta_rule_scan(
            self.kind,
            heads=self.value_heads,
            key_heads=self.key_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            gates=self.value_heads,
        )

    def saved_by_scan(self) -> tuple[Saved, ...]:
        """Tensors of `save_for_backward` in fla-core 0.6.0, `fla/ops/gated_delta_rule/chunk.py`."""
        keys, heads = self.key_heads * self.key_dim, self.value_heads
        return (
            Saved("q, k, v", (2 * keys + self.width) * BF16),
            Saved("decay and learning rate", 2 * heads * BF16),
            Saved("norms of q and k", 2 * self.key_heads * FP32, inside_scan=True),
            Saved("summed decays and rates", 2 * heads * FP32, inside_scan=True),
            Saved("inverse in each chunk", heads * self.scan.chunk * BF16, inside_scan=True),
        )

    @property
    def tp_heads(self) -> tuple[tuple[int, str], ...]:
        """Key heads and value heads."""
        return (
            (self.key_heads, f"key_heads={self.key_heads}"),
            (self.value_heads, f"value_heads={self.value_heads}"),
        )


# -- kda ---------------------------------------------------------------------------------------------
# Kimi delta attention: a gated delta rule with a decay per channel (arXiv 2510.26692).


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
