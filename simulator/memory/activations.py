"""Tensors that a block keeps from its forward to its backward pass, for each choice of recompute."""

from __future__ import annotations

from collections.abc import Iterator
from math import fsum

from moesim.simulator.frameworks.software import PLAIN, Software
from moesim.simulator.model.block import BlockShape
from moesim.simulator.model.operator import BlockKind
from moesim.simulator.model.precision import Precision, row_bytes
from moesim.simulator.model.recompute import CachedTensor, Module, Recompute, RecomputePolicy, Role
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario.parallel import ParallelPlan

SCORE_BYTES = 2.0
"""Bytes of one score's softmax output, in 16 bits."""
MASK_BYTES = 1.0
"""Bytes of one element's dropout mask."""
DROPPED_SCORE_BYTES = MASK_BYTES + 2.0
"""Bytes that dropout adds to one score: its mask, and its output in 16 bits."""

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
"""Roles of the tensors that each policy computes again in the backward pass instead of keeping them."""


def cached_tensors(
    shape: ModelShape,
    kind: BlockKind,
    precision: Precision,
    policy: Recompute,
    unfused: bool = False,
) -> tuple[CachedTensor, ...]:
    """Return the tensors of one block that stay in memory between its forward and its backward pass.

    Attention scores are never listed: flash attention does not store them, and for `unfused` attention
    `activation_bytes` adds them. The loss overwrites the logits with their gradient, so they are one tensor,
    in the head's format. The policy `full` and lists of modules (eq. M11) recompute layers only; embedding
    and head keep their tensors.
    """
    block = shape.block(kind)
    if policy == "op" and block.layer is not None:
        return tuple(_kept_by_op(shape, block, precision, unfused))
    tensors = _tensors(shape, block, precision, policy, unfused)
    if not isinstance(policy, str):
        return tuple(t for t in tensors if t.modules.isdisjoint(policy))
    dropped = frozenset() if block.is_head and policy in ("full", "op") else RECOMPUTED[policy]
    return tuple(t for t in tensors if t.role not in dropped)


def _kept_by_op(
    shape: ModelShape, block: BlockShape, precision: Precision, unfused: bool
) -> Iterator[CachedTensor]:
    """Tensors that the policy `op` keeps in one layer (eq. M7).

    It keeps the block input, the outputs of the core attention and of both all-to-alls, and the output of the
    first, third, ... dense GEMM. The GEMMs are ordered as in torchtitan 0.2.2, which counts calls and leaves
    out grouped GEMMs and routers (its default of `per_op_sac_force_recompute_mm_shapes_by_fqns`).
    """
    assert block.layer is not None
    attention, feed_forward = block.layer.attention, block.layer.feed_forward
    yield from (t for t in _tensors(shape, block, precision, "none", unfused) if t.kept_by_op)
    outputs = [*attention.gemm_outputs(shape.hidden), *feed_forward.gemm_outputs(shape.hidden)]
    for out in outputs[::2]:
        size, whole = row_bytes(out.width, "bf16"), out.row_parallel
        yield CachedTensor(f"output of {out.name}", size, "kept", out.sharding, whole_in_dtensor=whole)
    yield from feed_forward.kept_by_op(shape.hidden)


CLAMPED_ELEMENTS = {"repeated": 3, "split": 2}
"""BF16 elements that a clamped SwiGLU keeps beyond eager or fused SwiGLU, for each element of its output, by
`software.expert_biases`. torchtitan: the clamped gate, its sigmoid, their product and the raised second
factor, less the SiLU. Megatron core: both clamped branches, beside those that its clamps read."""


