"""Lightning attention: linear attention with a fixed decay per head (arXiv 2401.04658, 2501.08313)."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import PositiveInt, model_validator

from moesim.simulator.model.attention.recurrent import MixerParts, Projection, RecurrentMixer, Saved, Scan
from moesim.simulator.model.operator import Operator, Work
from moesim.simulator.model.primitives import BF16, move, norm, norm_backward

KERNEL_CHUNK = 64
"""Tokens of a chunk in the kernels that were measured (fla-core 0.6.0, `chunk_simple_gla`)."""


class Lightning(RecurrentMixer):
    """Lightning attention with a norm over all heads and an output gate, as in MiniMax-Text-01 and M1."""

    kind: Literal["lightning"] = "lightning"
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    chunk: PositiveInt = 256
    """Block of the published code, for other programs; prices are those of kernels with chunks of 64."""
    output_gate: bool = True
    qk_norm: bool = False
    """Norms of queries and keys, with one weight per element of a head (Ling 2.5)."""

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} does not divide heads={self.heads}")
        return self

    @property
    def _activated(self) -> int:
        """Queries, keys and values, which have an activation."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def preparation(self, w: Work) -> list[Operator]:
        """Activation of queries, keys and values, after any norm of queries and keys."""
        values = w.tokens * self._activated / w.tp
        rows = w.tokens * (self.heads + self.kv_heads) / w.tp
        norms = [norm("qk_norm", "F", rows, self.head_dim)] if self.qk_norm else []
        size = values * BF16
        return [*norms, move("qkv_activation", "elementwise", "F", size, size, variant="scale")]

    def preparation_gradient(self, w: Work) -> list[Operator]:
        """Gradients of the activation and the norms."""
        size = w.tokens * self._activated / w.tp * BF16
        rows = w.tokens * (self.heads + self.kv_heads) / w.tp
        out = [move("qkv_activation.backward", "elementwise", "I", 2.0 * size, size, variant="add")]
        return [*out, norm_backward("qk_norm.backward", rows, self.head_dim)] if self.qk_norm else out

    @property
    def scan(self) -> Scan:
        """The chunked linear attention (eq. C23), with C tokens a chunk.

        Scores within a chunk and their product with the values, C d each; the state's update and use, d^2
        each: all times 2. The backward computes the states again.
        """
        state = self.head_dim * self.head_dim
        inside = KERNEL_CHUNK * self.head_dim
        return Scan(
            variant=self.kind,
            heads=self.heads,
            flop=4.0 * self.heads * (inside + state),
            repeated_flop=2.0 * self.heads * state,
            inputs=self._activated,
            outputs=self.heads * self.head_dim,
            state_elements=self.heads * state,
            chunk=KERNEL_CHUNK,
        )

    @property
    def parts(self) -> MixerParts:
        """Queries, keys and values in one GEMM, then the output gate.

        The backward keeps the inputs of the activation, then what `fla/ops/simple_gla/chunk.py` of fla-core
        0.6.0 saves.
        """
        width, size = self.heads * self.head_dim, self._activated * BF16
        keys = (self.heads + self.kv_heads) * self.head_dim * self.qk_norm * BF16
        gate = (Projection("gate_proj", width),) if self.output_gate else ()
        return MixerParts(
            projections=(Projection("qkv_proj", self._activated), *gate),
            width=width,
            gate_width=width if self.output_gate else 0,
            # The weight of the norm behind the scan, and those of queries and keys.
            vectors=width + 2 * self.head_dim * self.qk_norm,
            heads=((self.heads, f"heads={self.heads}"), (self.kv_heads, f"kv_heads={self.kv_heads}")),
            saved=(Saved("inputs of activation and norms", size + keys), Saved("q, k, v", size)),
        )
