"""What one attention module of inference runs: operators for new tokens beside keys that are in the cache.

A module of DSA or of compressed attention goes from the normalised hidden states of the new tokens to the
output projection, on one GPU of a tensor-parallel group. Every GPU holds the whole cache of keys and the
whole indexer; heads are shared out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moesim.hwmodels.errors import InputError
from moesim.simulator.model.attention.compressed import Compressed
from moesim.simulator.model.attention.dsa import DSA
from moesim.simulator.model.operator import Dtype, GemmShape, Operator, OperatorClass
from moesim.simulator.model.precision import BYTES_PER_ELEMENT
from moesim.simulator.model.primitives import BF16, FP32, move

Phase = Literal["prefill", "decode"]
Stack = Literal["sglang", "vllm"]
STACKS: tuple[Stack, ...] = ("sglang", "vllm")
HEAD_TILE = 64
"""Least query heads that FlashMLA's sparse kernels compute; both frameworks pad fewer heads to 64 on Hopper
(`flashmla_sparse.py` in vllm-project/vllm, `nsa_backend.py` in sgl-project/sglang)."""
INDEX_KEY_BYTES = 132.0
"""Bytes of one key of an indexer of 128 elements in the cache: FP8 with one FP32 scale."""
LARGEST_TOKENS = 1 << 40
"""Upper limit of batch x length."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of an attention module: `batch` sequences with `new` tokens each behind `past` cached ones.

    Raises InputError for sizes that are not positive and a batch of more than 2^40 tokens.
    """

    phase: Phase
    batch: int
    new: int
    past: int
    tp: int = 1
    kv: Literal["bf16", "fp8"] = "bf16"
    """Number format of the cache."""
    stack: Stack = "sglang"

    def __post_init__(self) -> None:
        """Check the sizes."""
        for name, value, least in (("batch", self.batch, 1), ("new", self.new, 1), ("past", self.past, 0),
                                   ("tp", self.tp, 1)):  # fmt: skip
            if value < least:
                raise InputError(f"attention call: {name}={value} is below {least}; give {least} or more")
        if self.batch * (self.new + self.past) > LARGEST_TOKENS:
            raise InputError(
                f"attention call: {self.batch} sequences of {self.new + self.past} tokens are more than "
                f"{LARGEST_TOKENS} tokens; give a smaller batch"
            )
        if self.stack not in STACKS:
            raise InputError(f"attention call: stack={self.stack!r} is not one of {', '.join(STACKS)}")

    @property
    def tokens(self) -> int:
        """New tokens of all sequences."""
        return self.batch * self.new

    @property
    def length(self) -> int:
        """Tokens of one sequence at the end of the call."""
        return self.past + self.new

    def mean_keys(self, ratio: int = 1, most: float = float("inf")) -> float:
        """Mean keys of one new token, one key for `ratio` tokens, at most `most`.

        The mean is over positions `past` + 1 to `past` + `new`, with fractions of compressed keys.
        """
        first, last = (self.past + 1) / ratio, self.length / ratio
        if last <= most:
            return (first + last) / 2.0
        if first >= most:
            return most
        below = (most - first) / (last - first)
        return below * (first + most) / 2.0 + (1.0 - below) * most


def projection(
    name: str, call: AttentionCall, n: float, k: float, dtype: Dtype = "fp8", groups: int = 1
) -> Operator:
    """GEMM of the new tokens' rows; with `groups`, as in absorbed projections, each has `n` columns."""
    m, element = float(call.tokens), BYTES_PER_ELEMENT[dtype]
    return Operator(
        name,
        "gemm",
        "F",
        dtype,
        flop=2.0 * m * n * k * groups,
        bytes_read=groups * (n * k + m * k) * element,
        bytes_written=groups * m * n * BF16,
        gemm=GemmShape(m * groups, int(n), k, groups),
        variant="absorbed" if groups > 1 else "block",
    )


def core(
    call: AttentionCall, kernel: str, *, heads: int, dims: int, keys: float, kv_bytes: float, q_dim: int,
    v_dim: int, cls: OperatorClass = "sparse_attention_forward",
) -> Operator:  # fmt: skip
    """Core attention over `keys` keys per new token, with flop = 2 x tokens x heads x keys x dims.

    In decode every sequence reads its own keys from memory; in prefill new tokens share keys, of which each
    is read once.
    """
    t = float(call.tokens)
    distinct = t * keys if call.phase == "decode" else call.batch * min(float(call.length), call.new * keys)
    return Operator(
        "attention",
        cls,
        "F",
        "bf16",
        flop=2.0 * t * heads * keys * dims,
        bytes_read=t * heads * q_dim * BF16 + distinct * kv_bytes,
        bytes_written=t * heads * v_dim * BF16,
        gemm=GemmShape(t, max(1, round(keys)), dims / 2, heads),
        variant=kernel,
    )


def index_operators(
    call: AttentionCall, kernel: str, *, heads: int, dim: int, ratio: int = 1
) -> list[Operator]:
    """Scores of all causal keys in the indexer's heads (FP8), and the choice of the best of them."""
    t, keys = float(call.tokens), call.mean_keys(ratio)
    cached = call.batch * call.length / ratio * INDEX_KEY_BYTES * dim / 128
    scores = Operator(
        "indexer.scores",
        "indexer",
        "F",
        "fp8",
        flop=2.0 * t * heads * dim * keys,
        bytes_read=t * heads * dim + cached,
        bytes_written=t * keys * FP32,
        gemm=GemmShape(t, max(1, round(keys)), dim, heads),
        variant=kernel,
    )
    choice = move("indexer.top_k", "indexer_topk", "F", t * keys * FP32, 0.0, variant=kernel)
    return [scores, choice]


def padded_heads(heads: int) -> int:
    """Heads that a kernel computes, a multiple of 64."""
    return -(-heads // HEAD_TILE) * HEAD_TILE


def pointwise(call: AttentionCall, elements: float) -> Operator:
    """Norms, rotations and casts of the new tokens, as one read and one write of these BF16 elements."""
    size = call.tokens * elements * BF16
    return move("pointwise", "elementwise", "F", size, size, variant="module")


# -- dsa inference -----------------------------------------------------------------------------------
# One call of DeepSeek sparse attention in inference (arXiv 2512.02556, section 2.1).

DSA_KEY_BYTES = 656.0
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
                kv_bytes=DSA_KEY_BYTES if call.kv == "fp8" else 2.0 * latent,
            ),
            projection("absorb_values", call, a.v_dim, a.kv_lora_rank, "bf16", heads),
        ]  # fmt: skip
    return [*out, pointwise(call, elements), projection("o_proj", call, hidden, heads * a.v_dim)]


# -- compressed inference ----------------------------------------------------------------------------
# One call of DeepSeek-V4's compressed attention in inference (arXiv 2606.19348, section 2.3).

COMPRESSED_KEY_BYTES = 584.0
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
            keys=keys, kv_bytes=COMPRESSED_KEY_BYTES if call.kv == "fp8" else 2.0 * d, q_dim=d, v_dim=d,
        ),
        pointwise(call, hidden + 4.0 * heads * d),
        projection("o_down", call, a.o_lora_rank, heads // groups * d, "bf16", groups),
        projection("o_proj", call, hidden, groups * a.o_lora_rank),
    ]  # fmt: skip
