"""Operators of recurrent mixers: the scan over the sequence, the short convolution and the gated norm."""

from __future__ import annotations

from typing import NamedTuple

from moesim.simulator.model.operator import GemmShape, Operator
from moesim.simulator.model.primitives import BF16, move
from moesim.simulator.model.work import Work


class Scan(NamedTuple):
    """A scan over all heads of a layer, per token; chunked algorithms turn most of it into GEMMs."""

    variant: str
    """Name of the kernels in calibration profiles, which is the kind of mixer."""
    heads: int
    """Heads that the kernels run side by side."""
    flop: float
    """FLOPs of the forward."""
    repeated_flop: float
    """FLOPs of the forward that the backward computes again instead of reading."""
    inputs: float
    """Elements in 16 bits that the forward reads."""
    outputs: float
    """Elements in 16 bits that it writes."""
    state_elements: int
    """Elements of the state, over all heads."""
    chunk: int
    """Tokens of a chunk; 1 for a scan by token."""
    transition_elements: int = 0
    """Elements of the matrices that take the state of the tokens before to that behind them; 0 for decays."""

    @property
    def read_bytes(self) -> float:
        """Bytes that the forward reads per token, with the state of every chunk that it writes and reads."""
        return self.inputs * BF16 + self._state_bytes

    @property
    def written_bytes(self) -> float:
        """Bytes that the forward writes per token."""
        return self.outputs * BF16 + self._state_bytes

    @property
    def carried_elements(self) -> int:
        """Elements that a context-parallel rank hands on for one sequence."""
        return self.state_elements + self.transition_elements

    @property
    def _state_bytes(self) -> float:
        return self.state_elements / self.chunk * BF16 if self.chunk > 1 else 0.0


def _streams(w: Work, scan: Scan) -> int:
    """Heads of all sequences on this GPU, which the kernels run side by side."""
    return max(1, round(max(1.0, w.tokens / w.sequence) * scan.heads / w.tp))


def scan_forward(w: Work, scan: Scan) -> Operator:
    """The scan of one micro-batch (eq. C21); its rate depends on the heads side by side (eq. C24)."""
    tokens = w.tokens / w.tp
    return Operator(
        "scan",
        "scan_forward",
        "F",
        "bf16",
        flop=tokens * scan.flop,
        bytes_read=tokens * scan.read_bytes,
        bytes_written=tokens * scan.written_bytes,
        gemm=GemmShape(w.tokens, scan.chunk, scan.chunk, _streams(w, scan)),
        variant=scan.variant,
    )


def scan_backward(w: Work, scan: Scan) -> Operator:
    """Input gradients of the scan: twice its FLOPs, and what it computes again.

    It reads inputs, output gradients and states, and writes a gradient for every input.
    """
    tokens = w.tokens / w.tp
    gradients = scan.inputs * BF16
    return Operator(
        "scan.backward",
        "scan_backward",
        "I",
        "bf16",
        flop=tokens * (2.0 * scan.flop + scan.repeated_flop),
        uncounted_flop=tokens * scan.repeated_flop,
        bytes_read=tokens * (2.0 * scan.read_bytes + scan.outputs * BF16),
        bytes_written=tokens * (gradients + scan.written_bytes),
        gemm=GemmShape(w.tokens, scan.chunk, scan.chunk, _streams(w, scan)),
        variant=scan.variant,
    )


def convolution(w: Work, channels: float) -> Operator:
    """Short causal convolution over each channel with its activation, which reads and writes BF16 once."""
    size = w.tokens * channels * BF16
    return move("short_conv", "conv", "F", size, size, variant="forward")


def convolution_backward(w: Work, channels: float) -> Operator:
    """Gradients of input, weight and bias from the input and the output's gradient."""
    size = w.tokens * channels * BF16
    return move("short_conv.backward", "conv", "I", 2.0 * size, size, variant="backward", launches=2)


def gated_norm(w: Work, width: float, gate: float) -> Operator:
    """Norm of the scan's output times its activated gate, in one kernel."""
    size = w.tokens * width * BF16
    return move("gated_norm", "norm", "F", size + w.tokens * gate * BF16, size, variant="gated_forward")


def gated_norm_backward(w: Work, width: float, gate: float) -> Operator:
    """Gradients of the scan's output, the gate and the norm's weight."""
    size, gates = w.tokens * width * BF16, w.tokens * gate * BF16
    read, written = 2.0 * size + gates, size + gates
    return move("gated_norm.backward", "norm", "I", read, written, variant="gated_backward", launches=2)
