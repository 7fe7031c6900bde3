"""Gates of the attention's output: a sigmoid for every element of the heads, or one for every head.

Sources: Qwen3-Next projects the gates of all elements with the queries, Step 3.5 one gate a head
(`modeling_qwen3_next.py` of Hugging Face transformers, `modeling_step3p5.py` of stepfun-ai/Step-3.5-Flash).
"""

from __future__ import annotations

from typing import Literal

from moesim.simulator.model.operator import Operator
from moesim.simulator.model.primitives import BF16, move
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
    return [move("attention.gate", "elementwise", "F", read, written, variant="scale")]


def gate_backward(w: Work, columns: int, width: int) -> list[Operator]:
    """Gradients of the gates and of the core attention's output, from that of their product."""
    if not columns:
        return []
    read = w.tokens * (2 * width + columns) * BF16
    written = w.tokens * (width + columns) * BF16
    return [move("attention.gate.backward", "elementwise", "I", read, written, variant="add")]
