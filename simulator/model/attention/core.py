"""Operators of the causal core attention; flash attention keeps the scores inside the kernel."""

from __future__ import annotations

from moesim.simulator.model.attention.heads import HeadSizes
from moesim.simulator.model.attention.unfused import unfused_backward, unfused_forward
from moesim.simulator.model.operator import GemmShape, Operator
from moesim.simulator.model.primitives import BF16, FP32, move, recomputed
from moesim.simulator.model.work import Work


def core_forward(w: Work, sizes: HeadSizes) -> list[Operator]:
    """Causal core attention, with flop = tokens x heads x sequence x (d_qk + d_v) (eq. C2)."""
    if w.unfused:
        return unfused_forward(w, sizes)
    heads, kv_heads = sizes.heads // w.tp, max(1, sizes.kv_heads // w.tp)
    qk, v = sizes.qk_head_dim, sizes.v_head_dim
    queries = w.tokens * heads * qk * BF16
    keys_values = w.tokens * kv_heads * (qk + v) * BF16
    core = Operator(
        "attention",
        "attention_forward",
        "F",
        "bf16",
        flop=w.tokens * heads * w.sequence * (qk + v),
        bytes_read=queries + keys_values,
        bytes_written=w.tokens * heads * v * BF16,
        gemm=GemmShape(w.tokens, w.sequence, qk, heads),
    )
    return [core]


def recomputed_core(w: Work, sizes: HeadSizes) -> list[Operator]:
    """The core attention run again before its backward, where a checkpoint dropped what it computed.

    Policies repeat it only where the scores go through memory.
    """
    by_policy = w.unfused and w.recompute in ("attention", "selective")
    return recomputed(core_forward(w, sizes)) if by_policy or w.repeats("core_attn") else []


def core_backward(w: Work, sizes: HeadSizes) -> list[Operator]:
    """Backward of the core attention: preparation, the core itself, and conversion of dQ to BF16.

    The core runs five GEMMs; the one that computes the scores again does not count as model FLOPs.
    """
    if w.unfused:
        return unfused_backward(w, sizes)
    heads, kv_heads = sizes.heads // w.tp, max(1, sizes.kv_heads // w.tp)
    qk_dim, v_dim = sizes.qk_head_dim, sizes.v_head_dim
    q, v = w.tokens * heads * qk_dim, w.tokens * heads * v_dim
    kv = w.tokens * kv_heads * (qk_dim + v_dim)
    scores = w.tokens * heads * w.sequence
    core = Operator(
        "attention.backward",
        "attention_backward",
        "I",
        "bf16",
        flop=scores * (3 * qk_dim + 2 * v_dim),
        uncounted_flop=scores * qk_dim,
        bytes_read=(q + v) * BF16 + kv * BF16 + q * FP32,
        bytes_written=q * FP32 + kv * BF16,
        gemm=GemmShape(w.tokens, w.sequence, qk_dim, heads),
    )
    return [
        move("attention.backward_pre", "attention_pre_post", "I", 2 * v * BF16, q * FP32, variant="pre"),
        core,
        move("attention.backward_post", "attention_pre_post", "I", q * FP32, q * BF16, variant="post"),
    ]
