"""Gated delta net of Qwen3-Next and Qwen3.5: linear attention with a gated delta rule (arXiv 2412.06464)."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import PositiveInt, model_validator

from moesim.simulator.model.attention.convolved import ConvolvedMixer
from moesim.simulator.model.attention.delta_rule import delta_rule_scan
from moesim.simulator.model.attention.recurrent import Projection, Saved
from moesim.simulator.model.attention.scan import Scan
from moesim.simulator.model.primitives import BF16, FP32


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
