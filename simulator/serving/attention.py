"""Operators of one layer's attention in a step of an inference engine, by kind of attention.

Decodes and prefills of a step share projections and have cores of their own. MLA decodes in the latent space
(absorbed: the up-projections of keys and values go to the query and the output, DeepSeek-V2 report, 2.1.2)
and prefills with keys and values formed per head. DSA reads chosen keys in the latent space in both.
"""

from __future__ import annotations

from math import inf

from moesim.hwmodels.errors import InputError
from moesim.simulator.model.attention.compressed import Compressed
from moesim.simulator.model.attention.dsa import DSA, Indexer
from moesim.simulator.model.attention.grouped_query import GroupedQueryAttention
from moesim.simulator.model.attention.mla import MLA
from moesim.simulator.model.attention.protocol import Attention, NoAttention
from moesim.simulator.model.operator import GemmShape, Operator
from moesim.simulator.model.primitives import BF16, FP32, gemm, move, norm
from moesim.simulator.serving.linear import Split, StepRows, element_bytes, linear, product

INDEX_BYTES = 4.0
"""Bytes of one chosen key's position."""
INDEX_KEY_BYTES = 132.0 / 128.0
"""Bytes of an element of an indexer's key in the cache: FP8 with one FP32 scale a key of 128."""


def latent_row_bytes(attention: MLA, split: Split) -> float:
    """Bytes of the latent and rotated key of one token."""
    return (attention.kv_lora_rank + attention.qk_rope_dim) * element_bytes(split.cache)


def compressed_key_bytes(attention: Compressed, split: Split) -> float:
    """Bytes of one key, compressed or of the window, which is its value too."""
    return attention.head_dim * element_bytes(split.cache)


def cache_row_bytes(attention: Attention, split: Split) -> float:
    """Bytes of one token's keys and values in one layer on one rank; latents are on every rank of TP.

    Compressed keys are those of a long sequence, without its window. Raises InputError for kinds that serving
    does not know.
    """
    if isinstance(attention, DSA):
        index = 0.0 if attention.indexer.shared else attention.indexer.head_dim * INDEX_KEY_BYTES
        return latent_row_bytes(attention, split) + index
    if isinstance(attention, MLA):
        return latent_row_bytes(attention, split)
    if isinstance(attention, Compressed):
        if not attention.ratio:
            return 0.0
        index = attention.indexer.head_dim * INDEX_KEY_BYTES if attention.indexer is not None else 0.0
        return (compressed_key_bytes(attention, split) + index) / attention.ratio
    if isinstance(attention, GroupedQueryAttention):
        heads = max(attention.kv_heads / split.tp, 1.0)
        return heads * (attention.sizes.qk_head_dim + attention.sizes.v_head_dim) * element_bytes(split.cache)
    if isinstance(attention, NoAttention):
        return 0.0
    raise InputError(
        "serving knows grouped-query, latent, sparse and compressed attention, not "
        f"{attention.kind!r}; choose a model with one of them"
    )


def attention_operators(attention: Attention, hidden: int, rows: StepRows, split: Split) -> list[Operator]:
    """Operators from the normed input to the output projection; raises InputError for unknown kinds."""
    cache_row_bytes(attention, split)
    if isinstance(attention, DSA):
        return sparse(attention, hidden, rows, split)
    if isinstance(attention, MLA):
        return latent(attention, hidden, rows, split)
    if isinstance(attention, Compressed):
        return compressed(attention, hidden, rows, split)
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


def grouped_query(a: GroupedQueryAttention, hidden: int, rows: StepRows, split: Split) -> list[Operator]:
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
    cap = inf if a.reach.kind == "full" else float(a.reach.size)
    if rows.decodes:
        seen = rows.decode_keys(cap)
        read = seen / rows.per_sequence * row
        kernel = f"-{split.attention}" if split.attention and a.sinks else ""
        kernel += "-window" if kernel and cap < inf else ""
        out.append(core("decode", f"decode-gqa{kernel}", rows.decodes, seen, (qk, v), read, heads))
    if rows.prefills:
        read = min(rows.keys_formed, rows.prompts * cap + rows.prefills) * row
        out.append(
            core("prefill", "prefill-gqa", rows.prefills, rows.prefill_keys(cap), (qk, v), read, heads)
        )
    return out + linear("o_proj", t, hidden, heads * v, split.weights)


