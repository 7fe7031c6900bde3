"""Operators of what is not a transformer layer: embedding, head with loss, MTP projection, optimizer."""

from __future__ import annotations

from moesim.simulator.model.operator import Operator
from moesim.simulator.model.operators_parts import (
    BF16,
    FP32,
    Work,
    cast,
    gemm,
    linear_forward,
    linear_input_gradient,
    move,
    norm,
    norm_backward,
    weight_gradient,
)
from moesim.simulator.model.precision import BYTES_PER_ELEMENT, Precision

INDEX_BYTES = 8.0


def embedding_forward(w: Work) -> list[Operator]:
    """Gather of one row per token."""
    size = w.norm_tokens * w.shape.hidden * BF16
    return [move("embedding", "embedding", "F", size + INDEX_BYTES * w.tokens, size, variant="gather")]


def embedding_weight_gradient(w: Work) -> list[Operator]:
    """Scatter-add of one row per token into the FP32 gradient."""
    elements = w.norm_tokens * w.shape.hidden
    read = elements * (BF16 + FP32) + INDEX_BYTES * w.tokens
    return [move("embedding.wgrad", "embedding", "W", read, elements * FP32, variant="scatter")]


def head_operators(w: Work, precision: Precision) -> tuple[list[Operator], list[Operator], list[Operator]]:
    """Final norm, output projection and loss: (forward, input gradient, weight gradient).

    The loss is a softmax cross-entropy over logits that stay in memory: two reads forward (maximum and
    sum, with the label's logit), one read and one write backward.
    """
    h, t = w.shape.hidden, w.tokens
    columns = w.shape.vocab / w.tp
    wide = precision.loss == "fp32"
    logits = t * columns * (FP32 if wide else BYTES_PER_ELEMENT[precision.head])
    forward = [
        norm("final_norm", "F", w.norm_tokens, h),
        gemm("head", "F", t, columns, h, precision.head),
        move("loss", "loss", "F", 2 * logits, FP32 * t, variant="forward"),
    ]
    backward = [
        move("loss.backward", "loss", "I", logits, logits, variant="backward"),
        gemm("head.dgrad", "I", t, h, columns, precision.head),
        norm_backward("final_norm.backward", w.norm_tokens, h),
    ]
    if wide:
        narrow = t * columns * BYTES_PER_ELEMENT[precision.head]
        forward.insert(2, move("logits.widen", "copy", "F", narrow, logits, variant="widen"))
        backward.insert(1, move("logits.narrow", "copy", "I", logits, narrow, variant="widen"))
    return forward, backward, [gemm("head.wgrad", "W", columns, h, t, precision.head, cls="wgrad_gemm")]


def mtp_projection(w: Work) -> tuple[list[Operator], list[Operator], list[Operator]]:
    """What a multi-token-prediction module adds to its block (DeepSeek-V3 report 2.2): embedding of the
    next token, two norms, joining, and the projection from 2 x hidden; (forward, input, weight)."""
    h, t, m = w.shape.hidden, w.tokens, w.norm_tokens
    joined = m * 2 * h * BF16
    forward = [
        *embedding_forward(w),
        norm("mtp.hidden_norm", "F", m, h),
        norm("mtp.embedding_norm", "F", m, h),
        move("mtp.join", "copy", "F", joined, joined, variant="pack"),
        *linear_forward(w, "mtp.projection", t, h, 2 * h),
    ]
    backward = linear_input_gradient(w, "mtp.projection", t, h, 2 * h)
    if w.fp8:
        backward.append(cast("mtp.projection.input_cast_channel", "I", t, 2 * h, "channel"))
        backward.append(cast("mtp.projection.gradient_cast_channel", "I", t, h, "channel"))
    backward += [
        move("mtp.split", "copy", "I", joined, joined, variant="pack"),
        norm_backward("mtp.hidden_norm.backward", m, h),
        norm_backward("mtp.embedding_norm.backward", m, h),
    ]
    weight = [weight_gradient(w, "mtp.projection", t, h, 2 * h), *embedding_weight_gradient(w)]
    return forward, backward, weight


def optimizer_operators(
    owned_parameters: float, precision: Precision, local_parameters: float = 0.0
) -> tuple[Operator, ...]:
    """AdamW over the parameters that this GPU owns, gradient norm first; bytes only.

    `local_parameters`: those whose BF16 copy this GPU re-quantises to FP8 after the update (0 without
    FP8). Eq. C9: bytes per owned parameter = gradient + 2 x (master + 2 moments) + written copy.
    """
    gradient = BYTES_PER_ELEMENT[precision.gradients]
    state = BYTES_PER_ELEMENT[precision.master_weights] + 2 * BYTES_PER_ELEMENT[precision.moments]
    copy = BYTES_PER_ELEMENT[precision.parameters]
    n = owned_parameters
    out = [
        move("optimizer.gradient_norm", "optimizer", "W", n * gradient, 0.0, variant="norm"),
        move(
            "optimizer.adamw", "optimizer", "W", n * (gradient + state), n * (state + copy), variant="update"
        ),
    ]
    if precision.linear == "fp8" and local_parameters:
        read = local_parameters * copy
        out.append(
            move(
                "optimizer.quantise",
                "optimizer",
                "W",
                read,
                local_parameters,
                variant="quantise",
                dtype="fp8",
            )
        )
    return tuple(out)
