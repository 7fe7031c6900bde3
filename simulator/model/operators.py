"""Lists the operators that one GPU runs for one block and one micro-batch, by phase (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from math import fsum

from moesim.hwmodels.errors import InputError
from moesim.simulator.model.block import BlockShape, Layer
from moesim.simulator.model.embedding_head import (
    embedding_forward,
    embedding_weight_gradient,
    head_operators,
)
from moesim.simulator.model.hyper_connections import site_backward, site_forward
from moesim.simulator.model.mtp import mtp_projection
from moesim.simulator.model.operator import (
    CORE_ATTENTION,
    COUNTED_GEMM_CLASSES,
    SCAN_CLASSES,
    BlockKind,
    Operator,
    Phase,
)
from moesim.simulator.model.precision import Precision
from moesim.simulator.model.primitives import recomputed
from moesim.simulator.model.recompute import Module
from moesim.simulator.model.residual import attention_forward, attention_input_gradient
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.model.work import Work

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
) -> dict[Phase, tuple[Operator, ...]]:
    """Return the operators of a block on one GPU, by phase; phases that the block does not have are absent.

    `tokens` are the rows of the micro-batch in one model replica (one CP rank holds tokens / cp), `sequence`
    the tokens of one sequence, for the causal core attention. `received_rows` are the expert rows that this
    rank computes, `received_tokens` the distinct tokens among them (by default the expectation for uniform
    routing). `redundant_experts` are the replicas beyond one per expert, which all ranks share evenly. With
    `unfused_attention` the scores go through memory, and `dropout` takes a kernel of its own;
    `flex_attention` is the compiled kernel of PyTorch. `expert_tp` ranks split an expert's FFN, each for the
    received rows of all of them. With `sequence_parallel` the tensor-parallel ranks split element-wise work;
    with `own_latents` a rank forms MLA's latents from its own tokens. The result is cached. Raises InputError
    for an unknown recompute policy, a MoE block without rows, and a TP that does not divide heads or widths.
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
    )
    phases = _phases(shape, block, _in_formats(w, precision), precision)
    return {phase: tuple(operators) for phase, operators in phases.items()}


def _in_formats(w: Work, precision: Precision) -> Work:
    """Return the work with the number formats of `precision` beside FP8 with scales of tiles."""
    return replace(
        w,
        fp8_tensor=precision.linear == "fp8" and precision.scaling == "tensor",
        blocks=precision.blocks,
        attention=precision.attention_variant,
    )


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
        phases["attn I"] = phases["attn I"] + backward
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
    if layer.streams > 1:
        _add_streams(w, layer, phases)
    if w.recompute == "op":
        phases["mlp I"] = recomputed(_every_second([*phases["attn F"], *phases["mlp F"]])) + phases["mlp I"]
    if w.recompute == "full":
        phases["mlp I"] = recomputed([*phases["attn F"], *phases["mlp F"]]) + phases["mlp I"]
    return phases


def _add_streams(w: Work, layer: Layer, phases: dict[Phase, list[Operator]]) -> None:
    """Put the kernels of hyper-connections around both halves of a layer."""
    halves: tuple[tuple[str, Phase, Phase, bool], ...] = (
        ("attention", "attn F", "attn I", layer.attention.empty),
        ("ffn", "mlp F", "mlp I", layer.feed_forward.empty),
    )
    for site, forward, backward, empty in halves:
        if empty:
            continue
        pre, post = site_forward(w.norm_tokens, w.hidden, layer.streams, site)
        post_gradient, pre_gradient = site_backward(w.norm_tokens, w.hidden, layer.streams, site)
        phases[forward] = [pre, *phases[forward], post]
        phases[backward] = [post_gradient, *phases[backward], pre_gradient]


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