# -- latent attention --------------------------------------------------------------------------------


def _latent_inputs(a: MLA, hidden: int, rows: StepRows, split: Split, further: float = 0.0) -> list[Operator]:
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


def _prefill(a: MLA, rows: StepRows, split: Split, heads: float) -> list[Operator]:
    """Keys and values formed per head, those of earlier chunks again, and dense attention over them."""
    formed, qk = rows.keys_formed, a.qk_nope_dim + a.qk_rope_dim
    read = formed * heads * (qk + a.v_dim) * BF16
    return [
        *linear("kv_up", formed, heads * (a.qk_nope_dim + a.v_dim), a.kv_lora_rank, split.weights),
        move("keys_pack", "copy", "F", read, read, variant="pack"),
        core("prefill", "prefill-mla", rows.prefills, rows.pairs, (qk, a.v_dim), read, heads),
    ]


def latent(a: MLA, hidden: int, rows: StepRows, split: Split) -> list[Operator]:
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
    i: Indexer, hidden: int, query_in: int, rows: StepRows, key_columns: float, ratio: float = 1.0
) -> list[Operator]:
    """An indexer: projections, rotation and FP8 cast, scores over the keys before a query, choice.

    `key_columns`: of the projection into keys; `ratio`: tokens behind a key. Scores go through memory in
    FP32.
    """
    t, out = rows.tokens, []
    if t:
        width = float(i.width + i.head_dim)
        out = [
            *linear("indexer.q_up", t, i.width, query_in, "fp8"),
            gemm(
                "indexer.key_and_weights",
                "F",
                t,
                round(key_columns) + i.heads,
                hidden,
                "bf16",
                cls="gate_gemm",
            ),
            norm("indexer.key_norm", "F", t, i.head_dim),
            move("indexer.rope_cast", "rope", "F", t * width * BF16, t * width, launches=2),
        ]
    for queries, keys, read in (
        (rows.decodes, rows.decode_keys(ratio=ratio), rows.context / rows.per_sequence / ratio),
        (rows.prefills, rows.prefill_keys(ratio=ratio), rows.keys_formed / ratio),
    ):
        if queries and keys:
            scores = Operator(
                "indexer.scores", "indexer", "F", "fp8", flop=2.0 * i.width * keys,
                bytes_read=queries * i.width + read * i.head_dim * INDEX_KEY_BYTES, bytes_written=keys * FP32,
                gemm=GemmShape(queries, max(round(keys / queries), 1), i.head_dim, i.heads),
            )  # fmt: skip
            chosen = queries * i.top_k * INDEX_BYTES
            out += [scores, move("indexer.top_k", "indexer_topk", "F", keys * FP32, chosen)]
    return out


def _module(name: str, rows: float, split: Split) -> list[Operator]:
    """The fixed time of a module of an engine beyond its kernels, if its operators were measured as one."""
    if not split.engine or not rows:
        return []
    return [move(f"{name}.module", "elementwise", "F", 0.0, 0.0, variant=f"{name}-{split.engine}")]


