"""Operators of the feed-forward half of a block: dense SwiGLU, gate, routed and shared experts.

The order is that of the kernels in DeepSeek's published H800 training profile
(deepseek-ai/profile-data@449602428a1b, train.json); without FP8 the casts and transposes fall away.
"""

from __future__ import annotations

from dataclasses import replace

from moesim.simulator.model.operator import Direction, Operator, OperatorClass
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
    scale_transpose,
    weight_gradient,
    weight_transpose,
)
from moesim.simulator.model.shape import MoE

GATE_FORWARD_LAUNCHES, GATE_BACKWARD_LAUNCHES = 37, 26
"""Small kernels of the gate in the published profile: scores, group limit, top-k, balance loss."""
GATE_FORWARD_PASSES, GATE_BACKWARD_PASSES = 12, 16
"""How often these chains read or write a [tokens, experts] FP32 tensor, counted in the same profile."""


def _moe(w: Work) -> MoE:
    assert w.shape.moe is not None
    return w.shape.moe


def _experts_here(w: Work) -> int:
    return max(1, _moe(w).experts // w.ep)


# --- dense SwiGLU: the FFN of a dense layer, and the shared expert ---------------------------------


def swiglu_forward(
    w: Work, name: str, width: int, *, cast_input: bool
) -> tuple[list[Operator], list[Operator]]:
    """(gate-up product, the rest): the trace runs the routed experts between the two."""
    h, t = w.shape.hidden, w.tokens
    up = linear_forward(w, f"{name}.gate_up", t, 2 * width, h, cast_input=cast_input)
    down = [_swiglu(f"{name}.swiglu", t, width, w.fp8, per_row=False)]
    down += linear_forward(w, f"{name}.down", t, h, width, cast_input=False)
    return up, down


def _swiglu(name: str, m: float, width: int, fp8: bool, per_row: bool) -> Operator:
    """Reads gate and up, writes their product (already cast in FP8)."""
    return move(
        name, "swiglu", "F", 2 * m * width * BF16, m * per_row_bytes(width, fp8),
        variant="forward", per_received_row=per_row,
    )  # fmt: skip


def swiglu_input_gradient_down(w: Work, name: str, width: int) -> list[Operator]:
    """Down projection and SwiGLU, backwards."""
    h, t = w.shape.hidden, w.tokens
    out = [cast(f"{name}.restore", "I", t, 2 * width, "back")] if w.fp8 else []
    out += linear_input_gradient(w, f"{name}.down", t, h, width, cast_gradient=False)
    if w.fp8:
        out.append(cast(f"{name}.down.gradient_cast_channel", "I", t, h, "channel_fp8"))
        out.append(
            move(
                f"{name}.swiglu.recompute", "swiglu", "I", 2 * t * width * BF16, t * per_row_bytes(width, True),
                variant="cast_channel",
            )
        )  # fmt: skip
    out.append(
        move(
            f"{name}.swiglu.backward",
            "swiglu",
            "I",
            3 * t * width * BF16,
            2 * t * width * BF16,
            variant="backward",
        )
    )
    return out


def swiglu_input_gradient_up(w: Work, name: str, width: int) -> list[Operator]:
    """Gate-up projection backwards and, in FP8, the operands of its weight gradient."""
    h, t = w.shape.hidden, w.tokens
    out = [cast(f"{name}.input_restore", "I", t, h, "back")] if w.fp8 else []
    out += linear_input_gradient(w, f"{name}.gate_up", t, 2 * width, h)
    if w.fp8:
        out.append(cast(f"{name}.gate_up.gradient_cast_channel", "I", t, 2 * width, "channel"))
        out.append(cast(f"{name}.gate_up.input_cast_channel", "I", t, h, "channel"))
    return out


def swiglu_weight_gradient(w: Work, name: str, width: int) -> tuple[Operator, Operator]:
    """(down, gate-up)."""
    h, t = w.shape.hidden, w.tokens
    return weight_gradient(w, f"{name}.down", t, h, width), weight_gradient(
        w, f"{name}.gate_up", t, 2 * width, h
    )


def dense_width(w: Work) -> int:
    """Columns of the dense FFN on this rank."""
    assert w.shape.dense_ffn is not None
    return w.shape.dense_ffn // w.tp


def dense_forward(w: Work) -> list[Operator]:
    """The FFN of a dense layer; in FP8 its SwiGLU input is cached in FP8."""
    width = dense_width(w)
    up, down = swiglu_forward(w, "ffn", width, cast_input=True)
    cache = [cast("ffn.cache", "F", w.tokens, 2 * width, "token")] if w.fp8 else []
    return [*up, *down, *cache]


def dense_input_gradient(w: Work) -> list[Operator]:
    """Input gradient of the FFN of a dense layer, with the norm and cast formed again."""
    width = dense_width(w)
    return [
        *swiglu_input_gradient_down(w, "ffn", width),
        *ffn_norm_again(w),
        *swiglu_input_gradient_up(w, "ffn", width),
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
    m = _moe(w)
    passes = GATE_FORWARD_PASSES * w.norm_tokens * m.experts * FP32 / 2
    return [
        gemm("gate", "F", w.norm_tokens, m.experts, w.shape.hidden, "bf16", cls="gate_gemm"),
        move("gate.select", "topk", "F", passes, passes, variant="forward", launches=GATE_FORWARD_LAUNCHES),
    ]


def gate_backward(w: Work) -> list[Operator]:
    """The chain of small kernels backwards, then input and weight gradient of the router."""
    m = _moe(w)
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


# --- routed experts -------------------------------------------------------------------------------


def _expert_move(
    w: Work,
    name: str,
    cls: OperatorClass,
    d: Direction,
    read: float,
    written: float,
    variant: str = "",
    launches: int = 1,
) -> Operator:
    """A memory-bound kernel over received rows; `read` and `written` are bytes per row."""
    return move(
        name, cls, d, w.rows * read, w.rows * written,
        variant=variant, launches=launches, per_received_row=True,
    )  # fmt: skip


def _expand(w: Work, name: str, d: Direction, fp8: bool) -> list[Operator]:
    """Received tokens copied into expert order; scales put into the layout of the product."""
    row = per_row_bytes(w.shape.hidden, fp8)
    out = [_expert_move(w, name, "permute", d, row * w.received_tokens / w.rows, row, "expand")]
    if fp8:
        out.append(scale_transpose(f"{name}.scales", d, w.rows, w.shape.hidden, per_row=True))
    return out


def _reduce(w: Work, name: str, d: Direction) -> Operator:
    """Rows of the same token summed back into one."""
    row = w.shape.hidden * BF16
    return _expert_move(w, name, "permute", d, row, row * w.received_tokens / w.rows, "reduce")


def experts_forward(w: Work) -> list[Operator]:
    """Shared and routed experts of a MoE layer, forward, between dispatch and combine."""
    m, h, e = _moe(w), w.shape.hidden, _experts_here(w)
    f, rows, fp8 = m.expert_ffn, w.rows, w.fp8
    before, after = _shared_forward(w)
    index_bytes = 8.0 * m.top_k * w.received_tokens / rows
    out = [
        *before,
        _expert_move(w, "experts.count", "permute", "F", index_bytes, 0.0, "count"),
        _expert_move(w, "experts.mapping", "permute", "F", index_bytes, index_bytes, "mapping"),
        *_expand(w, "experts.expand", "F", fp8),
    ]
    if fp8:
        out.insert(-1, weight_transpose("experts.gate_up.weight_transpose", "F", 2 * f, h, e))
    out.append(_grouped(w, "experts.gate_up", "F", 2 * f, h, e))
    out.append(_expert_move(w, "experts.scale_weights", "elementwise", "F", FP32, FP32, "tiny"))
    out.append(_swiglu("experts.swiglu", rows, f, fp8, per_row=True))
    if fp8:
        out.append(weight_transpose("experts.down.weight_transpose", "F", h, f, e))
        out.append(scale_transpose("experts.down.scales", "F", rows, f, per_row=True))
        out.append(move("experts.tensor_maps", "elementwise", "F", 0.0, 128.0 * e, variant="tiny"))
    out.append(_grouped(w, "experts.down", "F", h, f, e))
    out.append(_reduce(w, "experts.reduce", "F"))
    out += after
    if fp8:
        out.append(cast("experts.cache", "F", rows, 2 * f, "token", per_row=True))
        if m.shared_experts:
            out.append(cast("shared.cache", "F", w.tokens, 2 * _shared_width(w), "token"))
    return out


def experts_input_gradient(w: Work) -> list[Operator]:
    """Shared and routed experts, input gradient, between the two communications of the backward."""
    m, h, e = _moe(w), w.shape.hidden, _experts_here(w)
    f, rows, fp8 = m.expert_ffn, w.rows, w.fp8
    element = per_row_bytes(f, False)
    out = swiglu_input_gradient_down(w, "shared", _shared_width(w)) if m.shared_experts else []
    if fp8:
        out.append(cast("experts.restore", "I", rows, 2 * f, "back", per_row=True))
    out += _expand(w, "experts.expand_gradient", "I", fp8)
    out.append(_grouped(w, "experts.down.dgrad", "I", f, h, e))
    # Reads gate, up and the gradient; writes the output again and the gradients of gate and up.
    out.append(
        _expert_move(
            w, "experts.swiglu.backward", "swiglu", "I", 3 * element, 3 * element, "weighted_backward"
        )
    )
    out.append(
        _expert_move(w, "experts.weight_gradient", "swiglu", "I", 2 * element, FP32, "weight_backward")
    )
    if fp8:
        out.append(cast("experts.down.input_cast_channel", "I", rows, f, "channel", per_row=True))
    out.append(_expert_move(w, "experts.scale_weights.backward", "elementwise", "I", FP32, FP32, "tiny"))
    out += ffn_norm_again(w)
    if fp8:
        out.append(cast("experts.gate_up.cast_gradient", "I", rows, 2 * f, "token", per_row=True))
        out.append(scale_transpose("experts.gate_up.scales", "I", rows, 2 * f, per_row=True))
    out.append(_grouped(w, "experts.gate_up.dgrad", "I", h, 2 * f, e))
    out.append(_reduce(w, "experts.reduce_gradient", "I"))
    if fp8:
        out.append(cast("experts.gate_up.gradient_cast_channel", "I", rows, 2 * f, "channel", per_row=True))
    if m.shared_experts:
        out += swiglu_input_gradient_up(w, "shared", _shared_width(w))
    return out


def experts_weight_gradient(w: Work) -> list[Operator]:
    """Weight gradients of shared and routed experts; one launch an expert in the published profile."""
    m, h, e = _moe(w), w.shape.hidden, _experts_here(w)
    f, rows = m.expert_ffn, w.rows
    shared = swiglu_weight_gradient(w, "shared", _shared_width(w)) if m.shared_experts else None
    out: list[Operator] = [shared[0]] if shared else []
    if w.fp8:
        out.append(cast("experts.down.gradient_cast_channel", "W", rows, h, "channel_fp8", per_row=True))
    out.append(_grouped_weight_gradient(w, "experts.down", h, f, e))
    if w.fp8:
        out.append(cast("experts.gate_up.input_cast_channel", "W", rows, h, "channel_fp8", per_row=True))
    out.append(_grouped_weight_gradient(w, "experts.gate_up", 2 * f, h, e))
    return [*out, shared[1]] if shared else out


def _shared_width(w: Work) -> int:
    m = _moe(w)
    return m.shared_experts * m.shared_ffn // w.tp


def _shared_forward(w: Work) -> tuple[list[Operator], list[Operator]]:
    if not _moe(w).shared_experts:
        return [], []
    return swiglu_forward(w, "shared", _shared_width(w), cast_input=False)


def _grouped(w: Work, name: str, d: Direction, n: int, k: int, groups: int) -> Operator:
    return gemm(name, d, w.rows, n, k, w.linear, cls="grouped_gemm", groups=groups, per_received_row=True)


def _grouped_weight_gradient(w: Work, name: str, n: int, k: int, groups: int) -> Operator:
    op = gemm(
        f"{name}.wgrad", "W", n, k, w.rows, w.linear, cls="wgrad_gemm", groups=groups, per_received_row=True
    )
    return replace(op, launches=groups)


# --- small operators of the communication stream --------------------------------------------------


def dispatch_operators(w: Work) -> list[Operator]:
    """What runs on the communication stream before the forward dispatch: its layout."""
    m = _moe(w)
    read = 8.0 * m.top_k * w.tokens
    return [move("dispatch.layout", "permute", "F", read, w.tokens * m.experts / 8, variant="layout")]


def combine_backward_operators(w: Work, fp8_dispatch: bool) -> list[Operator]:
    """What runs on the communication stream before the backward of combine: the gradient's cast."""
    if not fp8_dispatch:
        return []
    op = cast("combine.cast_gradient", "I", w.tokens, w.shape.hidden, "token")
    return [replace(op, variant="token_on_communication_stream")]
