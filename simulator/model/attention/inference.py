"""What one attention module of inference runs: operators for new tokens beside keys that are in the cache.

A module goes from the normalised hidden states of the new tokens to the output projection, on one GPU of a
tensor-parallel group. Every GPU holds the whole cache of keys and the whole indexer; heads are shared out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moesim.hwmodels.errors import InputError
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
