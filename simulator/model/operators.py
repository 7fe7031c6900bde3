"""Every operator that one GPU runs for one block and one micro-batch, by phase (pure, no seconds)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from math import fsum

from moesim.hwmodels.errors import InputError
from moesim.simulator.model import operators_attention as attention
from moesim.simulator.model import operators_ends as ends
from moesim.simulator.model import operators_experts as experts
from moesim.simulator.model import operators_ffn as ffn
from moesim.simulator.model.operator import COUNTED_GEMM_CLASSES, BlockKind, Operator, Phase
from moesim.simulator.model.operators_ends import optimizer_operators
from moesim.simulator.model.operators_parts import Work, again, cast, scale_rows
from moesim.simulator.model.precision import Precision
from moesim.simulator.model.shape import ModelShape

__all__ = [
    "RECOMPUTE",
    "block_operators",
    "expected_received_tokens",
    "model_flop",
    "optimizer_operators",
    "scale_rows",
]

RECOMPUTE = ("none", "attention", "selective", "op", "full")
"""none; core attention where its scores go through memory; norms, MLA up-projections and SwiGLU outputs
(DeepSeek-V3 report 3.2.3); all but core attention and every second product; the whole block.

`full` repeats the compute of the forward in the input gradient; a second dispatch is not included."""


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
    recompute: str = "selective",
    redundant_experts: int = 0,
    unfused_attention: bool = False,
    dropout: bool = False,
    expert_tp: int = 1,
    sequence_parallel: bool = True,
) -> dict[Phase, tuple[Operator, ...]]:
    """Operators of a block on one GPU, by phase; phases that the block does not have are absent.

    `tokens`: rows of the micro-batch in one model replica (one CP rank holds tokens / cp). `sequence`:
    tokens of one sequence, for the causal core attention. `received_rows`: expert rows that this rank
    computes; `received_tokens`: distinct tokens behind them (expected for uniform routing by default).
    `redundant_experts`: replicas beyond one an expert, which all ranks share evenly. `unfused_attention`:
    scores through memory, as before flash attention, with `dropout` in a kernel of its own. `expert_tp`:
    ranks that split an expert's FFN, each for the received rows of all of them. `sequence_parallel`:
    norms, residuals and the like are split over the tensor-parallel ranks; without it each does all of them.
    The result is cached: do not change it. Raises InputError for an unknown recompute policy, a MoE
    block without rows, and a TP that does not divide heads or FFN widths.
    """
    _check(shape, kind, tp, received_rows, recompute)
    if received_tokens is None:
        received_tokens = received_rows * expected_received_tokens(shape, ep)
    w = Work(
        shape,
        precision.linear == "fp8" and precision.scaling == "tile",
        tokens / cp,
        sequence,
        tp,
        ep,
        received_rows,
        received_tokens,
        recompute,
        redundant_experts,
        unfused_attention,
        dropout,
        precision.linear == "fp8" and precision.scaling == "tensor",
        expert_tp,
        sequence_parallel,
    )
    if kind == "embedding":
        phases = {"mlp F": ends.embedding_forward(w), "mlp W": ends.embedding_weight_gradient(w)}
    elif kind == "head":
        phases = dict(zip(("mlp F", "mlp I", "mlp W"), ends.head_operators(w, precision), strict=True))
    else:
        phases = _layer(w, precision, moe=kind == "moe" or (kind == "mtp" and shape.moe is not None))
        if kind == "mtp":
            forward, backward, weight = ends.mtp_projection(w)
            phases["attn F"] = forward + phases["attn F"]
            phases["attn I"] = phases["attn I"] + backward
            phases["attn W"] = phases["attn W"] + weight
    return {phase: tuple(operators) for phase, operators in phases.items()}  # type: ignore[misc]


def _layer(w: Work, precision: Precision, moe: bool) -> dict[str, list[Operator]]:
    attention_forward = attention.attention_forward(w)
    if not moe:
        phases = {
            "attn F": attention_forward,
            "mlp F": ffn.dense_forward(w),
            "mlp I": ffn.dense_input_gradient(w),
            "mlp W": list(ffn.swiglu_weight_gradient(w, "ffn", ffn.dense_width(w), w.shape.ffn_branches)),
            "attn I": attention.attention_input_gradient(w),
            "attn W": attention.attention_weight_gradient(w),
        }
    else:
        send = [cast("ffn_norm.cast", "F", w.tokens, w.shape.hidden, "token")] if w.fp8 else []
        phases = {
            "attn F": [*attention_forward, *ffn.gate_forward(w), *send],
            "mlp F": experts.experts_forward(w),
            "mlp I": experts.experts_input_gradient(w),
            "mlp W": experts.experts_weight_gradient(w),
            "attn I": [*ffn.gate_backward(w), *attention.attention_input_gradient(w)],
            "attn W": attention.attention_weight_gradient(w),
        }
        if w.ep > 1:
            phases |= {
                "dispatch F": experts.dispatch_operators(w),
                "combine F": [],
                "combine B": experts.combine_backward_operators(w, precision.dispatch == "fp8"),
                "dispatch B": [],
            }
    if w.recompute == "op":
        phases["mlp I"] = again(_every_second([*phases["attn F"], *phases["mlp F"]])) + phases["mlp I"]
    if w.recompute == "full":
        phases["mlp I"] = again([*phases["attn F"], *phases["mlp F"]]) + phases["mlp I"]
    return phases


def _every_second(operators: Iterable[Operator]) -> Iterator[Operator]:
    """What the policy `op` computes again: no core attention, half of the dense products, all the rest."""
    for op in operators:
        if op.cls == "attention_forward":
            continue
        if op.cls == "gemm" and op.gemm is not None:
            half = replace(op.gemm, n=max(1, op.gemm.n // 2))
            op = replace(op, flop=op.flop / 2, bytes_written=op.bytes_written / 2, gemm=half)
        yield op


def expected_received_tokens(shape: ModelShape, ep: int) -> float:
    """Distinct tokens per received row, tokens choosing their experts uniformly within their groups.

    Eq. C3: with E experts within reach, e of them here, k chosen: P(token comes) =
    1 - C(E - e, k) / C(E, k), divided by the k e / E rows that it brings on average.
    """
    m = shape.moe
    if m is None:
        return 1.0
    here = min(max(1, m.experts // ep), m.experts)
    reach = m.experts  # DeepSeek-V3's group-limited gate: 0.936 sampled, 0.959 here
    if here >= reach:
        return 1.0 / m.top_k
    miss = 1.0
    for i in range(m.top_k):
        miss *= max(0.0, (reach - here - i) / (reach - i))
    return (1.0 - miss) * reach / (m.top_k * here)


def model_flop(operators: Iterable[Operator]) -> float:
    """FLOPs that published MFUs count: products and core attention, no gate, no recompute."""
    counted = COUNTED_GEMM_CLASSES | {"attention_forward", "attention_backward"}
    return fsum(op.flop - op.uncounted_flop for op in operators if op.cls in counted and not op.recompute)


def _check(shape: ModelShape, kind: BlockKind, tp: int, rows: float, recompute: str) -> None:
    if recompute not in RECOMPUTE:
        raise InputError(f"recompute={recompute!r} is not one of {', '.join(RECOMPUTE)}")
    if kind == "moe" and shape.moe is None:
        raise InputError(f"model {shape.name} has no experts, so no block of kind 'moe'")
    if (kind == "moe" or (kind == "mtp" and shape.moe)) and not rows > 0:
        raise InputError(f"a {kind} block needs received_rows above 0, not {rows:g}")
    if kind in ("dense", "moe", "mtp") and shape.attention.heads % tp:
        raise InputError(f"parallel.tp={tp} does not divide the {shape.attention.heads} attention heads")
    if kind == "dense" and shape.dense_ffn is not None and shape.dense_ffn % tp:
        raise InputError(f"parallel.tp={tp} does not divide the dense FFN width {shape.dense_ffn}")