def activation_bytes(
    shape: ModelShape,
    kind: BlockKind,
    precision: Precision,
    policy: Recompute,
    plan: ParallelPlan,
    sequence: int,
    software: Software = PLAIN,
) -> float:
    """Bytes on one GPU that one micro-batch keeps in one block (docs/model.md, eq. M2).

    Unfused attention keeps its scores instead of a log-sum-exp, unless the policy recomputes them, and
    dropout keeps its masks (eq. M9; arXiv 2205.05198, eqs. 1 to 4). Eager kernels keep more than fused ones
    (eq. M8), experts with buffers of a fixed size more than their rows take (eq. O20), and tensor
    parallelism through DTensor whole tensors in the place of their shards (eq. M46).
    """
    tokens = plan.microbatch * sequence / plan.cp
    cut = {
        "tokens": plan.tp if plan.sequence_parallel else 1,
        "width": plan.tp,
        "none": 1,
    }
    unfused, block = software.attention == "unfused", shape.block(kind)
    tensors = cached_tensors(shape, kind, precision, policy, unfused)
    if policy == "op" and block.layer is not None and not software.op_keeps_transfers:
        sent = {tensor.name for tensor in block.layer.feed_forward.kept_by_op(shape.hidden)}
        tensors = tuple(tensor for tensor in tensors if tensor.name not in sent)
    static = software.static_experts
    rows = 1.0 if static is None else static.kept
    kept = fsum(
        tokens
        * t.bytes_per_token
        * (rows if t.routed else 1.0)
        / (1 if software.dtensor and t.whole_in_dtensor else cut[t.sharding])
        for t in tensors
    )
    if software.dtensor and plan.tp > 1 and policy == "op" and block.layer is not None:
        kept += tokens * row_bytes(block.layer.halves * shape.hidden, "bf16") / cut["tokens"]
    clamped = CLAMPED_ELEMENTS.get(software.expert_biases, 0) if block.routed else 0
    again = policy != "none" if isinstance(policy, str) else not {"moe_act", "moe"}.isdisjoint(policy)
    if software.expert_biases == "repeated" and software.kernels != "eager":
        clamped = 0
    if clamped and not again and shape.moe is not None and shape.moe.expert_bias:
        elements = clamped * shape.moe.routed_rows * shape.moe.expert_ffn
        kept += tokens * row_bytes(elements, "bf16") / plan.tp
    if software.dropout:
        # The embedding has a mask, and a layer one behind each half. Policies that recompute pointwise work
        # draw those of a layer again from the generator's saved state.
        halves = 0 if block.layer is None or policy in ("op", "full") else block.layer.halves
        masks = block.is_embedding or halves
        kept += tokens * MASK_BYTES * shape.hidden * masks / cut["tokens"]
    if block.is_head:
        kept -= tokens * _not_kept_by_loss(shape, precision, software, plan.pp > 1) / plan.tp
    if "eager" in (software.kernels, software.expert_rows):
        kept += tokens * _eager_bytes(shape, block, policy, rows=software.kernels == "fused") / plan.tp
    repeated = "scores" in RECOMPUTED[policy] if isinstance(policy, str) else "core_attn" in policy
    if unfused and block.layer is not None and not repeated:
        score = SCORE_BYTES + DROPPED_SCORE_BYTES * software.dropout
        kept += tokens * score * block.layer.attention.unfused_scores(sequence) / plan.tp
    return kept


def _not_kept_by_loss(shape: ModelShape, precision: Precision, software: Software, pipeline: bool) -> float:
    """Bytes per token of the logits that a loss in FP32 does not keep until its backward (eqs. M30, M44).

    Megatron-LM's losses keep the softmax in FP32 alone, in the place of its input: neither the 16-bit logits,
    which the cast frees, nor a second copy (NVIDIA/Megatron-LM@core_v0.10.0 `cross_entropy.py`,
    `fused_cross_entropy.py`). PyTorch's own keeps its log-softmax, compiled the 16-bit logits; the last stage
    of a pipeline holds these in any case.
    """
    if precision.loss != "fp32":
        return 0.0
    if software.loss_of_torch:
        logits, wide = row_bytes(shape.vocab, precision.logits), row_bytes(shape.vocab, "fp32")
        kept = logits if software.loss == "compiled" else wide + logits * pipeline
        return logits + 2 * wide - kept
    if software.loss == "fused":
        return 0.0
    return row_bytes(shape.vocab, precision.head) + row_bytes(shape.vocab, "fp32")


def _eager_bytes(shape: ModelShape, block: BlockShape, policy: Recompute, *, rows: bool) -> float:
    """Extra bytes per token that eager operators keep where their layer is not recomputed (eq. M8).

    `rows`: only those of the experts' rows are eager.
    """
    repeated: frozenset[Module] = frozenset(() if isinstance(policy, str) else policy)
    if block.layer is None or (isinstance(policy, str) and policy not in ("none", "attention")):
        return 0.0
    narrow, wide = block.layer.feed_forward.eager_elements(shape.hidden, repeated)
    return (0.0 if rows else row_bytes(narrow, "bf16")) + row_bytes(wide, "fp32")


