"""Operators of one step of an inference engine on one GPU, by layer: prefills and decodes in one batch.

The list is that of fused engines (vLLM, SGLang, TensorRT-LLM): norms add the residual, one GEMM forms queries,
keys and values, activations are one kernel, experts are two grouped GEMMs. MLA decodes in the latent space
(absorbed: the up-projections of keys and values go to the query and the output, DeepSeek-V2 report, 2.1.2) and
prefills with keys and values formed per head.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moesim.hwmodels.errors import InputError
from moesim.simulator.model.attention.grouped_query import GroupedQueryAttention
from moesim.simulator.model.attention.mla import MLA
from moesim.simulator.model.attention.protocol import Attention
from moesim.simulator.model.feed_forward.moe import MoE
from moesim.simulator.model.operator import Dtype, GemmShape, Operator
from moesim.simulator.model.precision import BYTES_PER_ELEMENT
from moesim.simulator.model.primitives import BF16, FP32, gemm, move, norm
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.serving.scheduler import Batch


@dataclass(frozen=True, slots=True)
class Split:
    """How a model is spread over the ranks of a replica, and in which formats.

    `tp`: ranks that split attention and dense FFNs; `expert_tp`, `ep`: that split and share out the experts.
    `weights`, `experts`, `cache`: formats of linear layers, of routed experts, of keys and values.
    `redundant_experts`: replicas over all ranks of a group.
    """

    tp: int = 1
    ep: int = 1
    expert_tp: int = 1
    weights: Dtype = "bf16"
    experts: Dtype = "bf16"
    cache: Dtype = "bf16"
    redundant_experts: int = 0


@dataclass(frozen=True, slots=True)
class Rows:
    """Token rows of one rank's step: all, those of decodes and prefills, the sequences whose logits are needed."""

    tokens: float
    decodes: float
    prefills: float
    sequences: float
    context: float
    pairs: float

    @classmethod
    def of(cls, batch: Batch, per_step: int = 1) -> Rows:
        """Rows of a batch whose decodes bring `per_step` tokens each (1 and the drafts that are checked)."""
        decodes = float(batch.decodes * per_step)
        return cls(
            decodes + batch.prefill_tokens, decodes, float(batch.prefill_tokens), decodes + batch.prefills,
            float(batch.context), float(batch.prefill_pairs),
        )  # fmt: skip


def cache_bytes_per_token(shape: ModelShape, split: Split) -> float:
    """Bytes of keys and values of one token in all layers on one rank; MLA's latent is on every rank of TP."""
    return sum(_cache_row(layer.attention, split) for layer in shape.layers)


def _cache_row(attention: Attention, split: Split) -> float:
    element = BYTES_PER_ELEMENT[split.cache]
    if isinstance(attention, MLA):
        return (attention.kv_lora_rank + attention.qk_rope_dim) * element
    if isinstance(attention, GroupedQueryAttention):
        heads = max(attention.kv_heads / split.tp, 1.0)
        return heads * (attention.sizes.qk_head_dim + attention.sizes.v_head_dim) * element
    raise InputError(f"serving knows grouped-query and latent attention so far, not {attention.kind!r}")


# -- attention ---------------------------------------------------------------------------------------


def _linear(name: str, m: float, n: float, k: float, dtype: Dtype) -> list[Operator]:
    """A linear layer; FP8 and FP4 quantise the activation first, in one kernel."""
    if not m:
        return []
    product = gemm(name, "F", m, n, k, dtype)
    if dtype == "bf16":
        return [product]
    written = m * k * BYTES_PER_ELEMENT[dtype]
    return [move(f"{name}.cast", "cast", "F", m * k * BF16, written, variant="token", dtype="fp8"), product]


def _scores(
    name: str, rows: float, keys: float, columns: tuple[float, float], read: float, heads: float
) -> Operator:
    """Core attention: `keys` seen in all by `rows` queries; scores over `columns[0]`, sums over `columns[1]`."""
    return Operator(
        name, "attention_forward", "F", "bf16",
        flop=2.0 * heads * keys * (columns[0] + columns[1]),
        bytes_read=read + rows * heads * columns[0] * BF16,
        bytes_written=rows * heads * columns[1] * BF16,
        gemm=GemmShape(rows, round(keys / max(rows, 1.0)), columns[0], max(round(heads), 1)),
        variant=name,
    )  # fmt: skip


def _reach(attention: GroupedQueryAttention, keys: float, rows: float) -> float:
    """Keys seen in all where a window limits what a query sees; `rows` queries."""
    mean = keys / max(rows, 1.0)
    return keys if rows == 0 else rows * min(mean, float(attention.reach.widest(max(round(mean), 1))))


def grouped_query(a: GroupedQueryAttention, hidden: int, rows: Rows, split: Split) -> list[Operator]:
    """Grouped-query attention: one GEMM in, paged attention of decodes and of prefills, one GEMM out."""
    heads, t = a.heads / split.tp, rows.tokens
    kv_heads = max(a.kv_heads / split.tp, 1.0)
    _, _, qk, v = a.sizes
    width = heads * qk + kv_heads * (qk + v) + a.gates / split.tp
    row = _cache_row(a, split)
    out = _linear("qkv_proj", t, width, hidden, split.weights)
    if a.qk_norm:
        out.append(norm("qk_norm", "F", t * (heads + kv_heads), qk))
    out.append(move("rope_and_cache", "rope", "F", t * width * BF16, t * (heads * qk * BF16 + row)))
    if rows.decodes:
        seen = _reach(a, rows.context, rows.decodes)
        out.append(_scores("decode", rows.decodes, seen, (qk, v), seen * row, heads))
    if rows.prefills:
        seen = _reach(a, rows.pairs, rows.prefills)
        out.append(_scores("prefill", rows.prefills, seen, (qk, v), rows.prefills * row, heads))
    return out + _linear("o_proj", t, hidden, heads * v, split.weights)


