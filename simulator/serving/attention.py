"""Operators of one layer's attention in a step of an inference engine, by kind of attention.

Decodes and prefills of a step share projections and have cores of their own. MLA decodes in the latent space
(absorbed: the up-projections of keys and values go to the query and the output, DeepSeek-V2 report, 2.1.2) and
prefills with keys and values formed per head. DSA reads chosen keys in the latent space in both.
"""

from __future__ import annotations

from moesim.hwmodels.errors import InputError
from moesim.simulator.model.attention.dsa import DSA, Indexer
from moesim.simulator.model.attention.grouped_query import GroupedQueryAttention
from moesim.simulator.model.attention.mla import MLA
from moesim.simulator.model.attention.protocol import Attention, NoAttention
from moesim.simulator.model.operator import GemmShape, Operator
from moesim.simulator.model.primitives import BF16, FP32, gemm, move, norm
from moesim.simulator.serving.linear import Rows, Split, element_bytes, linear

INDEX_BYTES = 4.0
"""Bytes of one chosen key's position."""
INDEX_KEY_BYTES = 132.0 / 128.0
"""Bytes of an element of an indexer's key in the cache: FP8 with one FP32 scale a key of 128."""


def cache_row_bytes(attention: Attention, split: Split) -> float:
    """Bytes of one token's keys and values in one layer on one rank; MLA's latent is on every rank of TP.

    Raises InputError for kinds that serving does not know.
    """
    element = element_bytes(split.cache)
    if isinstance(attention, DSA):
        index = 0.0 if attention.indexer.shared else attention.indexer.head_dim * INDEX_KEY_BYTES
        return (attention.kv_lora_rank + attention.qk_rope_dim) * element + index
    if isinstance(attention, MLA):
        return (attention.kv_lora_rank + attention.qk_rope_dim) * element
    if isinstance(attention, GroupedQueryAttention):
        heads = max(attention.kv_heads / split.tp, 1.0)
        return heads * (attention.sizes.qk_head_dim + attention.sizes.v_head_dim) * element
    if isinstance(attention, NoAttention):
        return 0.0
    raise InputError(
        f"serving knows grouped-query, latent and DeepSeek sparse attention so far, not {attention.kind!r}; "
        "choose a model with one of them"
    )


def attention_operators(attention: Attention, hidden: int, rows: Rows, split: Split) -> list[Operator]:
    """Operators from the normed input to the output projection; raises InputError for unknown kinds."""
    cache_row_bytes(attention, split)
    if isinstance(attention, DSA):
        return sparse(attention, hidden, rows, split)
    if isinstance(attention, MLA):
        return latent(attention, hidden, rows, split)
    if isinstance(attention, GroupedQueryAttention):
        return grouped_query(attention, hidden, rows, split)
    return []


def core(
    name: str, variant: str, rows: float, keys: float, dims: tuple[float, float], read: float, heads: float
) -> Operator:
    """Core attention: `keys` seen in all by `rows` queries; scores over `dims[0]`, sums over `dims[1]`.

    `read`: bytes of keys and values from memory.
    """
    return Operator(
        name, "attention_forward", "F", "bf16",
        flop=2.0 * heads * keys * (dims[0] + dims[1]),
        bytes_read=read + rows * heads * dims[0] * BF16,
        bytes_written=rows * heads * dims[1] * BF16,
        gemm=GemmShape(rows, max(round(keys / max(rows, 1.0)), 1), dims[0], max(round(heads), 1)),
        variant=variant,
    )  # fmt: skip


def _reach(attention: Attention, keys: float, rows: float) -> float:
    """Keys seen in all where a window or a choice limits what a query sees; `rows` queries."""
    if not rows:
        return 0.0
    mean = keys / rows
    reach = getattr(attention, "reach", None)
    return keys if reach is None else rows * min(mean, float(reach.widest(max(round(mean), 1))))


def grouped_query(a: GroupedQueryAttention, hidden: int, rows: Rows, split: Split) -> list[Operator]:
    """Grouped-query attention: one GEMM in, paged attention of decodes and of prefills, one GEMM out.

    A window also limits what is read; sinks are one more logit a head, which the core holds in registers.
    """
    heads, t = a.heads / split.tp, rows.tokens
    kv_heads = max(a.kv_heads / split.tp, 1.0)
    _, _, qk, v = a.sizes
    width = heads * qk + kv_heads * (qk + v) + a.gates / split.tp
    row = cache_row_bytes(a, split)
    out = linear("qkv_proj", t, width, hidden, split.weights)
    if a.qk_norm and t:
        out.append(norm("qk_norm", "F", t * (heads + kv_heads), qk))
    if t:
        out.append(move("rope_and_cache", "rope", "F", t * width * BF16, t * (heads * qk * BF16 + row)))
    if rows.decodes:
        seen = _reach(a, rows.context, rows.decodes)
        read = seen / rows.per_sequence * row
        out.append(core("decode", "decode-gqa", rows.decodes, seen, (qk, v), read, heads))
    if rows.prefills:
        seen = _reach(a, rows.pairs, rows.prefills)
        read = max(rows.prefills, rows.cached) * row
        out.append(core("prefill", "prefill-gqa", rows.prefills, seen, (qk, v), read, heads))
    return out + linear("o_proj", t, hidden, heads * v, split.weights)


# -- latent attention --------------------------------------------------------------------------------


