"""Operators of the feed-forward half of a block without its routed experts: dense SwiGLU, norm, gate.

The order is that of the kernels in DeepSeek's published H800 training profile
(deepseek-ai/profile-data@449602428a1b, train.json); without FP8 the casts and transposes fall away.
"""

from __future__ import annotations

from moesim.simulator.model.operator import Operator
from moesim.simulator.model.operators_parts import (
    BF16,
    FP32,
    Work,
    again,
    cast,
    gemm,
    linear_forward,
    linear_input_gradient,
    move,
    norm,
    per_row_bytes,
    weight_gradient,
)

GATE_FORWARD_LAUNCHES, GATE_BACKWARD_LAUNCHES = 37, 26
"""Small kernels of the gate in the published profile: scores, group limit, top-k, balance loss."""
GATE_FORWARD_PASSES, GATE_BACKWARD_PASSES = 12, 16
"""How often these chains read or write a [tokens, experts] FP32 tensor, counted in the same profile."""


# --- dense SwiGLU: the FFN of a dense layer, and the shared expert ---------------------------------


def swiglu_forward(
    w: Work, name: str, width: int, *, cast_input: bool, branches: int = 2
) -> tuple[list[Operator], list[Operator]]:
    """(gate-up product, the rest): the trace runs the routed experts between the two.

    `branches`: 2 for gate and up, 1 for an FFN without a gate.
    """
    h, t = w.shape.hidden, w.tokens
    up = linear_forward(w, f"{name}.gate_up", t, branches * width, h, cast_input=cast_input)
    down = [swiglu_product(f"{name}.swiglu", t, width, w.fp8, per_row=False, branches=branches)]
    down += linear_forward(w, f"{name}.down", t, h, width, cast_input=False)
    return up, down


def swiglu_product(name: str, m: float, width: int, fp8: bool, per_row: bool, branches: int = 2) -> Operator:
    """Reads gate and up, writes their product (already cast in FP8)."""
    return move(
        name, "swiglu", "F", branches * m * width * BF16, m * per_row_bytes(width, fp8),
        variant="forward", per_received_row=per_row,
    )  # fmt: skip


def swiglu_input_gradient_down(w: Work, name: str, width: int, branches: int = 2) -> list[Operator]:
    """Down projection and SwiGLU, backwards."""
    h, t = w.shape.hidden, w.tokens
    out = [cast(f"{name}.restore", "I", t, branches * width, "back")] if w.fp8 else []
    out += linear_input_gradient(w, f"{name}.down", t, h, width, cast_gradient=False)
    if w.fp8:
        out.append(cast(f"{name}.down.gradient_cast_channel", "I", t, h, "channel_fp8"))
        out.append(
            move(
                f"{name}.swiglu.recompute", "swiglu", "I", branches * t * width * BF16,
                t * per_row_bytes(width, True), variant="cast_channel",
            )
        )  # fmt: skip
    out.append(
        move(
            f"{name}.swiglu.backward",
            "swiglu",
            "I",
            (branches + 1) * t * width * BF16,
            branches * t * width * BF16,
            variant="backward",
        )
    )
    return out


def swiglu_input_gradient_up(w: Work, name: str, width: int, branches: int = 2) -> list[Operator]:
    """Gate-up projection backwards and, in FP8, the operands of its weight gradient."""
    h, t = w.shape.hidden, w.tokens
    out = [cast(f"{name}.input_restore", "I", t, h, "back")] if w.fp8 else []
    out += linear_input_gradient(w, f"{name}.gate_up", t, branches * width, h)
    if w.fp8:
        out.append(cast(f"{name}.gate_up.gradient_cast_channel", "I", t, branches * width, "channel"))
        out.append(cast(f"{name}.gate_up.input_cast_channel", "I", t, h, "channel"))
    return out


def swiglu_weight_gradient(w: Work, name: str, width: int, branches: int = 2) -> tuple[Operator, Operator]:
    """(down, gate-up)."""
    h, t = w.shape.hidden, w.tokens
    return weight_gradient(w, f"{name}.down", t, h, width), weight_gradient(
        w, f"{name}.gate_up", t, branches * width, h
    )


def dense_width(w: Work) -> int:
    """Columns of the dense FFN on this rank."""
    assert w.shape.dense_ffn is not None
    return w.shape.dense_ffn // w.tp


def dense_forward(w: Work) -> list[Operator]:
    """The FFN of a dense layer; in FP8 its SwiGLU input is cached in FP8."""
    width = dense_width(w)
    branches = w.shape.ffn_branches
    up, down = swiglu_forward(w, "ffn", width, cast_input=True, branches=branches)
    cache = [cast("ffn.cache", "F", w.tokens, branches * width, "token")] if w.fp8 else []
    return [*up, *down, *cache]


def dense_input_gradient(w: Work) -> list[Operator]:
    """Input gradient of the FFN of a dense layer, with the norm and cast formed again."""
    width, branches = dense_width(w), w.shape.ffn_branches
    return [
        *swiglu_input_gradient_down(w, "ffn", width, branches),
        *ffn_norm_again(w),
        *swiglu_input_gradient_up(w, "ffn", width, branches),
    ]


def ffn_norm_again(w: Work) -> list[Operator]:
    """The FFN norm (and its cast) formed again instead of kept."""
    if not w.selective:
        return []
    forward = [norm("ffn_norm", "F", w.norm_tokens, w.shape.hidden, residual=True)]
    if w.fp8:
        forward.append(cast("ffn_norm.cast", "F", w.tokens, w.shape.hidden, "token"))
    return again(forward)


# --- gate -----------------------------------------------------------------------------------------


def gate_forward(w: Work) -> list[Operator]:
    """Router product, then scores, group limit, top-k and balance loss as one chain of small kernels."""
    m = w.moe
    passes = GATE_FORWARD_PASSES * w.norm_tokens * m.experts * FP32 / 2
    return [
        gemm("gate", "F", w.norm_tokens, m.experts, w.shape.hidden, "bf16", cls="gate_gemm"),
        move("gate.select", "topk", "F", passes, passes, variant="forward", launches=GATE_FORWARD_LAUNCHES),
    ]


def gate_backward(w: Work) -> list[Operator]:
    """The chain of small kernels backwards, then input and weight gradient of the router."""
    m = w.moe
    passes = GATE_BACKWARD_PASSES * w.norm_tokens * m.experts * FP32 / 2
    h, t = w.shape.hidden, w.norm_tokens
    return [
        move(
            "gate.select.backward",
            "topk",
            "I",
            passes,
            passes,
            variant="backward",
            launches=GATE_BACKWARD_LAUNCHES,
        ),
        gemm("gate.dgrad", "I", t, h, m.experts, "bf16", cls="gate_gemm"),
        gemm("gate.wgrad", "W", m.experts, h, t, "bf16", cls="gate_gemm"),
    ]
