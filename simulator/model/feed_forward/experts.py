"""Operators of routed and shared experts, and the small operators on the communication stream.

The order is that of the kernels in DeepSeek's published H800 training profile
(deepseek-ai/profile-data@449602428a1b, train.json); without FP8 there are no casts and transposes.
Rows are not padded to the tile of the grouped GEMM (128 rows an expert, under 1 % for DeepSeek-V3).
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from moesim.simulator.model.feed_forward.dense import (
    recomputed_ffn_norm,
    swiglu_forward,
    swiglu_input_gradient_down,
    swiglu_input_gradient_up,
    swiglu_kernel,
    swiglu_weight_gradient,
)
from moesim.simulator.model.operator import Direction, Operator, OperatorClass, Work
from moesim.simulator.model.primitives import (
    BF16,
    FP32,
    block_cast,
    cast,
    gemm,
    move,
    one_scale_cast,
    per_row_bytes,
    recomputed,
    scale_transpose,
    weight_scales,
    weight_transpose,
)


class ExpertWork(Struct, frozen=True):
    """One GPU's share of a layer with routed experts."""

    work: Work
    top_k: int
    expert_ffn: int
    """Columns of one expert, before any tensor parallelism of the experts."""
    local_experts: int
    """Experts of this rank, replicas included."""
    shared_width: int
    """Columns of the shared experts on this rank; 0 without any."""
    row: int
    """Elements of a routed row: the hidden size, or that of the latent rows."""
    branches: int = 2
    """Projections into an expert's width: gate and up, or up alone."""
    bias: bool = False
    """Whether the routed experts' projections have biases."""

    @property
    def width(self) -> int:
        """Columns of one expert on this rank."""
        return self.expert_ffn // self.work.expert_tp

    @property
    def rows(self) -> float:
        """Rows of the grouped GEMMs, which all ranks that split an expert have received."""
        return self.work.rows * self.work.expert_tp


def _expert_move(
    w: Work, name: str, cls: OperatorClass, d: Direction, read: float, written: float, variant: str
) -> Operator:
    """A memory-bound kernel over received rows; `read` and `written` are bytes per row."""
    return move(name, cls, d, w.rows * read, w.rows * written, variant=variant, per_received_row=True)


def _expand(x: ExpertWork, name: str, d: Direction) -> list[Operator]:
    """Copy of received tokens into expert order, and transpose of their scales into the GEMM's layout."""
    w, row = x.work, per_row_bytes(x.row, x.work.fp8)
    scales = [scale_transpose(f"{name}.scales", d, w.rows, x.row, per_row=True)] if w.fp8 else []
    return [_expert_move(w, name, "permute", d, row * w.received_tokens / w.rows, row, "expand"), *scales]


def _reduce(x: ExpertWork, name: str, d: Direction) -> Operator:
    """Sum of the rows of every token back into one."""
    w, row = x.work, x.row * BF16
    return _expert_move(w, name, "permute", d, row, row * w.received_tokens / w.rows, "reduce")


def _shared_forward(x: ExpertWork) -> tuple[list[Operator], list[Operator]]:
    if not x.shared_width:
        return [], []
    return swiglu_forward(x.work, "shared", x.shared_width, cast_input=False, branches=x.branches)


def _grouped(x: ExpertWork, name: str, d: Direction, n: int, k: int) -> list[Operator]:
    """GEMM of all experts, where needed behind a cast of its rows for all of them and its weights' scales.

    Transformer Engine quantises rows and their gradients itself where a tensor has one scale or blocks,
    because neither the permutation nor the activation writes FP8 (NVIDIA/TransformerEngine@0069563f6
    `grouped_linear.py`, `fused_multi_quantize`; `group_quantize`, one kernel, for blocks).
    """
    w, rows, e = x.work, x.rows, x.local_experts
    cast_name, suffix = (f"{name}.cast", "") if d == "F" else (f"{name}.cast_gradient", ".dgrad")
    casts = block_cast(w, cast_name, d, rows, k, per_row=True)
    casts += one_scale_cast(w, cast_name, d, rows, k, groups=e) if w.fp8_tensor else []
    return [
        *casts,
        *weight_scales(w, name, d, n, k, e),
        gemm(
            name + suffix, d, rows, n, k, w.linear,
            cls="grouped_gemm", groups=e, per_received_row=True, variant=w.gemm_variant(d),
        ),
    ]  # fmt: skip


