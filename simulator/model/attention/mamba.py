"""Mamba: a selective state-space model that scans token by token (arXiv 2312.00752), as in Jamba."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from moesim.simulator.model.attention.convolved import StateSpaceMixer
from moesim.simulator.model.attention.recurrent import Projection, Saved
from moesim.simulator.model.attention.scan import Scan
from moesim.simulator.model.operator import Operator
from moesim.simulator.model.primitives import BF16, FP32, norm, norm_backward
from moesim.simulator.model.work import Work

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