def working_bytes(
    shape: ModelShape,
    kind: BlockKind,
    plan: ParallelPlan,
    precision: Precision,
    sequence: int,
    software: Software = PLAIN,
) -> float:
    """Bytes alive while one block runs backward: all its tensors in BF16, none recomputed (eq. M3)."""
    plain = precision.model_copy(update={"activation_cache": "bf16", "head": "bf16"})
    if software.static_experts is not None:  # the block that runs has its buffers whole
        whole = software.static_experts.model_copy(update={"stash": 0.0})
        software = software.model_copy(update={"static_experts": whole})
    return activation_bytes(shape, kind, plain, "none", plan, sequence, software)


def stashed_bytes(
    shape: ModelShape,
    kind: BlockKind,
    precision: Precision,
    policy: Recompute,
    plan: ParallelPlan,
    sequence: int,
    software: Software,
) -> float:
    """Bytes that a block copies to the paged buffer of its experts, and back, at the mean rows (eq. O20)."""
    static = software.static_experts
    if static is None or not static.stash:
        return 0.0
    tokens = plan.microbatch * sequence / plan.cp
    tensors = (t for t in cached_tensors(shape, kind, precision, policy) if t.routed)
    return tokens / (plan.tp if plan.sequence_parallel else 1) * fsum(t.bytes_per_token for t in tensors)


def _tensors(
    shape: ModelShape, block: BlockShape, precision: Precision, policy: Recompute, unfused: bool
) -> Iterator[CachedTensor]:
    h, cache = shape.hidden, precision.activation_cache
    if block.is_embedding:
        yield CachedTensor("token ids", 8.0, "residual", "none")
        return
    if block.layer is None:
        yield CachedTensor("norm input", row_bytes(h, "bf16"), "residual", "tokens")
        head_input = row_bytes(h, precision.head)
        yield CachedTensor("head input", head_input, "norm output", "tokens", whole_in_dtensor=True)
        yield CachedTensor("logits", row_bytes(shape.vocab, precision.logits), "kept", "width")
        if precision.loss == "fp32":  # one copy in FP32, and one of its log-softmax
            yield CachedTensor("logits in FP32", 2 * row_bytes(shape.vocab, "fp32"), "kept", "width")
        return
    if block.is_mtp:
        norm_inputs = 2 * row_bytes(h, "bf16")
        yield CachedTensor("MTP norm inputs", norm_inputs, "residual", "tokens", kept_by_op=True)
        yield CachedTensor("projection input", row_bytes(2 * h, cache), "norm output", "tokens")
    normalised, inside = row_bytes(h, cache), frozenset[Module]({"layernorm"})
    attention, feed_forward = block.layer.attention, block.layer.feed_forward
    residual = row_bytes(h * block.layer.streams, "bf16")
    # A layer is recomputed from the input of its first norm.
    if not attention.empty:
        yield CachedTensor("attention norm input", residual, "residual", "tokens", kept_by_op=True)
        yield CachedTensor(
            "attention input", normalised, "norm output", "tokens", modules=inside, whole_in_dtensor=True
        )
        yield from attention.cached_tensors(precision, policy, unfused)
    if not feed_forward.empty:
        if attention.empty:
            yield CachedTensor("FFN norm input", residual, "residual", "tokens", kept_by_op=True)
        else:
            yield CachedTensor("FFN norm input", residual, "kept", "tokens")
        yield CachedTensor(
            "FFN input", normalised, "norm output", "tokens", modules=inside, whole_in_dtensor=True
        )
        yield from feed_forward.cached_tensors(h, precision)
    if block.layer.streams > 1:  # the mixed input of each half, before its norm, and its output
        around = block.layer.halves * 2 * row_bytes(h, "bf16")
        yield CachedTensor("inputs and outputs of the halves", around, "norm output", "tokens")
    if block.layer.sandwich_norms:
        behind = block.layer.halves * row_bytes(h, "bf16")
        yield CachedTensor("inputs of the norms behind", behind, "kept", "tokens")