def experts_forward(x: ExpertWork) -> list[Operator]:
    """Shared and routed experts of a MoE layer, forward, between dispatch and combine."""
    w, h, e = x.work, x.row, x.local_experts
    f, up, rows, fp8 = x.width, x.branches * x.width, x.rows, w.fp8
    before, after = _shared_forward(x)
    index_bytes = 8.0 * x.top_k * w.received_tokens / w.rows
    out = [
        *before,
        _expert_move(w, "experts.count", "permute", "F", index_bytes, 0.0, "count"),
        _expert_move(w, "experts.mapping", "permute", "F", index_bytes, index_bytes, "mapping"),
        *_expand(x, "experts.expand", "F"),
    ]
    if fp8:
        out.insert(-1, weight_transpose("experts.gate_up.weight_transpose", "F", up, h, e))
    out += _grouped(x, "experts.gate_up", "F", up, h)
    out.append(_expert_move(w, "experts.scale_weights", "elementwise", "F", FP32, FP32, "tiny"))
    out.append(swiglu_kernel("experts.swiglu", rows, f, fp8, per_row=True, branches=x.branches))
    if fp8:
        out.append(weight_transpose("experts.down.weight_transpose", "F", h, f, e))
        out.append(scale_transpose("experts.down.scales", "F", rows, f, per_row=True))
        out.append(move("experts.tensor_maps", "elementwise", "F", 0.0, 128.0 * e, variant="tiny"))
    out += _grouped(x, "experts.down", "F", h, f)
    if x.bias:  # the bias of the first projection is part of the activation's kernel
        out.append(_expert_move(w, "experts.down.bias", "elementwise", "F", h * BF16, h * BF16, "add"))
    out.append(_reduce(x, "experts.reduce", "F"))
    out += after
    if fp8:
        out.append(cast("experts.cache", "F", rows, up, "token", per_row=True))
        if x.shared_width:
            out.append(cast("shared.cache", "F", w.tokens, x.branches * x.shared_width, "token"))
    return out


def experts_input_gradient(x: ExpertWork) -> list[Operator]:
    """Shared and routed experts, input gradient, between the two communications of the backward."""
    w, h = x.work, x.row
    f, up, rows, fp8 = x.width, x.branches * x.width, x.rows, w.fp8
    element = per_row_bytes(x.expert_ffn, False)
    out: list[Operator] = []
    if w.repeats("shared_experts"):
        before, after = _shared_forward(x)
        out += recomputed([*before, *after])
    if x.shared_width:
        out += swiglu_input_gradient_down(w, "shared", x.shared_width, x.branches)
    if fp8:
        out.append(cast("experts.restore", "I", rows, up, "back", per_row=True))
    out += _expand(x, "experts.expand_gradient", "I")
    out += _grouped(x, "experts.down", "I", f, h)
    if w.repeats("moe_act"):
        out += recomputed([swiglu_kernel("experts.swiglu", rows, f, fp8, per_row=True, branches=x.branches)])
    # Reads the branches and the gradient; writes the output again and the gradients of the branches.
    moved = (x.branches + 1) * element
    out.append(_expert_move(w, "experts.swiglu.backward", "swiglu", "I", moved, moved, "weighted_backward"))
    out.append(
        _expert_move(w, "experts.weight_gradient", "swiglu", "I", 2 * element, FP32, "weight_backward")
    )
    if fp8:
        out.append(cast("experts.down.input_cast_channel", "I", rows, f, "channel", per_row=True))
    out.append(_expert_move(w, "experts.scale_weights.backward", "elementwise", "I", FP32, FP32, "tiny"))
    out += recomputed_ffn_norm(w)
    if fp8:
        out.append(cast("experts.gate_up.cast_gradient", "I", rows, up, "token", per_row=True))
        out.append(scale_transpose("experts.gate_up.scales", "I", rows, up, per_row=True))
    out += _grouped(x, "experts.gate_up", "I", h, up)
    out.append(_reduce(x, "experts.reduce_gradient", "I"))
    if fp8:
        out.append(cast("experts.gate_up.gradient_cast_channel", "I", rows, up, "channel", per_row=True))
    if x.shared_width:
        out += swiglu_input_gradient_up(w, "shared", x.shared_width, x.branches)
    return out


def experts_weight_gradient(x: ExpertWork) -> list[Operator]:
    """Weight gradients of shared and routed experts; the published profile has one launch per expert."""
    w, h = x.work, x.row
    f, up, rows = x.width, x.branches * x.width, x.rows
    shared = swiglu_weight_gradient(w, "shared", x.shared_width, x.branches) if x.shared_width else None
    out: list[Operator] = [shared[0]] if shared else []
    if w.fp8:
        out.append(cast("experts.down.gradient_cast_channel", "W", rows, h, "channel_fp8", per_row=True))
    out.append(_grouped_weight_gradient(x, "experts.down", h, f))
    if w.fp8:
        out.append(cast("experts.gate_up.input_cast_channel", "W", rows, h, "channel_fp8", per_row=True))
    out.append(_grouped_weight_gradient(x, "experts.gate_up", up, h))
    if x.bias:  # sums of the gradients of both projections' outputs over the rows of each expert
        out.append(_expert_move(w, "experts.bias.wgrad", "elementwise", "W", (up + h) * BF16, 0.0, "reduce"))
    return [*out, shared[1]] if shared else out


def _grouped_weight_gradient(x: ExpertWork, name: str, n: int, k: int) -> Operator:
    w, e = x.work, x.local_experts
    op = gemm(
        f"{name}.wgrad", "W", n, k, x.rows, w.linear,
        cls="wgrad_gemm", groups=e, per_received_row=True, variant=w.gemm_variant("W"),
    )  # fmt: skip
    return op if w.fp8_tensor or w.blocks else replace(op, launches=e)
