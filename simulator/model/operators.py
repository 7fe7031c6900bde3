"""Lists the operators that one GPU runs for one block and one micro-batch, by phase (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from math import fsum

from msgspec.structs import replace

from moesim.hwmodels.errors import InputError
from moesim.simulator.model.block import (
    BlockShape,
    Layer,
    attention_forward,
    attention_input_gradient,
    site_backward,
    site_forward,
)
from moesim.simulator.model.operator import (
    CORE_ATTENTION,
    COUNTED_GEMM_CLASSES,
    SCAN_CLASSES,
    BlockKind,
    Operator,
    Phase,
    Work,
)
from moesim.simulator.model.precision import BYTES_PER_ELEMENT, Precision
from moesim.simulator.model.primitives import (
    BF16,
    FP32,
    add,
    gemm,
    linear_backward,
    linear_forward,
    move,
    norm,
    norm_backward,
    recomputed,
    weight_cast_bytes,
    weight_gradient,
)
from moesim.simulator.model.recompute import Module
from moesim.simulator.model.shape import ModelShape

# -- embedding, and head with its loss -----------------------------------------------------------------

INDEX_BYTES = 8.0
"""Bytes of one token index (int64)."""


def embedding_forward(w: Work, positions: bool = False) -> list[Operator]:
    """Gather of one row per token, and the sum with the row of its position if positions are learned."""
    size = w.norm_tokens * w.hidden * BF16
    gather = move("embedding", "embedding", "F", size + INDEX_BYTES * w.tokens, size, variant="gather")
    return [gather, add("embedding.positions", "F", w.norm_tokens, w.hidden)] if positions else [gather]


def embedding_weight_gradient(w: Work) -> list[Operator]:
    """Scatter-add of one row per token into the FP32 gradient."""
    elements = w.norm_tokens * w.hidden
    read = elements * (BF16 + FP32) + INDEX_BYTES * w.tokens
    return [move("embedding.wgrad", "embedding", "W", read, elements * FP32, variant="scatter")]


def head_operators(
    w: Work, vocab: int, precision: Precision
) -> tuple[list[Operator], list[Operator], list[Operator]]:
    """Final norm, output projection and loss, as (forward, input gradient, weight gradient).

    The loss is a softmax cross-entropy over logits in memory. Its forward reads them twice (for the maximum,
    and for the sum with the label's logit); its backward reads and writes them once.
    """
    h, t = w.hidden, w.tokens
    columns = vocab / w.tp
    wide = precision.loss == "fp32"
    logits = t * columns * (FP32 if wide else BYTES_PER_ELEMENT[precision.logits])
    if precision.head == "fp8":
        output, gradient = linear_forward(w, "head", t, columns, h), linear_backward(w, "head", t, columns, h)
        weight = weight_gradient(w, "head", t, columns, h)
    else:
        output = [gemm("head", "F", t, columns, h, precision.head)]
        gradient = [gemm("head.dgrad", "I", t, h, columns, precision.head)]
        weight = gemm("head.wgrad", "W", columns, h, t, precision.head, cls="wgrad_gemm")
    forward = [
        norm("final_norm", "F", w.norm_tokens, h),
        *output,
        move("loss", "loss", "F", 2 * logits, FP32 * t, variant="forward"),
    ]
    backward = [
        move("loss.backward", "loss", "I", logits, logits, variant="backward"),
        *gradient,
        norm_backward("final_norm.backward", w.norm_tokens, h),
    ]
    if wide:
        narrow = t * columns * BYTES_PER_ELEMENT[precision.logits]
        forward.insert(len(forward) - 1, move("logits.widen", "copy", "F", narrow, logits, variant="widen"))
        backward.insert(1, move("logits.narrow", "copy", "I", logits, narrow, variant="narrow"))
    return forward, backward, [weight]


def mtp_projection(w: Work) -> tuple[list[Operator], list[Operator], list[Operator]]:
    """What a multi-token-prediction module runs besides its layer.

    It embeds the next token, norms it and the hidden state, and projects both from 2 x hidden. Returns
    (forward, input gradient, weight gradient). Source: DeepSeek-V3 report, section 2.2.
    """
    h, t, m = w.hidden, w.tokens, w.norm_tokens
    joined = m * 2 * h * BF16
    forward = [
        *embedding_forward(w),
        norm("mtp.hidden_norm", "F", m, h),
        norm("mtp.embedding_norm", "F", m, h),
        move("mtp.join", "copy", "F", joined, joined, variant="pack"),
        *linear_forward(w, "mtp.projection", t, h, 2 * h),
    ]
    backward = [
        *linear_backward(w, "mtp.projection", t, h, 2 * h),
        move("mtp.split", "copy", "I", joined, joined, variant="pack"),
        norm_backward("mtp.hidden_norm.backward", m, h),
        norm_backward("mtp.embedding_norm.backward", m, h),
    ]
    weight = [weight_gradient(w, "mtp.projection", t, h, 2 * h), *embedding_weight_gradient(w)]
    return forward, backward, weight


RECOMPUTE = ("none", "attention", "selective", "op", "full")
"""Recompute policies of the operators, besides lists of modules. `attention` repeats the core attention where
its scores go through memory; `selective` repeats norms, MLA up-projections and SwiGLU outputs (DeepSeek-V3
report 3.2.3); `op` repeats all but the core attention and every second dense GEMM; `full` repeats the whole
block.

`full` repeats the compute of the forward in the input gradient, but not the dispatch."""


@lru_cache(maxsize=1024)
def block_operators(
    shape: ModelShape,
    kind: BlockKind,
    precision: Precision,
    *,
    tokens: int,
    sequence: int,
    tp: int = 1,
    cp: int = 1,
    ep: int = 1,
    received_rows: float = 0.0,
    received_tokens: float | None = None,
    recompute: str | tuple[Module, ...] = "selective",
    redundant_experts: int = 0,
    unfused_attention: bool = False,
    flex_attention: bool = False,
    dropout: bool = False,
    expert_tp: int = 1,
    sequence_parallel: bool = True,
    current_scales: bool = False,
    separate_casts: bool = False,
    own_latents: bool = False,
    ring_attention: bool = False,
) -> dict[Phase, tuple[Operator, ...]]:
    """Return the operators of a block on one GPU, by phase; phases that the block does not have are absent.

    `tokens` are the rows of the micro-batch in one model replica (one CP rank holds tokens / cp), `sequence`
    the tokens of one sequence, for the causal core attention. `received_rows` are the expert rows that this
    rank computes, `received_tokens` the distinct tokens among them (by default the expectation for uniform
    routing), `redundant_experts` the replicas beyond one per expert; other options are `Work`'s. Raises
    InputError for an unknown policy, a MoE block without rows, and a TP that does not divide heads or widths.
    """
    block = _checked(shape, kind, tp, received_rows, recompute)
    if received_tokens is None:
        received_tokens = received_rows * expected_received_tokens(shape, ep)
    w = Work(
        hidden=shape.hidden,
        fp8=precision.linear == "fp8" and precision.scaling == "tile",
        tokens=tokens / cp,
        sequence=sequence,
        tp=tp,
        ep=ep,
        rows=received_rows,
        received_tokens=received_tokens,
        recompute=recompute,
        redundant_experts=redundant_experts,
        unfused=unfused_attention,
        flex=flex_attention,
        dropout=dropout,
        current_scales=current_scales,
        separate_casts=separate_casts,
        expert_tp=expert_tp,
        sequence_parallel=sequence_parallel,
        own_latents=own_latents,
        pieces=cp if ring_attention else 1,
        fp8_tensor=precision.linear == "fp8" and precision.scaling == "tensor",
        blocks=precision.blocks,
        attention=precision.attention_variant,
    )
    return {phase: tuple(found) for phase, found in _phases(shape, block, w, precision).items()}


def _phases(
    shape: ModelShape, block: BlockShape, w: Work, precision: Precision
) -> dict[Phase, list[Operator]]:
    if block.layer is None:
        if block.is_embedding:
            return {
                "mlp F": embedding_forward(w, shape.learned_positions > 0),
                "mlp W": embedding_weight_gradient(w),
            }
        forward, backward, weight = head_operators(w, shape.vocab, precision)
        return {"mlp F": forward, "mlp I": backward, "mlp W": weight}
    phases = _layer(w, precision, block.layer)
    if block.is_mtp:
        forward, backward, weight = mtp_projection(w)
        phases["attn F"] = forward + phases["attn F"]
        phases["attn I"] += backward
        phases["attn W"] = phases["attn W"] + weight
    return phases


def _layer(w: Work, precision: Precision, layer: Layer) -> dict[Phase, list[Operator]]:
    attention, feed_forward = layer.attention, layer.feed_forward
    phases: dict[Phase, list[Operator]] = {
        "attn F": [*attention_forward(w, layer), *feed_forward.after_attention(w)],
        "mlp F": feed_forward.forward(w),
        "mlp I": feed_forward.input_gradient(w),
        "mlp W": feed_forward.weight_gradient(w),
        "attn I": [*feed_forward.before_attention_gradient(w), *attention_input_gradient(w, layer)],
        "attn W": attention.weight_gradient(w),
        **feed_forward.communication(w, precision),
    }
    if layer.streams > 1:  # the kernels of hyper-connections go around both halves
        halves: tuple[tuple[str, Phase, Phase, bool], ...] = (
            ("attention", "attn F", "attn I", attention.empty),
            ("ffn", "mlp F", "mlp I", feed_forward.empty),
        )
        for site, forward, backward in (half[:3] for half in halves if not half[3]):
            pre, post = site_forward(w.norm_tokens, w.hidden, layer.streams, site)
            post_gradient, pre_gradient = site_backward(w.norm_tokens, w.hidden, layer.streams, site)
            phases[forward] = [pre, *phases[forward], post]
            phases[backward] = [post_gradient, *phases[backward], pre_gradient]
    if w.recompute == "op":
        phases["mlp I"] = recomputed(_every_second([*phases["attn F"], *phases["mlp F"]])) + phases["mlp I"]
    if w.recompute == "full":
        phases["mlp I"] = recomputed([*phases["attn F"], *phases["mlp F"]]) + phases["mlp I"]
    return phases


def _every_second(operators: Iterable[Operator]) -> Iterator[Operator]:
    """Operators that the policy `op` computes again: all but the core attention and half of the dense GEMMs.

    To leave out every second GEMM on average, each GEMM is halved.
    """
    for op in operators:
        if op.cls in CORE_ATTENTION:
            continue
        if op.cls == "gemm" and op.gemm is not None:
            half = replace(op.gemm, n=max(1, op.gemm.n // 2))
            op = replace(op, flop=op.flop / 2, bytes_written=op.bytes_written / 2, gemm=half)
        yield op


def expected_received_tokens(shape: ModelShape, ep: int) -> float:
    """Expected distinct tokens per received row if tokens choose their experts uniformly (eq. C3).

    With E experts, e of them on this rank and k chosen, a token comes with probability
    1 - C(E - e, k) / C(E, k), which is divided by the k e / E rows that it brings on average.
    """
    m = shape.moe
    if m is None:
        return 1.0
    here = min(max(1, m.experts // ep), m.experts)
    reach = m.scored  # DeepSeek-V3's group-limited gate gives 0.936 in samples, and 0.959 by this formula
    if here >= reach:
        return 1.0 / m.top_k
    miss = 1.0
    for i in range(m.top_k):
        miss *= max(0.0, (reach - here - i) / (reach - i))
    return (1.0 - miss) * reach / (m.top_k * here)


def model_flop(operators: Iterable[Operator]) -> float:
    """Sum the FLOPs that published MFUs count: GEMMs, attention and scans, without gate and recompute."""
    counted = COUNTED_GEMM_CLASSES | CORE_ATTENTION | SCAN_CLASSES
    return fsum(op.flop - op.uncounted_flop for op in operators if op.cls in counted and not op.recompute)


def _checked(
    shape: ModelShape, kind: BlockKind, tp: int, rows: float, recompute: str | tuple[Module, ...]
) -> BlockShape:
    if isinstance(recompute, str) and recompute not in RECOMPUTE:
        raise InputError(f"recompute={recompute!r} is not one of {', '.join(RECOMPUTE)}")
    block = shape.block(kind)
    if block.routed and not rows > 0:
        raise InputError(f"a {kind} block needs received_rows above 0, not {rows:g}")
    if block.layer is not None:
        for size, what in (*block.layer.attention.tp_limits(tp), *block.layer.feed_forward.tp_limits()):
            if size % tp:
                raise InputError(f"parallel.tp={tp} does not divide {what}")
    return block


def optimizer_operators(
    owned_parameters: float, precision: Precision, local_parameters: float = 0.0
) -> tuple[Operator, ...]:
    """Gradient norm and AdamW update of the parameters that this GPU owns; only bytes are counted.

    `local_parameters` are those whose BF16 copy this GPU quantises after the update (0 in BF16).
    Eq. C9: bytes per owned parameter = gradient + 2 x (master + 2 moments) + written copy; parameters in the
    format of the masters are the masters, without a copy.
    """
    gradient = BYTES_PER_ELEMENT[precision.gradients]
    state = BYTES_PER_ELEMENT[precision.master_weights] + 2 * BYTES_PER_ELEMENT[precision.moments]
    copy = BYTES_PER_ELEMENT[precision.parameters]
    written_copy = copy if precision.parameters != precision.master_weights else 0.0
    n = owned_parameters
    updated = n * (state + written_copy)
    out = [
        move("optimizer.gradient_norm", "optimizer", "W", n * gradient, 0.0, variant="norm"),
        move("optimizer.adamw", "optimizer", "W", n * (gradient + state), updated, variant="adamw"),
    ]
    if precision.linear != "bf16" and local_parameters:
        more, written = weight_cast_bytes(precision.blocks) if precision.blocks else (0.0, 1.0)
        n, read, dtype = local_parameters, local_parameters * (copy + more), precision.linear
        name, written = "optimizer.quantise", n * written
        out.append(move(name, "optimizer", "W", read, written, variant="quantise", dtype=dtype))
    return tuple(out)
