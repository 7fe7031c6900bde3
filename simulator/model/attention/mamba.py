"""Mamba and Mamba-2: state-space models that scan by token or in chunks (arXiv 2312.00752, 2405.21060)."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import PositiveInt, model_validator

from moesim.simulator.model.attention.recurrent import Projection, Saved, Scan, StateSpaceMixer
from moesim.simulator.model.operator import Operator, Work
from moesim.simulator.model.primitives import BF16, FP32, norm, norm_backward

# -- mamba -------------------------------------------------------------------------------------------
# Mamba: a selective state-space model that scans token by token (arXiv 2312.00752), as in Jamba.

FLOP_PER_STATE = 7.0
"""FLOPs per element of the state and token: step times decay, its exponential, step times input matrix, and
multiply-adds of state and output (arXiv 2312.00752, algorithm 2)."""
SAVED_CHUNK = 2048
"""Tokens after which the kernel of mamba-ssm writes its state for the backward."""


class Mamba(StateSpaceMixer):
    """Mamba-1 mixer; `inner_norms` are Jamba's norms of step size, B and C."""

    kind: Literal["mamba"] = "mamba"
    inner: PositiveInt
    """Channels, which Jamba gives as `mamba_expand` times the hidden size."""
    state: PositiveInt
    dt_rank: PositiveInt
    inner_norms: bool = False

    @property
    def width(self) -> int:
        """`inner`."""
        return self.inner

    @property
    def convolved(self) -> int:
        """`inner`."""
        return self.inner

    @property
    def normalised(self) -> bool:
        """False: a gate but no norm behind the scan, and the kernel of the scan applies it."""
        return False

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Input and gate, then step size, B and C from the convolution, then the step's expansion."""
        narrow = self.dt_rank + 2 * self.state
        return (
            Projection("in_proj", 2 * self.inner, bias=self.proj_bias),
            Projection("x_proj", narrow, self.inner, "inputs"),
            Projection("dt_proj", self.inner, self.dt_rank, bias=True),
        )

    def preparation(self, w: Work) -> list[Operator]:
        """Jamba's norms of step size, B and C."""
        narrow = self.dt_rank + 2 * self.state
        return [norm("inner_norms", "F", w.tokens, narrow)] if self.inner_norms else []

    def preparation_gradient(self, w: Work) -> list[Operator]:
        """Gradients of these norms."""
        narrow = self.dt_rank + 2 * self.state
        return [norm_backward("inner_norms.backward", w.tokens, narrow)] if self.inner_norms else []

    @property
    def vectors(self) -> int:
        """A decay per channel and element of its state, a skip per channel, and the inner norms."""
        norms = self.dt_rank + 2 * self.state if self.inner_norms else 0
        return self.inner * self.state + self.inner + norms

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

    def saved_by_scan(self) -> tuple[Saved, ...]:
        """Tensors of `save_for_backward` of `SelectiveScanFn` in mamba-ssm 2.3.2."""
        states = self.inner * self.state / SAVED_CHUNK * 2 * FP32
        return (
            Saved("inputs and step sizes", 2 * self.inner * BF16),
            Saved("B and C", 2 * self.state * BF16),
            Saved("states of chunks", states, inside_scan=True),
        )

    @property
    def tp_heads(self) -> tuple[tuple[int, str], ...]:
        """Channels."""
        return ((self.inner, f"inner={self.inner}"),)


# -- mamba2 ------------------------------------------------------------------------------------------
# Mamba-2: a state-space model whose scan is a chunked semiseparable product (arXiv 2405.21060).


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
