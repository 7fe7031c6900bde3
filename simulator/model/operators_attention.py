"""Operators of the attention half of a block, forward, input gradient and weight gradient.

The order is that of the kernels in DeepSeek's published H800 training profile
(deepseek-ai/profile-data@449602428a1b, train.json); without FP8 the casts and transposes fall away.
"""

from __future__ import annotations

from moesim.simulator.model.operator import Direction, GemmShape, Operator
from moesim.simulator.model.operators_parts import (
    BF16,
    FP32,
    Work,
    add,
    again,
    cast,
    linear_forward,
    linear_input_gradient,
    move,
    norm,
    norm_backward,
    scale,
    weight_gradient,
)
from moesim.simulator.model.operators_unfused import unfused_backward, unfused_forward
from moesim.simulator.model.shape import GQA, MLA


def attention_forward(w: Work) -> list[Operator]:
    """From the attention norm to the FFN norm (gate excluded)."""
    h = w.shape.hidden
    out = [norm("attn_norm", "F", w.norm_tokens, h, residual=True)]
    out += _mla_inputs(w) if isinstance(w.shape.attention, MLA) else _gqa_inputs(w)
    return [
        *out,
        *(unfused_forward(w) if w.unfused else [core_forward(w)]),
        *_output_projection(w),
        scale("residual_scale", "F", w.norm_tokens, h),
        norm("ffn_norm", "F", w.norm_tokens, h, residual=True),
    ]


def core_forward(w: Work) -> Operator:
    """Causal core attention. Eq. C2: flop = tokens x heads x sequence x (d_qk + d_v)."""
    a = w.shape.attention
    heads, kv_heads = a.heads // w.tp, max(1, a.kv_heads // w.tp)
    flop = w.tokens * heads * w.sequence * (a.qk_head_dim + a.v_head_dim)
    queries = w.tokens * heads * a.qk_head_dim * BF16
    keys_values = w.tokens * kv_heads * (a.qk_head_dim + a.v_head_dim) * BF16
    return Operator(
        "attention",
        "attention_forward",
        "F",
        "bf16",
        flop=flop,
        bytes_read=queries + keys_values,
        bytes_written=w.tokens * heads * a.v_head_dim * BF16,
        gemm=GemmShape(w.tokens, w.sequence, a.qk_head_dim, heads),
    )


def core_backward(w: Work) -> list[Operator]:
    """Preparation, core (five products; the repeated scores are not model FLOPs), conversion of dQ."""
    if w.unfused:
        return unfused_backward(w)
    a = w.shape.attention
    heads, kv_heads = a.heads // w.tp, max(1, a.kv_heads // w.tp)
    q, v = w.tokens * heads * a.qk_head_dim, w.tokens * heads * a.v_head_dim
    kv = w.tokens * kv_heads * (a.qk_head_dim + a.v_head_dim)
    product = w.tokens * heads * w.sequence
    core = Operator(
        "attention.backward",
        "attention_backward",
        "I",
        "bf16",
        flop=product * (3 * a.qk_head_dim + 2 * a.v_head_dim),
        uncounted_flop=product * a.qk_head_dim,
        bytes_read=(q + v) * BF16 + kv * BF16 + q * FP32,
        bytes_written=q * FP32 + kv * BF16,
        gemm=GemmShape(w.tokens, w.sequence, a.qk_head_dim, heads),
    )
    return [
        move("attention.backward_pre", "attention_pre_post", "I", 2 * v * BF16, q * FP32, variant="pre"),
        core,
        move("attention.backward_post", "attention_pre_post", "I", q * FP32, q * BF16, variant="post"),
    ]


def attention_input_gradient(w: Work) -> list[Operator]:
    """From the gradient at the FFN norm's output to the gradient of the block's input."""
    h, m = w.shape.hidden, w.norm_tokens
    out = [
        add("ffn_norm.add_gradient", "I", m, h),
        norm_backward("ffn_norm.backward", m, h),
        scale("residual_scale.backward", "I", m, h),
        *_output_projection_gradient(w),
    ]
    a = w.shape.attention
    out += _mla_input_gradient(w, a) if isinstance(a, MLA) else _gqa_input_gradient(w, a)
    return [*out, add("attn_norm.add_gradient", "I", m, h), norm_backward("attn_norm.backward", m, h)]


