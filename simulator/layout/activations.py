"""Tensors that a block keeps from its forward to its backward pass, for each recompute policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import fsum
from typing import Literal

from moesim.simulator.model.operator import BlockKind
from moesim.simulator.model.precision import BYTES_PER_ELEMENT, Precision, row_bytes
from moesim.simulator.model.recompute import RecomputePolicy
from moesim.simulator.model.shape import MLA, ModelShape, MoE
from moesim.simulator.model.software import PLAIN, Software
from moesim.simulator.scenario.parallel import ParallelPlan

E5M6_BYTES = 1.5
SCORE_BYTES = 2.0
"""Softmax output in 16 bits, for every score."""
MASK_BYTES = 1.0
"""Dropout mask of one element."""
DROPPED_SCORE_BYTES = MASK_BYTES + 2.0
"""Mask and output of the dropout of a score."""
Role = Literal[
    "residual", "norm output", "latent", "expanded", "kept", "linear input", "swiglu output", "scores"
]  # fmt: skip
"""What a tensor is, which decides whether a policy keeps it."""

RECOMPUTED: dict[RecomputePolicy, frozenset[Role]] = {
    "none": frozenset(),
    "attention": frozenset({"scores"}),
    "selective": frozenset({"norm output", "expanded", "swiglu output", "scores"}),
    "deepseek-v3": frozenset({"norm output", "expanded", "swiglu output", "scores"}),
    "op": frozenset({"norm output", "latent", "expanded", "swiglu output", "scores"}),
    "full": frozenset(
        {"norm output", "latent", "expanded", "kept", "linear input", "swiglu output", "scores"}
    ),
}

Sharding = Literal["tokens", "width", "none"]
"""How tensor parallelism cuts it: by tokens (only with sequence parallelism), by width, or not at all."""


@dataclass(frozen=True, slots=True)
class CachedTensor:
    """One tensor of a block: bytes for one token of the micro-batch, and how it is cut."""

    name: str
    bytes_per_token: float
    role: Role
    sharding: Sharding


def cached_tensors(
    shape: ModelShape, kind: BlockKind, precision: Precision, policy: RecomputePolicy
) -> tuple[CachedTensor, ...]:
    """The tensors of one block that stay in memory between its forward and its backward pass.

    Attention is of the flash kind: no score matrix, one FP32 log-sum-exp a head. Of the routed part
    the received rows count, top_k a token on average. The loss overwrites the logits with their
    gradient, one tensor in the head's format. `full` applies to layers; embedding and head keep theirs.
    """
    if policy == "op" and kind not in ("embedding", "head"):
        return tuple(_kept_by_op(shape, kind, precision))
    dropped = frozenset() if kind == "head" and policy in ("full", "op") else RECOMPUTED[policy]
    return tuple(t for t in _tensors(shape, kind, precision, policy) if t.role not in dropped)


LOG_SUM_EXP = "log-sum-exp"
NOT_PRODUCTS = frozenset({"MTP norm inputs", "attention norm input", "attention output", LOG_SUM_EXP})
"""What the policy `op` keeps apart from outputs of products and of the all-to-all."""


def _kept_by_op(shape: ModelShape, kind: BlockKind, precision: Precision) -> Iterator[CachedTensor]:
    """Eq. M7: block input, core attention, every second dense product from the first, both all-to-alls.

    Order of the products as in torchtitan 0.2.2, which counts calls; grouped products are not among them.
    """
    yield from (t for t in _tensors(shape, kind, precision, "none") if t.name in NOT_PRODUCTS)
    yield from tuple(_product_outputs(shape, kind))[::2]
    if shape.moe is not None and kind != "dense":
        rows = 2 * shape.moe.top_k * row_bytes(shape.hidden, "bf16")
        yield CachedTensor("rows after dispatch and combine", rows, "kept", "tokens")


def _product_outputs(shape: ModelShape, kind: BlockKind) -> Iterator[CachedTensor]:
    """Outputs of the dense products of a layer in the order of their calls."""
    a, h = shape.attention, shape.hidden
    widths: list[tuple[str, float, Sharding]] = []
    if isinstance(a, MLA):
        if a.q_lora_rank is not None:
            widths.append(("q_down", a.q_lora_rank, "none"))
        widths += [
            ("q_up", a.heads * a.qk_head_dim, "width"),
            ("kv_down", a.kv_lora_rank + a.qk_rope_dim, "none"),
            ("kv_up", a.heads * (a.qk_nope_dim + a.v_dim), "width"),
        ]
    else:
        widths.append(("q", a.heads * a.qk_head_dim, "width"))
        widths += [(name, a.kv_heads * a.qk_head_dim, "width") for name in ("k", "v")]
    widths.append(("o_proj", h, "tokens"))
    ffn: float = 0.0
    if kind == "dense" or shape.moe is None:
        ffn = shape.dense_ffn or 0.0
    else:
        widths.append(("gate", shape.moe.experts, "tokens"))
        ffn = shape.moe.shared_experts * shape.moe.shared_ffn
    if ffn:
        widths += [(f"FFN branch {n}", ffn, "width") for n in range(shape.ffn_branches)]
        widths.append(("FFN output", h, "tokens"))
    for name, width, sharding in widths:
        yield CachedTensor(f"output of {name}", row_bytes(width, "bf16"), "kept", sharding)


def activation_bytes(
    shape: ModelShape,
    kind: BlockKind,
    precision: Precision,
    policy: RecomputePolicy,
    plan: ParallelPlan,
    sequence: int,
    software: Software = PLAIN,
) -> float:
    """Bytes on one GPU that one micro-batch keeps in one block (docs/model.md, eq. M2).

    Unfused attention keeps its scores instead of a log-sum-exp, unless the policy recomputes them, and
    dropout its masks (eq. M9; arXiv 2205.05198, eqs. 1 to 4). Eager kernels keep more than fused ones:
    eq. M8.
    """
    tokens = plan.microbatch * sequence / plan.cp
    cut = {
        "tokens": plan.tp if plan.sequence_parallel else 1,
        "width": plan.tp,
        "none": 1,
    }
    unfused = software.attention == "unfused"
    tensors = [
        t for t in cached_tensors(shape, kind, precision, policy) if not (unfused and t.name == LOG_SUM_EXP)
    ]
    kept = fsum(tokens * t.bytes_per_token / cut[t.sharding] for t in tensors)
    if software.dropout:
        kept += tokens * MASK_BYTES * shape.hidden * _masks(kind, policy) / cut["tokens"]
    if software.kernels == "eager" and kind in ("dense", "moe", "mtp") and policy in ("none", "attention"):
        kept += tokens * _eager_bytes(shape, kind) / plan.tp
    if software.kernels == "eager" and kind == "head" and precision.loss == "fp32":
        # In the backward: log-softmax and two gradients in FP32, the narrow logits gone (12 B, not 10).
        more = 3 * row_bytes(shape.vocab, "fp32") - row_bytes(shape.vocab, precision.head)
        kept += tokens * (more - 2 * row_bytes(shape.vocab, "fp32")) / plan.tp
    if unfused and kind in ("dense", "moe", "mtp") and "scores" not in RECOMPUTED[policy]:
        score = SCORE_BYTES + DROPPED_SCORE_BYTES * software.dropout
        kept += tokens * score * shape.attention.heads / plan.tp * sequence
    return kept


def _masks(kind: BlockKind, policy: RecomputePolicy) -> int:
    """Dropout masks as wide as the hidden state: after the embedding, after attention and after the FFN.

    What recomputes pointwise work draws those of a layer again from the saved state of the generator.
    """
    if kind in ("embedding", "head"):
        return int(kind == "embedding")
    return 0 if policy in ("op", "full") else 2


def _eager_bytes(shape: ModelShape, kind: BlockKind) -> float:
    """Eq. M8: bytes a token that eager operators keep on top: silu(gate), keys and values repeated for all
    heads, and the routed rows in FP32 that the weighted sum reads."""
    a, moe = shape.attention, shape.moe
    repeated = (a.heads - a.kv_heads) * (a.qk_head_dim + a.v_head_dim)
    if kind == "dense" or moe is None:
        width, rows = shape.dense_ffn or 0, 0
    else:
        width = moe.top_k * moe.expert_ffn + moe.shared_experts * moe.shared_ffn
        rows = moe.top_k * shape.hidden
    return row_bytes(repeated + width * shape.ffn_gated, "bf16") + row_bytes(rows, "fp32")


def working_bytes(
    shape: ModelShape,
    kind: BlockKind,
    plan: ParallelPlan,
    precision: Precision,
    sequence: int,
    software: Software = PLAIN,
) -> float:
    """Bytes alive while one block runs backward: its tensors once, in BF16, nothing recomputed (eq. M3)."""
    plain = precision.model_copy(update={"activation_cache": "bf16", "head": "bf16"})
    return activation_bytes(shape, kind, plain, "none", plan, sequence, software)


def _tensors(
    shape: ModelShape, kind: BlockKind, precision: Precision, policy: RecomputePolicy
) -> Iterator[CachedTensor]:
    h = shape.hidden
    if kind == "embedding":
        yield CachedTensor("token ids", 8.0, "residual", "none")
        return
    if kind == "head":
        yield CachedTensor("norm input", row_bytes(h, "bf16"), "residual", "tokens")
        yield CachedTensor("head input", row_bytes(h, precision.head), "norm output", "tokens")
        yield CachedTensor("logits", row_bytes(shape.vocab, precision.head), "kept", "width")
        if precision.loss == "fp32":  # a copy in FP32, and its log-softmax
            yield CachedTensor("logits in FP32", 2 * row_bytes(shape.vocab, "fp32"), "kept", "width")
        return
    if kind == "mtp":
        yield CachedTensor("MTP norm inputs", 2 * row_bytes(h, "bf16"), "residual", "tokens")
        yield CachedTensor(
            "projection input", row_bytes(2 * h, precision.activation_cache), "norm output", "tokens"
        )
    yield from _attention(shape, precision, policy)
    if kind == "dense" or shape.moe is None:
        assert shape.dense_ffn is not None
        yield from _ffn_input(shape, precision)
        yield from _swiglu("FFN", 1.0, shape.dense_ffn, precision, "width", shape.ffn_branches)
    else:
        yield from _ffn_input(shape, precision)
        yield from _experts(shape, shape.moe, precision)


def _attention(shape: ModelShape, precision: Precision, policy: RecomputePolicy) -> Iterator[CachedTensor]:
    a, h, cache = shape.attention, shape.hidden, precision.activation_cache
    yield CachedTensor("attention norm input", row_bytes(h, "bf16"), "residual", "tokens")
    yield CachedTensor("attention input", row_bytes(h, cache), "norm output", "tokens")
    q, k, v = a.heads * a.qk_head_dim, a.kv_heads * a.qk_head_dim, a.kv_heads * a.v_head_dim
    if isinstance(a, MLA):
        latents = (a.q_lora_rank or 0) + a.kv_lora_rank
        yield CachedTensor("latents", row_bytes(latents + a.qk_rope_dim, "bf16"), "latent", "none")
        yield CachedTensor("normalised latents", row_bytes(latents, cache), "norm output", "none")
        yield CachedTensor("q, k, v", row_bytes(q + k + v, "bf16"), "expanded", "width")
    else:
        if a.qk_norm:
            yield CachedTensor("normalised q, k", row_bytes(q + k, "bf16"), "norm output", "width")
        yield CachedTensor("q, k, v", row_bytes(q + k + v, "bf16"), "kept", "width")
    out = a.heads * a.v_head_dim
    out_bytes = out * E5M6_BYTES if policy == "deepseek-v3" else row_bytes(out, "bf16")
    yield CachedTensor("attention output", out_bytes, "kept", "width")
    yield CachedTensor(LOG_SUM_EXP, a.heads * BYTES_PER_ELEMENT["fp32"], "kept", "width")


def _ffn_input(shape: ModelShape, precision: Precision) -> Iterator[CachedTensor]:
    yield CachedTensor("FFN norm input", row_bytes(shape.hidden, "bf16"), "kept", "tokens")
    yield CachedTensor(
        "FFN input", row_bytes(shape.hidden, precision.activation_cache), "norm output", "tokens"
    )


def _swiglu(
    name: str, rows: float, width: int, precision: Precision, sharding: Sharding, branches: int = 2
) -> Iterator[CachedTensor]:
    cache = precision.activation_cache
    yield CachedTensor(f"{name} gate and up", rows * row_bytes(branches * width, cache), "kept", sharding)
    yield CachedTensor(f"{name} SwiGLU output", rows * row_bytes(width, cache), "swiglu output", sharding)


def _experts(shape: ModelShape, moe: MoE, precision: Precision) -> Iterator[CachedTensor]:
    """Tensor parallelism of the experts gathers rows and cuts widths: per GPU only the rows' tokens count."""
    fp32 = BYTES_PER_ELEMENT["fp32"]
    yield CachedTensor("gate scores", moe.experts * fp32, "kept", "tokens")
    yield CachedTensor("chosen experts and weights", moe.top_k * 2 * fp32, "kept", "tokens")
    rows = moe.top_k * row_bytes(shape.hidden, precision.activation_cache)
    yield CachedTensor("dispatched rows", rows, "linear input", "tokens")
    yield from _swiglu("experts", moe.top_k, moe.expert_ffn, precision, "tokens")
    if moe.shared_experts:
        width = moe.shared_experts * moe.shared_ffn
        yield from _swiglu("shared experts", 1.0, width, precision, "width")
