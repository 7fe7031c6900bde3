"""Operators that a multi-token-prediction module runs in addition to its layer."""

from __future__ import annotations

from moesim.simulator.model.embedding_head import embedding_forward, embedding_weight_gradient
from moesim.simulator.model.operator import Operator
from moesim.simulator.model.primitives import (
    BF16,
    cast,
    linear_forward,
    linear_input_gradient,
    move,
    norm,
    norm_backward,
    weight_gradient,
)
from moesim.simulator.model.work import Work


def mtp_projection(w: Work) -> tuple[list[Operator], list[Operator], list[Operator]]:
    """Embedding of the next token, two norms, their concatenation and the projection from 2 x hidden.

    Returns (forward, input gradient, weight gradient). Source: DeepSeek-V3 report, section 2.2.
    """
    h, t, m = w.hidden, w.tokens, w.norm_tokens
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
