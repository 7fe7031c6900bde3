"""One call of DeepSeek-V4's compressed attention in inference (arXiv 2606.19348, section 2.3)."""

from __future__ import annotations

from moesim.hwmodels.errors import InputError
from moesim.simulator.model.attention.compressed import Compressed
from moesim.simulator.model.attention.inference import (
    AttentionCall,
    core,
    index_operators,
    padded_heads,
    pointwise,
    projection,
)
from moesim.simulator.model.operator import Operator

FP8_KEY_BYTES = 584.0
"""Bytes of one cached key: 448 elements in FP8 with 7 scales, padded to 8, and 64 rotated ones in BF16."""


def compressed_operators(attention: Compressed, hidden: int, call: AttentionCall) -> list[Operator]:
    """Operators of one call; raises InputError where tensor parallelism does not divide heads and groups."""
    a, i = attention, attention.indexer
    if a.heads % call.tp or a.o_groups % call.tp:
        raise InputError(
            f"attention call: tp={call.tp} does not divide heads={a.heads} and o_groups={a.o_groups}"
        )
    heads, groups, d = a.heads // call.tp, a.o_groups // call.tp, a.head_dim
    out = [
        projection("down", call, a.q_lora_rank + d, hidden),
        projection("q_up", call, heads * d, a.q_lora_rank),
    ]
    keys = call.mean_keys(most=a.window)
    if a.ratio:
        series = 1 if i is None else 2
        out.append(projection("compressor", call, 2 * series * d, hidden, "bf16"))
        keys += call.mean_keys(a.ratio, float("inf") if i is None else i.top_k)
        if i is not None:
            out += [
                projection("indexer.q_up", call, i.width, a.q_lora_rank),
                projection("indexer.compressor", call, 2 * series * i.head_dim, hidden, "bf16"),
                projection("indexer.weights", call, i.heads, hidden, "bf16"),
                *index_operators(
                    call, f"{call.stack}-compressed", heads=i.heads, dim=i.head_dim, ratio=a.ratio
                ),
            ]
    return [
        *out,
        core(
            call, f"{call.stack}-flashmla-compressed-{call.phase}", heads=padded_heads(heads), dims=2 * d,
            keys=keys, kv_bytes=FP8_KEY_BYTES if call.kv == "fp8" else 2.0 * d, q_dim=d, v_dim=d,
        ),
        pointwise(call, hidden + 4.0 * heads * d),
        projection("o_down", call, a.o_lora_rank, heads // groups * d, "bf16", groups),
        projection("o_proj", call, hidden, groups * a.o_lora_rank),
    ]  # fmt: skip
