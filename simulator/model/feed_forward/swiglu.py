"""Operators of SwiGLU: the FFN of a dense layer, and the shared experts.

The order is that of the kernels in DeepSeek's published H800 training profile
(deepseek-ai/profile-data@449602428a1b, train.json); without FP8 the casts and transposes fall away.
"""

from __future__ import annotations

from moesim.simulator.model.operator import Operator
from moesim.simulator.model.primitives import (
    BF16,
    again,
    cast,
    linear_forward,
    linear_input_gradient,
    move,
    norm,
    per_row_bytes,
    weight_gradient,
)
from moesim.simulator.model.work import Work


def swiglu_forward(
    w: Work, name: str, width: int, *, cast_input: bool, branches: int = 2
) -> tuple[list[Operator], list[Operator]]:
    """(gate-up GEMM, the rest): the trace runs the routed experts between the two.

    `branches`: 2 for gate and up, 1 for an FFN without a gate.
    """
    h, t = w.hidden, w.tokens
    up = linear_forward(w, f"{name}.gate_up", t, branches * width, h, cast_input=cast_input)
    down = [swiglu_kernel(f"{name}.swiglu", t, width, w.fp8, per_row=False, branches=branches)]
    down += linear_forward(w, f"{name}.down", t, h, width, cast_input=False)
    return up, down


def swiglu_kernel(name: str, m: float, width: int, fp8: bool, per_row: bool, branches: int = 2) -> Operator:
    """Reads gate and up, writes SiLU(gate) * up (already cast in FP8)."""
    return move(
        name, "swiglu", "F", branches * m * width * BF16, m * per_row_bytes(width, fp8),
        variant="forward", per_received_row=per_row,
    )  # fmt: skip


def swiglu_input_gradient_down(w: Work, name: str, width: int, branches: int = 2) -> list[Operator]:
    """Down projection and SwiGLU, backwards."""
    h, t = w.hidden, w.tokens
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
    h, t = w.hidden, w.tokens
    out = [cast(f"{name}.input_restore", "I", t, h, "back")] if w.fp8 else []
    out += linear_input_gradient(w, f"{name}.gate_up", t, branches * width, h)
    if w.fp8:
        out.append(cast(f"{name}.gate_up.gradient_cast_channel", "I", t, branches * width, "channel"))
        out.append(cast(f"{name}.gate_up.input_cast_channel", "I", t, h, "channel"))
    return out


def swiglu_weight_gradient(w: Work, name: str, width: int, branches: int = 2) -> tuple[Operator, Operator]:
    """(down, gate-up)."""
    h, t = w.hidden, w.tokens
    return weight_gradient(w, f"{name}.down", t, h, width), weight_gradient(
        w, f"{name}.gate_up", t, branches * width, h
    )


def ffn_norm_again(w: Work) -> list[Operator]:
    """The FFN norm (and its cast) formed again instead of kept."""
    if not w.selective:
        return []
    forward = [norm("ffn_norm", "F", w.norm_tokens, w.hidden, residual=True)]
    if w.fp8:
        forward.append(cast("ffn_norm.cast", "F", w.tokens, w.hidden, "token"))
    return again(forward)
