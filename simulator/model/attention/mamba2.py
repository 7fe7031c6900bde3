"""Mamba-2: a state-space model whose scan is a chunked semiseparable product (arXiv 2405.21060)."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import PositiveInt, model_validator

from moesim.simulator.model.attention.convolved import StateSpaceMixer
from moesim.simulator.model.attention.recurrent import Projection, Saved
from moesim.simulator.model.attention.scan import Scan
from moesim.simulator.model.primitives import BF16, FP32


class Mamba2(StateSpaceMixer):
    """Mamba-2 mixer with a gated norm per group, as in Nemotron-H and Nemotron 3."""

    kind: Literal["mamba2"] = "mamba2"
    heads: PositiveInt
    head_dim: PositiveInt
    groups: PositiveInt
    """Groups of heads that share an input and an output matrix, B and C."""
    state: PositiveInt
    """Elements of the state for each element of a head."""
    chunk: PositiveInt = 128
    """Tokens of a chunk."""

    @model_validator(mode="after")
    def _groups_divide(self) -> Self:
        if self.heads % self.groups:
            raise ValueError(f"groups={self.groups} does not divide heads={self.heads}")
        return self

    @property
    def width(self) -> int:
        """Elements of all heads."""
        return self.heads * self.head_dim

    @property
    def _matrices(self) -> int:
        return 2 * self.groups * self.state

    @property
    def convolved(self) -> int:
        """Inputs of the heads, and B and C of every group."""
        return self.width + self._matrices

    @property
    def convolution_again(self) -> bool:
        """True: the fused function of mamba-ssm saves its input only."""
        return True

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Gate, inputs, B, C and step sizes in one GEMM."""
        width = self.width + self.convolved + self.heads
        return (Projection("in_proj", width, bias=self.proj_bias),)

    @property
    def vectors(self) -> int:
        """A decay, a step bias and a skip per head, and the weight of the gated norm."""
        return 3 * self.heads + self.width

    @property
    def scan(self) -> Scan:
        """The chunked scan (eq. C23): arXiv 2405.21060, section 6, with Q tokens a chunk.

        C B^T within a chunk for every group, Q N; these scores times the inputs of a head, Q P; the state of
        a chunk and its use in the next, N P each: all times 2. The backward computes C B^T and the states
        again.
        """
        scores = 2.0 * self.groups * self.chunk * self.state
        states = 2.0 * self.heads * self.state * self.head_dim
        return Scan(
            variant=self.kind,
            heads=self.heads,
            flop=scores + 2.0 * self.heads * self.chunk * self.head_dim + 2.0 * states,
            repeated_flop=scores + states,
            inputs=self.convolved + self.heads,
            outputs=self.width,
            state_elements=self.heads * self.head_dim * self.state,
            chunk=self.chunk,
        )

    def saved_by_scan(self) -> tuple[Saved, ...]:
        """Tensors of `save_for_backward` of `mamba_split_conv1d_scan_combined` in mamba-ssm 2.3.2."""
        return (Saved("step sizes", self.heads * BF16), Saved("norm", self.groups * FP32))

    @property
    def tp_heads(self) -> tuple[tuple[int, str], ...]:
        """Heads and groups."""
        return ((self.heads, f"heads={self.heads}"), (self.groups, f"groups={self.groups}"))