def _latent_inputs(a: MLA, hidden: int, rows: Rows, split: Split, further: float = 0.0) -> list[Operator]:
    """Down-projections in one GEMM, norms, queries, rotation and the write to the cache."""
    heads, t = a.heads / split.tp, rows.tokens
    wide, query = a.kv_lora_rank + a.qk_rope_dim, a.q_lora_rank or 0
    if not t:
        return []
    out = linear("qkv_down", t, query + wide + further, hidden, split.weights)
    out.append(norm("latent_norms", "F", t, query + a.kv_lora_rank))
    out += linear("q_up", t, heads * (a.qk_nope_dim + a.qk_rope_dim), query or hidden, split.weights)
    written = t * cache_row_bytes(a, split)
    read = t * (heads * a.qk_rope_dim + wide) * BF16
    return [*out, move("rope_and_cache", "rope", "F", read, written + t * heads * a.qk_rope_dim * BF16)]


def _absorbed(a: MLA, name: str, rows: float, heads: float) -> Operator:
    """One BF16 GEMM a head between the latent and the head's own keys or values."""
    n, k = (a.kv_lora_rank, a.qk_nope_dim) if name == "q_absorb" else (a.v_dim, a.kv_lora_rank)
    return gemm(name, "F", rows * heads, n, k, "bf16", groups=max(round(heads), 1), variant="batched")


def _absorbed_core(
    a: MLA, name: str, variant: str, rows: float, keys: float, read: float, heads: float
) -> list[Operator]:
    """Core attention in the latent space between the GEMMs that absorb the up-projections."""
    dims = (float(a.kv_lora_rank + a.qk_rope_dim), float(a.kv_lora_rank))
    inner = core(name, variant, rows, keys, dims, read, heads)
    return [_absorbed(a, "q_absorb", rows, heads), inner, _absorbed(a, "v_absorb", rows, heads)]


def _prefill(a: MLA, rows: Rows, split: Split, heads: float) -> list[Operator]:
    """Keys and values formed per head, those of earlier chunks again, and dense attention over them."""
    formed, qk = max(rows.prefills, rows.cached), a.qk_nope_dim + a.qk_rope_dim
    read = formed * heads * (qk + a.v_dim) * BF16
    return [
        *linear("kv_up", formed, heads * (a.qk_nope_dim + a.v_dim), a.kv_lora_rank, split.weights),
        move("keys_pack", "copy", "F", read, read, variant="pack"),
        core("prefill", "prefill-mla", rows.prefills, rows.pairs, (qk, a.v_dim), read, heads),
    ]


def latent(a: MLA, hidden: int, rows: Rows, split: Split) -> list[Operator]:
    """Multi-head latent attention: absorbed for decodes, with keys and values per head for prefills."""
    heads = a.heads / split.tp
    out = _latent_inputs(a, hidden, rows, split)
    if rows.decodes:
        read = rows.context / rows.per_sequence * cache_row_bytes(a, split)
        out += _absorbed_core(a, "decode", "decode-mla", rows.decodes, rows.context, read, heads)
    if rows.prefills:
        out += _prefill(a, rows, split, heads)
    return out + linear("o_proj", rows.tokens, hidden, heads * a.v_dim, split.weights)


# -- sparse attention --------------------------------------------------------------------------------


def indexer_operators(
    i: Indexer, hidden: int, query_in: int, rows: float, keys: float, read: float
) -> list[Operator]:
    """An indexer over `keys` keys in all of `rows` queries, of which `read` keys come from memory.

    Projections, rotation and FP8 cast, scores, choice. Scores go through memory in FP32.
    """
    flop = 2.0 * i.heads * i.head_dim * keys
    scores = Operator(
        "indexer.scores", "indexer", "F", "fp8", flop=flop,
        bytes_read=rows * i.width + read * i.head_dim * INDEX_KEY_BYTES, bytes_written=keys * FP32,
        gemm=GemmShape(rows, max(round(keys / max(rows, 1.0)), 1), i.head_dim, i.heads),
    )  # fmt: skip
    width = float(i.width + i.head_dim)
    return [
        *linear("indexer.q_up", rows, i.width, query_in, "fp8"),
        gemm("indexer.key_and_weights", "F", rows, i.head_dim + i.heads, hidden, "bf16", cls="gate_gemm"),
        norm("indexer.key_norm", "F", rows, i.head_dim),
        move("indexer.rope_cast", "rope", "F", rows * width * BF16, rows * width, launches=2),
        scores,
        move("indexer.top_k", "indexer_topk", "F", keys * FP32, rows * i.top_k * INDEX_BYTES),
    ]


def sparse(a: DSA, hidden: int, rows: Rows, split: Split) -> list[Operator]:
    """DeepSeek sparse attention: indexer, then the absorbed core over at most `top_k` keys of a query.

    Prompts of at most `top_k` keys run dense, as latent attention, beside the indexer.
    """
    heads, row, top = a.heads / split.tp, cache_row_bytes(a, split), float(a.indexer.top_k)
    out = _latent_inputs(a, hidden, rows, split)
    if not a.indexer.shared:
        out += _index(a, hidden, rows, split)
    if d := rows.decodes:
        seen = min(rows.context, d * top)
        out += _absorbed_core(a, "decode", "decode-sparse", d, seen, seen * row, heads)
    if p := rows.prefills:
        if rows.cached <= top * rows.prompts:
            out += _prefill(a, rows, split, heads)
        else:
            seen = min(rows.pairs, p * top)
            out += _absorbed_core(a, "prefill", "prefill-sparse", p, seen, seen * row, heads)
    return out + linear("o_proj", rows.tokens, hidden, heads * a.v_dim, split.weights)


def _index(a: DSA, hidden: int, rows: Rows, split: Split) -> list[Operator]:
    keys = rows.context + rows.pairs
    read = rows.context / rows.per_sequence + max(rows.cached, rows.prefills)
    return indexer_operators(a.indexer, hidden, a.q_lora_rank or hidden, rows.tokens, keys, read)