def latent(a: MLA, hidden: int, rows: Rows, split: Split) -> list[Operator]:
    """Multi-head latent attention: absorbed for decodes, with keys and values per head for prefills."""
    heads, t, qk = a.heads / split.tp, rows.tokens, a.qk_nope_dim + a.qk_rope_dim
    row, wide = _cache_row(a, split), a.kv_lora_rank + a.qk_rope_dim
    query = a.q_lora_rank or 0
    out = _linear("qkv_down", t, query + wide, hidden, split.weights)
    out.append(norm("latent_norms", "F", t, query + a.kv_lora_rank))
    out += _linear("q_up", t, heads * qk, query or hidden, split.weights)
    out.append(move("rope_and_cache", "rope", "F", t * (heads * a.qk_rope_dim + wide) * BF16, t * row))
    if d := rows.decodes:
        out += [
            gemm(
                "q_absorb", "F", d * heads, a.kv_lora_rank, a.qk_nope_dim, "bf16", groups=max(round(heads), 1)
            ),
            _scores("decode", d, rows.context, (wide, a.kv_lora_rank), rows.context * row, heads),
            gemm("v_absorb", "F", d * heads, a.v_dim, a.kv_lora_rank, "bf16", groups=max(round(heads), 1)),
        ]
    if p := rows.prefills:
        out += _linear("kv_up", p, heads * (a.qk_nope_dim + a.v_dim), a.kv_lora_rank, split.weights)
        read = p * heads * (qk + a.v_dim) * BF16
        out += [
            move("keys_pack", "copy", "F", read, read, variant="pack"),
            _scores("prefill", p, rows.pairs, (qk, a.v_dim), read, heads),
        ]
    return out + _linear("o_proj", t, hidden, heads * a.v_dim, split.weights)


# -- feed-forward ------------------------------------------------------------------------------------


def dense(width: float, gated: bool, hidden: int, t: float, dtype: Dtype) -> list[Operator]:
    """A dense FFN, or shared experts."""
    columns = width * (2 if gated else 1)
    act = move("act_and_mul", "swiglu", "F", t * columns * BF16, t * width * BF16)
    return [*_linear("gate_up", t, columns, hidden, dtype), act, *_linear("down", t, hidden, width, dtype)]


def touched(experts: float, tokens: float, top_k: int, all_experts: int) -> float:
    """Expected experts, of `experts` on this rank, that at least one of `tokens` tokens chose (uniform gate)."""
    return experts * (1.0 - (1.0 - min(top_k / all_experts, 1.0)) ** tokens)


def routed(
    moe: MoE, hidden: int, tokens: float, rank_rows: float, own: float, split: Split
) -> list[Operator]:
    """Router on `own` tokens, then the experts of one rank on `rank_rows` rows of `tokens` tokens of the group."""
    local = (moe.experts + split.redundant_experts) / split.ep
    width = moe.expert_ffn / split.expert_tp
    columns = width * (2 if moe.expert_gated else 1)
    active = touched(local, tokens, moe.top_k, moe.experts)
    groups = max(round(active), 1)
    row = moe.latent or hidden
    out = [
        gemm("gate", "F", own, moe.experts, hidden, "bf16", cls="gate_gemm"),
        move("topk", "topk", "F", own * moe.experts * FP32, own * moe.top_k * 2 * FP32, variant="fused"),
        move("permute", "permute", "F", rank_rows * row * BF16, rank_rows * row * BF16, variant="expand"),
    ]
    if split.experts != "bf16":
        size = rank_rows * row * BF16
        out.append(move("experts.cast", "cast", "F", size, size / 2, variant="token", dtype="fp8"))
    out += [
        gemm(
            "experts.gate_up", "F", rank_rows, columns, row, split.experts, cls="grouped_gemm", groups=groups
        ),
        move("experts.act_and_mul", "swiglu", "F", rank_rows * columns * BF16, rank_rows * width * BF16),
        gemm("experts.down", "F", rank_rows, row, width, split.experts, cls="grouped_gemm", groups=groups),
        move("unpermute", "permute", "F", rank_rows * row * BF16, own * row * BF16, variant="reduce"),
    ]
    if moe.shared_experts:
        shared = moe.shared_experts * moe.shared_ffn / (split.tp if split.ep == 1 else 1)
        out += dense(shared, moe.expert_gated, hidden, own, split.weights)
    return out


def head(shape: ModelShape, rows: Rows, split: Split) -> list[Operator]:
    """Final norm, logits of the sequences that get a token, and sampling."""
    n, columns = rows.sequences, shape.vocab / split.tp
    return [
        norm("final_norm", "F", rows.tokens, shape.hidden, residual=True),
        gemm("logits", "F", n, columns, shape.hidden, "bf16"),
        move("sample", "elementwise", "F", n * columns * FP32, n * FP32, variant="add", launches=4),
    ]


def norms(hidden: int, t: float, halves: Iterable[str] = ("attn_norm", "ffn_norm")) -> list[Operator]:
    """The norms before both halves of a layer, which add the residual."""
    return [norm(name, "F", t, hidden, residual=True) for name in halves]
