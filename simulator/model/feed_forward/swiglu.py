"""Operators of SwiGLU, for the FFN of a dense layer and for shared experts.

The order is that of the kernels in DeepSeek's published H800 training profile
(deepseek-ai/profile-data@449602428a1b, train.json); without FP8 there are no casts and transposes.
"""

from __future__ import annotations

from moesim.simulator.model.operator import Operator
from moesim.simulator.model.primitives import (
    BF16,
    cast,
    linear_forward,
    linear_input_gradient,
    move,
    norm,
    per_row_bytes,
    recomputed,
    weight_gradient,
)
from moesim.simulator.model.work import Work


def swiglu_forward(
    w: Work, name: str, width: int, *, cast_input: bool, branches: int = 2
) -> tuple[list[Operator], list[Operator]]:
    """Forward as (gate-up GEMM, the rest); in the published trace the routed experts run between the two.

    `branches` is 2 for gate and up, and 1 for an FFN without a gate.
    """
    h, t = w.hidden, w.tokens
    up = linear_forward(w, f"{name}.gate_up", t, branches * width, h, cast_input=cast_input)
    down = [swiglu_kernel(f"{name}.swiglu", t, width, w.fp8, per_row=False, branches=branches)]
    down += linear_forward(w, f"{name}.down", t, h, width, cast_input=False)
    return up, down


def swiglu_kernel(name: str, m: float, width: int, fp8: bool, per_row: bool, branches: int = 2) -> Operator:
    """Kernel that reads gate and up and writes SiLU(gate) * up, in FP8 if `fp8`."""
    return move(
        name, "swiglu", "F", branches * m * width * BF16, m * per_row_bytes(width, fp8),
        variant="forward", per_received_row=per_row,
    )  # fmt: skip


def swiglu_input_gradient_down(w: Work, name: str, width: int, branches: int = 2) -> list[Operator]:
    """Input gradient of the down projection, and backward of SwiGLU."""
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
    """Input gradient of the gate-up projection and, in FP8, casts of the operands of its weight gradient."""
    h, t = w.hidden, w.tokens
    out = [cast(f"{name}.input_restore", "I", t, h, "back")] if w.fp8 else []
    out += linear_input_gradient(w, f"{name}.gate_up", t, branches * width, h)
    if w.fp8:
        out.append(cast(f"{name}.gate_up.gradient_cast_channel", "I", t, branches * width, "channel"))
        out.append(cast(f"{name}.gate_up.input_cast_channel", "I", t, h, "channel"))
    return out


def swiglu_weight_gradient(w: Work, name: str, width: int, branches: int = 2) -> tuple[Operator, Operator]:
    """Weight gradients of the (down, gate-up) projections."""
    h, t = w.hidden, w.tokens
    return weight_gradient(w, f"{name}.down", t, h, width), weight_gradient(
        w, f"{name}.gate_up", t, branches * width, h
    )


def recomputed_ffn_norm(w: Work) -> list[Operator]:
    """Recompute the FFN norm and its cast, where the policy does not keep their outputs."""
    if not w.repeats("layernorm"):
        return []
    forward = [norm("ffn_norm", "F", w.norm_tokens, w.hidden, residual=True)]
    if w.fp8:
        forward.append(cast("ffn_norm.cast", "F", w.tokens, w.hidden, "token"))
    return recomputed(forward)
