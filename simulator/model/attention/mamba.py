"""Mamba and Mamba-2: state-space models that scan by token or in chunks (arXiv 2312.00752, 2405.21060)."""

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
from moesim.simulator.model.operator import Operator, Work
from moesim.simulator.model.primitives import BF16, FP32, norm, norm_backward

FLOP_PER_STATE = 7.0
"""FLOPs per element of the state and token: step times decay, its exponential, step times input matrix, and
multiply-adds of state and output (arXiv 2312.00752, algorithm 2)."""
SAVED_CHUNK = 2048
"""Tokens after which the kernel of mamba-ssm writes its state for the backward."""


class StateSpaceMixer(RecurrentMixer):
    """What Mamba and Mamba-2 share: the convolution, and biases of it and of the projections."""

    conv: PositiveInt = 4
    """Tokens that the short convolution reads."""
    conv_bias: bool = True
    proj_bias: bool = False
    """Biases of the input and the output projection."""


class Mamba(StateSpaceMixer):
    """Mamba-1 mixer; `inner_norms` are Jamba's norms of step size, B and C."""

    kind: Literal["mamba"] = "mamba"
    inner: PositiveInt
    """Channels, which Jamba gives as `mamba_expand` times the hidden size."""
    state: PositiveInt
    dt_rank: PositiveInt
    inner_norms: bool = False

    def preparation(self, w: Work) -> list[Operator]:
        """Jamba's norms of step size, B and C."""
        narrow = self.dt_rank + 2 * self.state
        return [norm("inner_norms", "F", w.tokens, narrow)] if self.inner_norms else []

    def preparation_gradient(self, w: Work) -> list[Operator]:
        """Gradients of these norms."""
        narrow = self.dt_rank + 2 * self.state
        return [norm_backward("inner_norms.backward", w.tokens, narrow)] if self.inner_norms else []

    @property
    def scan(self) -> Scan:
        """The selective scan by token (eq. C23), which keeps the state on the chip."""
        return Scan(
            variant=self.kind,
            heads=self.inner,
            flop=FLOP_PER_STATE * self.inner * self.state,
            repeated_flop=5.0 * self.inner * self.state,
            inputs=3 * self.inner + 2 * self.state,
            outputs=self.inner,
            state_elements=self.inner * self.state,
            chunk=1,
        )

    @property
    def parts(self) -> MixerParts:
        """Input and gate, then step size, B and C from the convolution, then the step's expansion.

        Tensors of `save_for_backward` of `SelectiveScanFn` in mamba-ssm 2.3.2; the kernel of the scan applies
        the gate, and no norm is behind it.
        """
        inner, state, narrow = self.inner, self.state, self.dt_rank + 2 * self.state
        return MixerParts(
            projections=(
                Projection("in_proj", 2 * inner, bias=self.proj_bias),
                Projection("x_proj", narrow, inner, "inputs"),
                Projection("dt_proj", inner, self.dt_rank, bias=True),
            ),
            width=inner,
            gate_width=inner,
            # A decay per channel and element of its state, a skip per channel, and the inner norms.
            vectors=inner * state + inner + narrow * self.inner_norms,
            heads=((inner, f"inner={inner}"),),
            saved=(
                Saved("inputs and step sizes", 2 * inner * BF16),
                Saved("B and C", 2 * state * BF16),
                Saved("states of chunks", inner * state / SAVED_CHUNK * 2 * FP32, inside_scan=True),
            ),
            convolution=Convolution(inner, self.conv, self.conv_bias),
            normalised=False,
            output_bias=self.proj_bias,
        )


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
    def _convolved(self) -> int:
        """Inputs of the heads, and B and C of every group."""
        return self.heads * self.head_dim + 2 * self.groups * self.state

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
            inputs=self._convolved + self.heads,
            outputs=self.heads * self.head_dim,
            state_elements=self.heads * self.head_dim * self.state,
            chunk=self.chunk,
        )

    @property
    def parts(self) -> MixerParts:
        """Gate, inputs, B, C and step sizes in one GEMM.

        Tensors of `save_for_backward` of `mamba_split_conv1d_scan_combined` in mamba-ssm 2.3.2, a fused
        function that saves the convolution's input only.
        """
        heads, width, convolved = self.heads, self.heads * self.head_dim, self._convolved
        return MixerParts(
            projections=(Projection("in_proj", width + convolved + heads, bias=self.proj_bias),),
            width=width,
            gate_width=width,
            # A decay, a step bias and a skip per head, and the weight of the gated norm.
            vectors=3 * heads + width,
            heads=((heads, f"heads={heads}"), (self.groups, f"groups={self.groups}")),
            saved=(Saved("step sizes", heads * BF16), Saved("norm", self.groups * FP32)),
            convolution=Convolution(convolved, self.conv, self.conv_bias, again=True),
            output_bias=self.proj_bias,
        )