def attention_weight_gradient(w: Work) -> list[Operator]:
    """Weight gradients of the projections."""
    a, h, t = w.shape.attention, w.shape.hidden, w.tokens
    out = [weight_gradient(w, "o_proj", t, h, a.heads * a.v_head_dim // w.tp)]
    if isinstance(a, GQA):
        return [*out, weight_gradient(w, "qkv_proj", t, _gqa_width(a) // w.tp, h)]
    out.append(weight_gradient(w, "kv_up", t, _kv_width(a) // w.tp, a.kv_lora_rank))
    q_width = a.heads * a.qk_head_dim // w.tp
    if a.q_lora_rank is None:
        out.append(weight_gradient(w, "q_proj", t, q_width, h))
    else:
        out.append(weight_gradient(w, "q_up", t, q_width, a.q_lora_rank))
    out.append(weight_gradient(w, "kv_down", t, a.kv_lora_rank + a.qk_rope_dim, h))
    if a.q_lora_rank is not None:
        out.append(weight_gradient(w, "q_down", t, a.q_lora_rank, h))
    return out


def _kv_width(a: MLA) -> int:
    return a.heads * (a.qk_nope_dim + a.v_dim)


def _gqa_width(a: GQA) -> int:
    return (a.heads + 2 * a.kv_heads) * a.head_dim


def _copy(name: str, d: Direction, elements: float, variant: str) -> Operator:
    return move(name, "copy", d, elements * BF16, elements * BF16, variant=variant)


def _rope(name: str, d: Direction, elements: float) -> Operator:
    return move(name, "rope", d, elements * BF16, elements * BF16)


def _mla_inputs(w: Work) -> list[Operator]:
    """Latents, their norms, up-projections, rotary embedding and the tensors that attention reads."""
    a, h, t = w.shape.attention, w.shape.hidden, w.tokens
    assert isinstance(a, MLA)
    out: list[Operator] = []
    if a.q_lora_rank is not None:
        out += linear_forward(w, "q_down", t, a.q_lora_rank, h)
    out += linear_forward(w, "kv_down", t, a.kv_lora_rank + a.qk_rope_dim, h)
    out.append(
        move("rope_positions", "elementwise", "F", 0.0, 16.0 * w.sequence, variant="positions", launches=2)
    )
    latent_norms, up = _mla_latents(w, a), _mla_up(w, a)
    return [*out, *latent_norms, *up]


def _mla_latents(w: Work, a: MLA, with_key_slice: bool = True) -> list[Operator]:
    t = w.tokens
    out: list[Operator] = []
    if a.q_lora_rank is not None:
        out.append(norm("q_norm", "F", t, a.q_lora_rank))
    out.append(_copy("kv_latent_slice", "F", t * a.kv_lora_rank, "slice"))
    out.append(norm("kv_norm", "F", t, a.kv_lora_rank))
    if with_key_slice:
        out.append(_copy("k_rope_slice", "F", t * a.qk_rope_dim, "slice"))
    return out


def _mla_up(w: Work, a: MLA) -> list[Operator]:
    t, heads = w.tokens, a.heads // w.tp
    q_width = heads * a.qk_head_dim
    if a.q_lora_rank is None:
        out = linear_forward(w, "q_proj", t, q_width, w.shape.hidden)
    else:
        out = linear_forward(w, "q_up", t, q_width, a.q_lora_rank)
    out += linear_forward(w, "kv_up", t, _kv_width(a) // w.tp, a.kv_lora_rank)
    return [
        *out,
        _rope("rope_k", "F", t * a.qk_rope_dim),
        _copy("k_nope_pack", "F", t * heads * a.qk_nope_dim, "pack"),
        move(
            "k_rope_broadcast", "copy", "F", t * a.qk_rope_dim * BF16, t * heads * a.qk_rope_dim * BF16,
            variant="broadcast",
        ),
        _rope("rope_q", "F", t * heads * a.qk_rope_dim),
    ]  # fmt: skip


def _output_projection(w: Work) -> list[Operator]:
    a, t = w.shape.attention, w.tokens
    width = a.heads * a.v_head_dim // w.tp
    cache = [cast("attention_output.cache", "F", t, width, "special")] if w.fp8 else []
    return [*cache, *linear_forward(w, "o_proj", t, w.shape.hidden, width)]


def _output_projection_gradient(w: Work) -> list[Operator]:
    a, h, t = w.shape.attention, w.shape.hidden, w.tokens
    width = a.heads * a.v_head_dim // w.tp
    if not w.fp8:
        return linear_input_gradient(w, "o_proj", t, h, width)
    return [
        cast("attention_output.restore", "I", t, width, "special_back"),
        *linear_input_gradient(w, "o_proj", t, h, width, cast_first=True),
        cast("attention_output.cast_channel", "I", t, width, "channel"),
        cast("o_proj.gradient_cast_channel", "I", t, h, "channel"),
    ]


def _mla_input_gradient(w: Work, a: MLA) -> list[Operator]:
    t, h, heads = w.tokens, w.shape.hidden, a.heads // w.tp
    out: list[Operator] = []
    if w.selective:
        out += again([*_mla_latents(w, a, with_key_slice=False), *_mla_up(w, a)])
    out += core_backward(w)
    out.append(_rope("rope_q.backward", "I", t * heads * a.qk_rope_dim))
    q_in = a.q_lora_rank or h
    q_name = "q_proj" if a.q_lora_rank is None else "q_up"
    out += linear_input_gradient(w, q_name, t, heads * a.qk_head_dim, q_in)
    out += [
        move(
            "k_rope.sum_heads", "elementwise", "I", t * heads * a.qk_rope_dim * BF16,
            t * a.qk_rope_dim * BF16, variant="reduce",
        ),
        _rope("rope_k.backward", "I", t * a.qk_rope_dim),
        _copy("k_nope_unpack", "I", t * heads * a.qk_nope_dim, "pack"),
        _copy("v_unpack", "I", t * heads * a.v_dim, "pack"),
    ]  # fmt: skip
    kv_width = _kv_width(a) // w.tp
    out += linear_input_gradient(w, "kv_up", t, kv_width, a.kv_lora_rank)
    if w.fp8:
        out += [
            cast("kv_up.gradient_cast_channel", "I", t, kv_width, "channel"),
            cast("kv_up.input_cast_channel", "I", t, a.kv_lora_rank, "channel"),
            cast(f"{q_name}.gradient_cast_channel", "I", t, heads * a.qk_head_dim, "channel"),
            cast(f"{q_name}.input_cast_channel", "I", t, q_in, "channel"),
        ]
    return [*out, *_mla_latent_gradient(w, a)]


def _mla_latent_gradient(w: Work, a: MLA) -> list[Operator]:
    t, h = w.tokens, w.shape.hidden
    kv_width = a.kv_lora_rank + a.qk_rope_dim
    out = [norm_backward("kv_norm.backward", t, a.kv_lora_rank)]
    if a.q_lora_rank is not None:
        out.append(norm_backward("q_norm.backward", t, a.q_lora_rank))
    size = t * kv_width * BF16
    out.append(move("kv_latent.join", "elementwise", "I", 3 * size, 4 * size, variant="join", launches=5))
    if w.selective:
        out += again([norm("attn_norm", "F", w.norm_tokens, h, residual=True)])
    out += _latent_projection(w, "kv_down", kv_width, h)
    if a.q_lora_rank is not None:
        out += _latent_projection(w, "q_down", a.q_lora_rank, h)
    return out


def _latent_projection(w: Work, name: str, n: int, h: int) -> list[Operator]:
    """Input gradient of a down-projection and, in FP8, the two operands of its weight gradient."""
    out = linear_input_gradient(w, name, w.tokens, n, h, cast_first=True)
    if w.fp8:
        out.append(cast(f"{name}.input_cast_channel", "I", w.tokens, h, "channel"))
        out.append(cast(f"{name}.gradient_cast_channel", "I", w.tokens, n, "channel"))
    return out


def _gqa_inputs(w: Work) -> list[Operator]:
    a, h, t = w.shape.attention, w.shape.hidden, w.tokens
    assert isinstance(a, GQA)
    out = linear_forward(w, "qkv_proj", t, _gqa_width(a) // w.tp, h)
    return [*out, *_gqa_rotary(w, a, "F")]


def _gqa_rotary(w: Work, a: GQA, d: Direction) -> list[Operator]:
    q, k = w.tokens * a.heads * a.head_dim / w.tp, w.tokens * a.kv_heads * a.head_dim / w.tp
    suffix = "" if d == "F" else ".backward"
    out: list[Operator] = []
    if a.qk_norm:
        rows = (q + k) / a.head_dim
        out.append(
            norm("qk_norm", "F", rows, a.head_dim)
            if d == "F"
            else norm_backward("qk_norm.backward", rows, a.head_dim)
        )
    if a.rotary:
        out += [_rope(f"rope_q{suffix}", d, q), _rope(f"rope_k{suffix}", d, k)]
    return out


def _gqa_input_gradient(w: Work, a: GQA) -> list[Operator]:
    t, h, width = w.tokens, w.shape.hidden, _gqa_width(a) // w.tp
    out = [*core_backward(w), *_gqa_rotary(w, a, "I")]
    if w.selective:
        out += again([norm("attn_norm", "F", w.norm_tokens, h, residual=True)])
    out += linear_input_gradient(w, "qkv_proj", t, width, h)
    if w.fp8:
        out.append(cast("qkv_proj.input_cast_channel", "I", t, h, "channel"))
        out.append(cast("qkv_proj.gradient_cast_channel", "I", t, width, "channel"))
    return out
