"""Operators of the embedding, and of the head with its loss."""

from __future__ import annotations

from moesim.simulator.model.operator import Operator
from moesim.simulator.model.precision import BYTES_PER_ELEMENT, Precision
from moesim.simulator.model.primitives import (
    BF16,
    FP32,
    add,
    cast,
    gemm,
    linear_forward,
    linear_input_gradient,
    move,
    norm,
    norm_backward,
    weight_gradient,
)
from moesim.simulator.model.work import Work

INDEX_BYTES = 8.0
"""Bytes of one token index (int64)."""


def embedding_forward(w: Work, positions: bool = False) -> list[Operator]:
    """Gather of one row per token, and the sum with the row of its position if positions are learned."""
    size = w.norm_tokens * w.hidden * BF16
    gather = move("embedding", "embedding", "F", size + INDEX_BYTES * w.tokens, size, variant="gather")
    return [gather, add("embedding.positions", "F", w.norm_tokens, w.hidden)] if positions else [gather]


def embedding_weight_gradient(w: Work) -> list[Operator]:
    """Scatter-add of one row per token into the FP32 gradient."""
    elements = w.norm_tokens * w.hidden
    read = elements * (BF16 + FP32) + INDEX_BYTES * w.tokens
    return [move("embedding.wgrad", "embedding", "W", read, elements * FP32, variant="scatter")]


def head_operators(
    w: Work, vocab: int, precision: Precision
) -> tuple[list[Operator], list[Operator], list[Operator]]:
    """Final norm, output projection and loss, as (forward, input gradient, weight gradient).

    The loss is a softmax cross-entropy over logits in memory. Its forward reads them twice (for the maximum,
    and for the sum with the label's logit); its backward reads and writes them once.
    """
    h, t = w.hidden, w.tokens
    columns = vocab / w.tp
    wide = precision.loss == "fp32"
    logits = t * columns * (FP32 if wide else BYTES_PER_ELEMENT[precision.logits])
    output, gradient, weight = _projection(w, columns, precision)
    forward = [
        norm("final_norm", "F", w.norm_tokens, h),
        *output,
        move("loss", "loss", "F", 2 * logits, FP32 * t, variant="forward"),
    ]
    backward = [
        move("loss.backward", "loss", "I", logits, logits, variant="backward"),
        *gradient,
        norm_backward("final_norm.backward", w.norm_tokens, h),
    ]
    if wide:
        narrow = t * columns * BYTES_PER_ELEMENT[precision.logits]
        forward.insert(len(forward) - 1, move("logits.widen", "copy", "F", narrow, logits, variant="widen"))
        backward.insert(1, move("logits.narrow", "copy", "I", logits, narrow, variant="narrow"))
    return forward, backward, [weight]


def _projection(
    w: Work, columns: float, precision: Precision
) -> tuple[list[Operator], list[Operator], Operator]:
    """Forward, input gradient and weight gradient of the output projection, with casts in FP8."""
    h, t = w.hidden, w.tokens
    if precision.head == "fp8":
        backward = linear_input_gradient(w, "head", t, columns, h)
        if w.fp8:
            backward.append(cast("head.input_cast_channel", "I", t, h, "channel"))
            backward.append(cast("head.gradient_cast_channel", "I", t, columns, "channel"))
        return linear_forward(w, "head", t, columns, h), backward, weight_gradient(w, "head", t, columns, h)
    return (
        [gemm("head", "F", t, columns, h, precision.head)],
        [gemm("head.dgrad", "I", t, h, columns, precision.head)],
        gemm("head.wgrad", "W", columns, h, t, precision.head, cls="wgrad_gemm"),
    )
