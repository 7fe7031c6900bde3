"""Gates and sinks, which change the output of the core attention before its projection.

A gate is a sigmoid for every element of the heads, or one for every head. A sink is a learned logit of a head
that takes a share of its softmax.

Sources: Qwen3-Next projects the gates of all elements with the queries, Step 3.5 one gate a head
(`modeling_qwen3_next.py` of Hugging Face transformers, `modeling_step3p5.py` of stepfun-ai/Step-3.5-Flash).
"""

from __future__ import annotations

from typing import Literal

from moesim.simulator.model.operator import Operator
from moesim.simulator.model.primitives import BF16, FP32, move
from moesim.simulator.model.work import Work

OutputGate = Literal["none", "element", "head"]
"""Gates of the attention's output before its projection."""


def gate_columns(gate: OutputGate, heads: int, v_head_dim: int) -> int:
    """Columns that the gates add to the projections of the input."""
    return {"none": 0, "element": heads * v_head_dim, "head": heads}[gate]


def gate_forward(w: Work, columns: int, width: int) -> list[Operator]:
    """Multiplication of `width` elements of this rank's heads by the sigmoids of `columns` gates."""
    if not columns:
        return []
    read, written = w.tokens * (width + columns) * BF16, w.tokens * width * BF16
    return [move("attention.gate", "elementwise", "F", read, written, variant="add")]


def gate_backward(w: Work, columns: int, width: int) -> list[Operator]:
    """Gradients of the gates and of the core attention's output, from that of their product."""
    if not columns:
        return []
    read = w.tokens * (2 * width + columns) * BF16
    written = w.tokens * (width + columns) * BF16
    return [move("attention.gate.backward", "elementwise", "I", read, written, variant="add")]


def sink_forward(w: Work, heads: int, width: int) -> list[Operator]:
    """Kernel that scales the output by the sinks' share, where flex_attention cannot do it (none: 0 heads).

    Fused kernels add a head's sink to its softmax, which costs nothing.
    """
    if not heads or not w.flex:
        return []
    read = w.tokens * (width * BF16 + heads * FP32)
    return [move("attention.sinks", "elementwise", "F", read, w.tokens * width * BF16, variant="add")]


def sink_backward(w: Work, heads: int, width: int) -> list[Operator]:
    """Sums over tokens, the sinks' gradients; with flex_attention also the gradient of the scaling."""
    if not heads:
        return []
    # Compiled, the scaling shares its reads with the kernel that prepares the backward.
    scaled = w.tokens * width * BF16 if w.flex else 0.0
    read = 2.0 * w.tokens * heads * FP32
    return [move("attention.sinks.backward", "elementwise", "I", read, scaled, variant="reduce")]
