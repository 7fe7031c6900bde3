"""One call of DeepSeek sparse attention in inference (arXiv 2512.02556, section 2.1)."""

from __future__ import annotations

from moesim.hwmodels.errors import InputError
from moesim.simulator.model.attention.dsa import DSA
from moesim.simulator.model.attention.inference import (
    AttentionCall,
    core,
    index_operators,
    padded_heads,
    pointwise,
    projection,
)
from moesim.simulator.model.operator import Operator

FP8_KEY_BYTES = 656.0
"""Bytes of one cached key in FlashMLA's FP8 format: 512 in FP8, 4 FP32 scales, 64 rotated ones in BF16."""


DENSE = "sglang-fa3-dense-prefill"
"""Kernel that reads all keys of sequences of at most `top_k` tokens."""


def runs_dense(attention: DSA, call: AttentionCall) -> bool:
    """Whether the framework computes dense attention, because no query has more keys than the choice."""
    return call.stack == "sglang" and call.phase == "prefill" and call.length <= attention.indexer.top_k


def dsa_kernel(attention: DSA, call: AttentionCall) -> str:
    """Kernel of the core attention, by the rules of both frameworks.

    SGLang runs dense FlashAttention 3 while a prefill's sequences have at most `top_k` tokens, FlashMLA's
    sparse kernels in BF16 or FP8 behind that, and FlashAttention 3 with pages of one token in BF16 decode.
    vLLM always runs FlashMLA's sparse kernels.
    """
    if call.stack == "vllm":
        return "vllm-flashmla-sparse" + ("-prefill" if call.phase == "prefill" else f"-{call.kv}-decode")
    if call.phase == "decode":
        return f"sglang-{'flashmla-kv' if call.kv == 'fp8' else 'fa3'}-decode"
    if runs_dense(attention, call):
        return DENSE
    shared = "-shared" if attention.indexer.shared else ""
    return f"sglang-{'flashmla-kv' if call.kv == 'fp8' else 'flashmla-sparse'}{shared}-prefill"


def visited_keys(top_k: int, call: AttentionCall) -> float:
    """Mean keys that the sparse kernel visits for one new token.

    FlashMLA's FP8 kernel goes through the whole list of `top_k` entries, also where fewer keys exist and the
    rest is marked as invalid; the BF16 kernels skip blocks without keys. vLLM's prefill turns the FP8 cache
    into BF16 first.
    """
    whole_list = call.kv == "fp8" and (call.stack == "sglang" or call.phase == "decode")
    return float(top_k) if whole_list else call.mean_keys(most=top_k)


def dsa_operators(attention: DSA, hidden: int, call: AttentionCall) -> list[Operator]:
    """Operators of one call; raises InputError where tensor parallelism does not divide the heads."""
    a, i = attention, attention.indexer
    if a.heads % call.tp:
        raise InputError(f"attention call: tp={call.tp} does not divide heads={a.heads}")
    heads, kernel = a.heads // call.tp, dsa_kernel(attention, call)
    qk_dim = a.qk_nope_dim + a.qk_rope_dim
    q_in = a.q_lora_rank or hidden
    out = [
        projection("down", call, (a.q_lora_rank or 0) + a.kv_lora_rank + a.qk_rope_dim, hidden),
        projection("q_up", call, heads * qk_dim, q_in),
    ]
    if not i.shared:
        out.append(projection("indexer.key", call, i.head_dim, hidden))
    if not i.shared and kernel != DENSE:
        out += [
            projection("indexer.q_up", call, i.width, q_in),
            projection("indexer.weights", call, i.heads, hidden, "bf16"),
            *index_operators(call, f"{call.stack}-{call.phase}", heads=i.heads, dim=i.head_dim),
        ]
    elements = 2.0 * heads * qk_dim
    if kernel == DENSE:
        rows = call.batch * call.length / call.tokens
        out += [
            projection("kv_up", call, heads * (a.qk_nope_dim + a.v_dim) * rows, a.kv_lora_rank),
            core(
                call, kernel, heads=heads, dims=qk_dim + a.v_dim, keys=call.mean_keys(), q_dim=qk_dim,
                kv_bytes=2.0 * heads * (qk_dim + a.v_dim), v_dim=a.v_dim, cls="attention_forward",
            ),
        ]  # fmt: skip
        elements += rows * heads * qk_dim
    else:
        latent = a.kv_lora_rank + a.qk_rope_dim
        out += [
            projection("absorb_keys", call, a.kv_lora_rank, a.qk_nope_dim, "bf16", heads),
            core(
                call, kernel, heads=padded_heads(heads), dims=latent + a.kv_lora_rank, q_dim=latent,
                keys=visited_keys(i.top_k, call), v_dim=a.kv_lora_rank,
                kv_bytes=FP8_KEY_BYTES if call.kv == "fp8" else 2.0 * latent,
            ),
            projection("absorb_values", call, a.v_dim, a.kv_lora_rank, "bf16", heads),
        ]  # fmt: skip
    return [*out, pointwise(call, elements), projection("o_proj", call, hidden, heads * a.v_dim)]
