"""Operators of the causal core attention; flash attention keeps the scores inside the kernel.

A core kernel's variant says what its rate depends on besides the sequence: `fp8` or `mxfp8` for operands in
FP8, `flex` for PyTorch's compiled flex_attention, `window` for a sliding window, `64`, `256` or `512` for
narrow or wide heads, joined by `_`.
Rates of a window are read at its size. A chunk is a sequence of its own to the kernels: Llama 4's recipes
cut the sequence into chunks before they call one, and flex_attention over 4 chunks of 8,192 tokens runs
within 5 % (forward) and 10 % (backward) of its rate at 8,192 tokens
(lab/results/2026-11-22-h200-windowed-attention.json.xz).
"""

from __future__ import annotations

from moesim.simulator.model.attention.heads import HeadSizes
from moesim.simulator.model.attention.reach import FULL, Reach
from moesim.simulator.model.attention.unfused import unfused_backward, unfused_forward
from moesim.simulator.model.operator import Direction, Dtype, GemmShape, Operator
from moesim.simulator.model.precision import BLOCK_BYTES
from moesim.simulator.model.primitives import BF16, FP32, move, recomputed
from moesim.simulator.model.work import Work

HEADS = ((80, "64"), (192, ""), (256, "256"))
"""Widest head of each variant by width; still wider heads are `512`, which nothing measured."""


def kernel_variant(w: Work, sizes: HeadSizes, reach: Reach) -> str:
    """Variant of the core kernels, by which profiles distinguish their rates."""
    wide = next((name for most, name in HEADS if sizes.qk_head_dim <= most), "512")
    window = "window" if reach.kind == "window" and reach.limits(w.sequence) else ""
    return "_".join(part for part in (w.attention, "flex" if w.flex else "", window, wide) if part)


def _shape(w: Work, sizes: HeadSizes, reach: Reach, heads: int) -> GemmShape:
    """Shape of the scores; its columns are the most keys of a query, at which the rate is read."""
    return GemmShape(w.tokens, reach.widest(w.sequence), sizes.qk_head_dim, heads)


def core_forward(w: Work, sizes: HeadSizes, reach: Reach = FULL) -> list[Operator]:
    """Causal core attention, with flop = 2 x tokens x heads x mean keys x (d_qk + d_v) (eq. C2).

    Operands in FP8 are cast first (eq. C51).
    """
    if w.unfused:
        return unfused_forward(w, sizes, reach)
    heads, kv_heads = sizes.heads // w.tp, max(1, sizes.kv_heads // w.tp)
    qk, v = sizes.qk_head_dim, sizes.v_head_dim
    queries = w.tokens * heads * qk
    keys_values = w.tokens * kv_heads * (qk + v)
    element = 1.0 if w.attention else BF16
    core = Operator(
        "attention",
        "attention_forward",
        "F",
        _dtype(w),
        flop=w.tokens * heads * 2.0 * reach.mean_keys(w.sequence) * (qk + v),
        bytes_read=(queries + keys_values) * element,
        bytes_written=w.tokens * heads * v * BF16,
        gemm=_shape(w, sizes, reach, heads),
        variant=kernel_variant(w, sizes, reach),
    )
    return [*operand_casts(w, "attention.cast", "F", queries + keys_values), core]


def _dtype(w: Work) -> Dtype:
    return "fp8" if w.attention else "bf16"


def operand_casts(w: Work, name: str, d: Direction, elements: float) -> list[Operator]:
    """Cast of operands of the core attention to FP8 (eq. C51); none in BF16.

    MXFP8 writes them along rows and columns. With one scale a tensor, queries, keys and values are joined
    before one cast, and a current scale reads the joined tensor first. Read in NVIDIA/TransformerEngine@v2.15
    `pytorch/attention/dot_product_attention/utils.py` (`mxfp8_quantize_fast_path`, `combine_and_quantize`).
    """
    if not w.attention:
        return []
    if w.attention == "mxfp8":
        written = 2.0 * BLOCK_BYTES["mx"] * elements
        return [move(name, "cast", d, BF16 * elements, written, variant="mx", dtype="fp8")]
    out = [move(name, "cast", d, BF16 * elements, elements, variant="row", dtype="fp8")]
    if w.current_scales:
        out.insert(0, move(f"{name}.amax", "cast", d, BF16 * elements, 0.0, variant="amax", launches=2))
    if d == "F":
        out.insert(0, move(f"{name}.join", "copy", d, BF16 * elements, BF16 * elements, variant="pack"))
    return out


def recomputed_core(w: Work, sizes: HeadSizes, reach: Reach = FULL) -> list[Operator]:
    """The core attention run again before its backward, where a checkpoint dropped what it computed.

    Policies repeat it only where the scores go through memory.
    """
    by_policy = w.unfused and w.recompute in ("attention", "selective")
    return recomputed(core_forward(w, sizes, reach)) if by_policy or w.repeats("core_attn") else []


def core_backward(w: Work, sizes: HeadSizes, reach: Reach = FULL) -> list[Operator]:
    """Backward of the core attention: preparation, the core itself, and conversion of dQ to BF16.

    The core runs five GEMMs; the one that computes the scores again does not count as model FLOPs. In FP8 the
    gradient of the output is cast first, and kernels compute the scores outside of a window too: cuDNN 9.22
    takes as long for a window of 128 tokens as its FLOPs over the whole sequence say.
    """
    if w.unfused:
        return unfused_backward(w, sizes, reach)
    heads, kv_heads = sizes.heads // w.tp, max(1, sizes.kv_heads // w.tp)
    qk_dim, v_dim = sizes.qk_head_dim, sizes.v_head_dim
    q, v = w.tokens * heads * qk_dim, w.tokens * heads * v_dim
    kv = w.tokens * kv_heads * (qk_dim + v_dim)
    scores = w.tokens * heads * 2.0 * reach.mean_keys(w.sequence)
    uncounted = scores * qk_dim
    if w.attention:
        whole = w.tokens * heads * 2.0 * FULL.mean_keys(w.sequence)
        uncounted = whole * (3 * qk_dim + 2 * v_dim) - scores * (2 * qk_dim + 2 * v_dim)
        scores, reach = whole, FULL
    element = 1.0 if w.attention else BF16
    core = Operator(
        "attention.backward",
        "attention_backward",
        "I",
        _dtype(w),
        flop=scores * (3 * qk_dim + 2 * v_dim),
        uncounted_flop=uncounted,
        bytes_read=(q + v) * element + kv * element + q * FP32,
        bytes_written=q * FP32 + kv * BF16,
        gemm=_shape(w, sizes, reach, heads),
        variant=kernel_variant(w, sizes, reach),
    )
    return [
        *operand_casts(w, "attention.cast_gradient", "I", v),
        move("attention.backward_pre", "attention_pre_post", "I", 2 * v * BF16, q * FP32, variant="pre"),
        core,
        move("attention.backward_post", "attention_pre_post", "I", q * FP32, q * BF16, variant="post"),
    ]
