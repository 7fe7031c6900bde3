"""Operators of unfused core attention, whose scores, softmax and dropout go through memory.

The kernels are those of Megatron-LM's core attention (NVIDIA/Megatron-LM@2e90a342f5, `CoreAttention`): two
batched GEMMs, a fused scale-mask-softmax and a dropout, over the whole square of scores. A window or chunk
masks the square and saves nothing.
"""

from __future__ import annotations

from moesim.simulator.model.attention.heads import HeadSizes
from moesim.simulator.model.attention.reach import FULL, Reach
from moesim.simulator.model.operator import Direction, GemmShape, Operator
from moesim.simulator.model.primitives import BF16, move
from moesim.simulator.model.work import Work

MASK_BYTES = 1.0
"""Bytes of one element's dropout mask."""


def unfused_forward(w: Work, sizes: HeadSizes, reach: Reach = FULL) -> list[Operator]:
    """Scores, softmax, any dropout, and values; each GEMM takes 2 T a s d FLOPs, without halving (eq. O7)."""
    scores, counted = _scores(w, sizes), reach.mean_keys(w.sequence) / w.sequence
    return [
        _gemm(w, sizes, "attention.scores", "F", sizes.qk_head_dim, counted, writes=scores),
        move("attention.softmax", "elementwise", "F", scores * BF16, scores * BF16, variant="softmax"),
        *([_dropout(scores, "attention.dropout", "F")] if w.dropout else []),
        _gemm(w, sizes, "attention.values", "F", sizes.v_head_dim, counted, reads=scores),
    ]


def unfused_backward(w: Work, sizes: HeadSizes, reach: Reach = FULL) -> list[Operator]:
    """Four GEMMs and the backward of dropout and softmax."""
    qk, v = sizes.qk_head_dim, sizes.v_head_dim
    scores, counted = _scores(w, sizes), reach.mean_keys(w.sequence) / w.sequence
    return [
        _gemm(w, sizes, "attention.values.dscores", "I", v, counted, writes=scores),
        _gemm(w, sizes, "attention.values.dv", "I", v, counted, reads=scores),
        *([_dropout(scores, "attention.dropout.backward", "I")] if w.dropout else []),
        move(
            "attention.softmax.backward", "elementwise", "I", 2 * scores * BF16, scores * BF16,
            variant="softmax",
        ),
        _gemm(w, sizes, "attention.scores.dq", "I", qk, counted, reads=scores),
        _gemm(w, sizes, "attention.scores.dk", "I", qk, counted, reads=scores),
    ]  # fmt: skip


def _dropout(scores: float, name: str, d: Direction) -> Operator:
    """Dropout kernel; forward it writes a mask with the scores, backward it reads it with their gradient."""
    narrow, wide = scores * BF16, scores * (BF16 + MASK_BYTES)
    reads, writes = (narrow, wide) if d == "F" else (wide, narrow)
    return move(name, "elementwise", d, reads, writes, variant="mask")


def _scores(w: Work, sizes: HeadSizes) -> float:
    """Elements of all score matrices of this rank."""
    return w.tokens * (sizes.heads // w.tp) * w.sequence


def _gemm(
    w: Work,
    sizes: HeadSizes,
    name: str,
    d: Direction,
    width: int,
    counted: float,
    *,
    reads: float = 0.0,
    writes: float = 0.0,
) -> Operator:
    """One batched GEMM between the scores and a [tokens, width] tensor of every head.

    Model FLOPs count the share `counted` of the square only: the causal half, or the keys of a window.
    """
    rows = w.tokens * (sizes.heads // w.tp)
    thin = rows * width * BF16
    flop = 2.0 * _scores(w, sizes) * width
    n, k = (w.sequence, width) if writes else (width, w.sequence)
    return Operator(
        name,
        "gemm",
        d,
        "bf16",
        flop=flop,
        uncounted_flop=(1.0 - counted) * flop,
        bytes_read=(2 * thin if writes else thin) + reads * BF16,
        bytes_written=writes * BF16 if writes else thin,
        gemm=GemmShape(rows, n, k, max(1, round(rows / w.sequence))),
    )
