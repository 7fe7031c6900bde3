"""Core attention before flash attention: scores, softmax and dropout as kernels that go through memory.

The kernels are those of Megatron-LM's core attention (NVIDIA/Megatron-LM@2e90a342f5, `CoreAttention`): two
batched products, a fused scale-mask-softmax and a dropout, over the whole square of scores.
"""

from __future__ import annotations

from moesim.simulator.model.operator import Direction, GemmShape, Operator
from moesim.simulator.model.operators_parts import BF16, Work, again, move

MASK_BYTES = 1.0


def unfused_forward(w: Work) -> list[Operator]:
    """Scores, softmax, any dropout, values. Eq. O7: both products take 2 T a s d FLOPs, none halved."""
    a = w.shape.attention
    scores = _scores(w)
    return [
        _product(w, "attention.scores", "F", a.qk_head_dim, writes=scores),
        move("attention.softmax", "elementwise", "F", scores * BF16, scores * BF16, variant="softmax"),
        *([_dropout(w, "attention.dropout", "F")] if w.dropout else []),
        _product(w, "attention.values", "F", a.v_head_dim, reads=scores),
    ]


def unfused_backward(w: Work) -> list[Operator]:
    """Four products, dropout and softmax backwards; the forward once more where it is recomputed."""
    a = w.shape.attention
    scores = _scores(w)
    repeated = again(unfused_forward(w)) if w.recompute in ("attention", "selective") else []
    return [
        *repeated,
        _product(w, "attention.values.dscores", "I", a.v_head_dim, writes=scores),
        _product(w, "attention.values.dv", "I", a.v_head_dim, reads=scores),
        *([_dropout(w, "attention.dropout.backward", "I")] if w.dropout else []),
        move(
            "attention.softmax.backward", "elementwise", "I", 2 * scores * BF16, scores * BF16,
            variant="softmax",
        ),
        _product(w, "attention.scores.dq", "I", a.qk_head_dim, reads=scores),
        _product(w, "attention.scores.dk", "I", a.qk_head_dim, reads=scores),
    ]  # fmt: skip


def _dropout(w: Work, name: str, d: Direction) -> Operator:
    """A mask is written with the scores going forward, and read with their gradient coming back."""
    narrow, wide = _scores(w) * BF16, _scores(w) * (BF16 + MASK_BYTES)
    reads, writes = (narrow, wide) if d == "F" else (wide, narrow)
    return move(name, "elementwise", d, reads, writes, variant="mask")


def _scores(w: Work) -> float:
    """Elements of the score squares of this rank."""
    return w.tokens * (w.shape.attention.heads // w.tp) * w.sequence


def _product(
    w: Work, name: str, d: Direction, width: int, *, reads: float = 0.0, writes: float = 0.0
) -> Operator:
    """One batched product between the scores and a [tokens, width] tensor of every head.

    Model FLOPs count the causal half only.
    """
    heads = w.shape.attention.heads // w.tp
    rows = w.tokens * heads
    thin = rows * width * BF16
    flop = 2.0 * _scores(w) * width
    n, k = (w.sequence, width) if writes else (width, w.sequence)
    return Operator(
        name,
        "gemm",
        d,
        "bf16",
        flop=flop,
        uncounted_flop=0.5 * flop,
        bytes_read=(2 * thin if writes else thin) + reads * BF16,
        bytes_written=writes * BF16 if writes else thin,
        gemm=GemmShape(rows, n, k, max(1, round(rows / w.sequence))),
    )
