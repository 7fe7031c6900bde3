"""Gated delta rules: the gated delta net (arXiv 2412.06464) and Kimi delta attention (arXiv 2510.26692)."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import PositiveInt, model_validator

from moesim.simulator.model.attention.recurrent import (
    Convolution,
    MixerParts,
    Projection,
    RecurrentMixer,
    Saved,
    Scan,
)
from moesim.simulator.model.primitives import BF16, FP32

CHUNK = 64
"""Tokens of a chunk in the kernels of flash-linear-attention (`chunk_size` of fla-core 0.6.0)."""


def delta_rule_scan(
    variant: str, *, heads: int, key_heads: int, key_dim: int, value_dim: int, gates: int
) -> Scan:
    """Scan of a gated delta rule (eq. C22): the WY form of arXiv 2412.06464, section 3.3, in chunks of 64.

    Per token and head, with C tokens a chunk: scores of keys with keys and of queries with keys, C d_k each;
    the inverse of a unit triangle, C^2 / 6; the two products with it, C (d_k + d_v); the scores times the new
    values, C d_v; the state read twice and updated once, d_k d_v each: all times 2. The backward computes the
    products with the inverse and the states again. `gates` counts the decays of one token.
    """
    square, state = CHUNK * CHUNK / 6.0, key_dim * value_dim
    inverse = CHUNK * (key_dim + value_dim)
    products = CHUNK * (2 * key_dim + value_dim) + inverse + square + 3 * state
    return Scan(
        variant=variant,
        heads=heads,
        flop=2.0 * heads * products,
        repeated_flop=2.0 * heads * (inverse + 2 * state),
        inputs=2 * key_heads * key_dim + heads * value_dim + gates + heads,
        outputs=heads * value_dim,
        state_elements=heads * state,
        chunk=CHUNK,
        transition_elements=heads * key_dim * key_dim,
    )


class GatedDelta(RecurrentMixer):
    """Gated delta net; every key head serves the value heads of its group."""

    kind: Literal["gated_delta"] = "gated_delta"
    conv: PositiveInt = 4
    """Tokens that the short convolution reads."""
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

    @property
    def parts(self) -> MixerParts:
        """Queries, keys, values and gate in one GEMM; learning rate and decay per head in another.

        Tensors of `save_for_backward` in fla-core 0.6.0, `fla/ops/gated_delta_rule/chunk.py`.
        """
        heads, keys, width = (
            self.value_heads,
            self.key_heads * self.key_dim,
            self.value_heads * self.value_dim,
        )
        return MixerParts(
            projections=(Projection("qkvz_proj", 2 * keys + 2 * width), Projection("ba_proj", 2 * heads)),
            width=width,
            gate_width=width,
            # A decay and a step bias per value head, and the weight of the gated norm, which heads share.
            vectors=2 * heads + self.value_dim,
            heads=((self.key_heads, f"key_heads={self.key_heads}"), (heads, f"value_heads={heads}")),
            saved=(
                Saved("q, k, v", (2 * keys + width) * BF16),
                Saved("decay and learning rate", 2 * heads * BF16),
                Saved("norms of q and k", 2 * self.key_heads * FP32, inside_scan=True),
                Saved("summed decays and rates", 2 * heads * FP32, inside_scan=True),
                Saved("inverse in each chunk", heads * CHUNK * BF16, inside_scan=True),
            ),
            convolution=Convolution(2 * keys + width, self.conv),
        )


class KDA(RecurrentMixer):
    """Kimi delta attention; its gates go through a projection as narrow as one head, or are of full rank."""

    kind: Literal["kda"] = "kda"
    conv: PositiveInt = 4
    """Tokens that the short convolution reads."""
    heads: PositiveInt
    head_dim: PositiveInt
    full_rank_gate: bool = False
    """Whether the output gate is one full projection (Kimi K3) instead of two narrow ones."""
    full_rank_decay: bool = False
    """Whether the decay is one full projection (Ling 3.0) instead of two narrow ones."""

    @property
    def scan(self) -> Scan:
        """The gated delta rule with a decay per channel of a key."""
        return delta_rule_scan(
            self.kind,
            heads=self.heads,
            key_heads=self.heads,
            key_dim=self.head_dim,
            value_dim=self.head_dim,
            gates=self.heads * self.head_dim,
        )

    @property
    def parts(self) -> MixerParts:
        """Queries, keys and values; then decay, learning rate and output gate.

        Tensors of `save_for_backward` in fla-core 0.6.0, `fla/ops/kda/chunk.py`.
        """
        heads, width = self.heads, self.heads * self.head_dim
        return MixerParts(
            projections=(
                Projection("qkv_proj", 3 * width),
                *self._gate("decay", self.full_rank_decay),
                Projection("beta_proj", heads),
                *self._gate("gate", self.full_rank_gate),
            ),
            width=width,
            gate_width=width,
            # A decay per head, a step bias per channel, and the weight of the gated norm, which heads share.
            vectors=heads + width + self.head_dim,
            heads=((heads, f"heads={heads}"),),
            saved=(
                Saved("q, k, v", 3 * width * BF16),
                Saved("decay and learning rate", (width + heads) * BF16),
                Saved("norms of q and k", 2 * heads * FP32, inside_scan=True),
                Saved("learning rate after its sigmoid", heads * FP32, inside_scan=True),
                Saved("scores and inverse in each chunk", 2 * heads * CHUNK * BF16, inside_scan=True),
            ),
            convolution=Convolution(3 * width, self.conv),
        )

    def _gate(self, name: str, full_rank: bool) -> tuple[Projection, ...]:
        width = self.heads * self.head_dim
        if full_rank:
            return (Projection(f"{name}_proj", width),)
        narrow = Projection(f"{name}_down", self.head_dim, sharding="none")
        return narrow, Projection(f"{name}_up", width, self.head_dim)