def sparse(a: DSA, hidden: int, rows: StepRows, split: Split) -> list[Operator]:
    """DeepSeek sparse attention: indexer, then the absorbed core over at most `top_k` keys of a query.

    Prompts of at most `top_k` keys run dense, as latent attention, and leave the indexer's keys alone behind.
    """
    heads, row, top = a.heads / split.tp, latent_row_bytes(a, split), float(a.indexer.top_k)
    out = _latent_inputs(a, hidden, rows, split)
    dense = rows.prefills > 0.0 and rows.keys_formed <= top * rows.prompts
    if not a.indexer.shared:
        i, t = a.indexer, rows.prefills if rows.tokens else 0.0
        chosen = rows._replace(tokens=rows.tokens - t, prefills=0.0, pairs=0.0, cached=0.0) if dense else rows
        out += indexer_operators(i, hidden, a.q_lora_rank or hidden, chosen, i.head_dim)
        if dense and t:
            out.append(gemm("indexer.key", "F", t, i.head_dim, hidden, "bf16", cls="gate_gemm"))
    form = "" if split.cache == "bf16" else f"-{split.cache}"
    if d := rows.decodes:
        seen = rows.decode_keys(top)
        out += _absorbed_core(a, "decode", f"decode-sparse{form}", d, seen, seen * row, heads)
    if p := rows.prefills:
        if dense:
            out += _prefill(a, rows, split, heads)
        else:
            seen = rows.prefill_keys(top)
            read = rows.keys_formed * row + p * top * INDEX_BYTES  # queries share keys in the L2
            out += _absorbed_core(a, "prefill", f"prefill-sparse{form}", p, seen, read, heads)
    return [*out, *linear("o_proj", rows.tokens, hidden, heads * a.v_dim, split.weights),
            *_module("dsa", rows.tokens, split)]  # fmt: skip


def _compressed_inputs(a: Compressed, hidden: int, t: float, split: Split) -> list[Operator]:
    """Queries, key and value of every token, and the sums of keys over a window, which every rank forms."""
    if not t:
        return []
    d, width = float(a.head_dim), a.heads / split.tp * a.head_dim
    size = t * (width + d) * BF16
    out = [
        *linear("q_and_kv_down", t, a.q_lora_rank + d, hidden, split.weights),
        norm("latent_norms", "F", t, a.q_lora_rank + a.head_dim),
        *linear("q_up", t, width, a.q_lora_rank, split.weights),
        move("norm_rope_and_cache", "rope", "F", size, size),
    ]
    if a.ratio:
        columns = (4.0 if a.indexer is not None else 2.0) * d  # keys and gates, of two series with an indexer
        written = t * d / a.ratio * BF16
        out.append(product("compressor", t, columns, hidden, "bf16"))
        out.append(move("compress", "elementwise", "F", t * columns * BF16, written, variant="compress"))
    return out


def compressed(a: Compressed, hidden: int, rows: StepRows, split: Split) -> list[Operator]:
    """DeepSeek-V4's attention over a window and compressed keys, all of them or those that an indexer chose.

    Every rank forms the keys; queries and the groups of the output are split.
    """
    heads, t, d, i = a.heads / split.tp, rows.tokens, float(a.head_dim), a.indexer
    out = _compressed_inputs(a, hidden, t, split)
    if i is not None and not i.shared:
        out += indexer_operators(i, hidden, a.q_lora_rank, rows, 4.0 * i.head_dim, a.ratio)
    far, name, near = float(i.top_k) if i else inf, "csa" if i else "hca", float(a.window)
    for kind, queries, keys in (
        ("decode", rows.decodes, rows.decode_keys),
        ("prefill", rows.prefills, rows.prefill_keys),
    ):
        if queries:
            seen = keys(near) + (keys(far, a.ratio) if a.ratio else 0.0)
            read = seen * compressed_key_bytes(a, split) if kind == "decode" else rows.keys_formed * d
            out.append(core(kind, f"{kind}-{name}", queries, seen, (d, d), read, heads))
    if t:
        groups = max(a.o_groups / split.tp, 1.0)
        n, k = a.o_lora_rank, heads * d / groups
        out.append(gemm("o_down", "F", t * groups, n, k, "bf16", groups=round(groups), variant="batched"))
        out += linear("o_proj", t, hidden, groups * n, split.weights)
    return [*out, *_module(name, t, split)]
