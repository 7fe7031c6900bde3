"""One operator of a training step as plain data: its FLOPs and bytes, but not its time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Direction = Literal["F", "I", "W"]
"""Pass that an operator belongs to: forward (F), input gradient (I) or weight gradient (W)."""

Dtype = Literal["fp4", "fp8", "bf16", "fp32"]

OperatorClass = Literal[
    "gemm",  # dense GEMM on tensor cores
    "grouped_gemm",  # the experts of one rank in one launch
    "wgrad_gemm",  # weight gradient, FP32 accumulation into the gradient buffer
    "gate_gemm",  # router logits (small n)
    "attention_forward",
    "attention_backward",
    "scan_forward",  # the scan of a recurrent mixer; the variant is its kind
    "scan_backward",
    "conv",  # short causal convolution over the sequence, by channel
    "attention_pre_post",  # the two memory-bound kernels around the attention backward core
    "cast",  # quantisation, de-quantisation, with or without transpose
    "permute",  # expand to expert order, reduce back, mapping
    "norm",
    "swiglu",
    "rope",
    "copy",
    "transpose",
    "elementwise",
    "topk",  # gate selection and its small kernels
    "sparse_attention_forward",  # core attention over keys that an indexer chose
    "sparse_attention_backward",
    "indexer",  # scores of an indexer over all causal keys
    "indexer_topk",  # choice of keys from these scores
    "embedding",
    "loss",
    "optimizer",
]

GEMM_CLASSES: frozenset[OperatorClass] = frozenset({"gemm", "grouped_gemm", "wgrad_gemm", "gate_gemm"})
"""Operators that are matrix multiplications on tensor cores."""
SCAN_CLASSES: frozenset[OperatorClass] = frozenset({"scan_forward", "scan_backward"})
"""Scans of recurrent mixers, whose chunked algorithms are mostly GEMMs on tensor cores."""
COUNTED_GEMM_CLASSES = GEMM_CLASSES - {"gate_gemm"}
"""GEMM classes that published MFUs count, which leave out the router."""
SPARSE_CLASSES: frozenset[OperatorClass] = frozenset(
    {"sparse_attention_forward", "sparse_attention_backward", "indexer"}
)
"""Operators of sparse attention on tensor cores, whose rates are shares of their roofline."""
CORE_ATTENTION: frozenset[OperatorClass] = frozenset(
    {"attention_forward", "attention_backward", "sparse_attention_forward", "sparse_attention_backward"}
)
"""Core attention, dense or over chosen keys."""

Phase = Literal[
    "attn F", "mlp F", "mlp I", "mlp W", "attn I", "attn W",
    "dispatch F", "combine F", "combine B", "dispatch B",
    "gather F", "gather B", "scatter W",
]  # fmt: skip
"""Phases of a block, in which the operators of a step are grouped. The four expert-parallel phases hold only
the small operators that run on the communication stream before the payload (layout, cast); the last three are
ZeRO-3's parameter all-gathers and gradient reduce-scatter, which have no operators."""

ONE_SCALE, ONE_SCALE_SPLIT = "tensor", "tensor-split"
"""Variants of FP8 GEMMs with one scale per tensor: with fast accumulation, and with split accumulation."""

LOW_ATTENTION = ("fp8", "mxfp8")
"""First part of the variant of a core attention whose operands are FP8: with one scale a tensor, or MXFP8."""

BlockKind: TypeAlias = str
"""Kind of a block of a pipeline stage: `embedding`, `dense` or `moe` for a layer, `mtp` for a
multi-token-prediction module (a layer with its projection and norms; its head pass is a separate block), or
`head` (final norm, output projection and loss over the local tokens). In a model with several kinds of
attention, layers are `dense/name` and `moe/name`. `ModelShape.block` returns the contents of a kind."""


@dataclass(frozen=True, slots=True)
class GemmShape:
    """Shape of `groups` GEMMs [m, k] x [k, n]; m (k of a weight gradient) is the sum over the groups."""

    m: float
    n: int
    k: float
    groups: int = 1


@dataclass(frozen=True, slots=True)
class Operator:
    """One kernel-sized piece of work on one GPU for one micro-batch.

    `flop`, `bytes_read` and `bytes_written` are totals of the launch. `per_received_row` is true where
    all of them (and gemm.m, or gemm.k of a weight gradient) scale with the token rows that routing sends
    to this rank; the figures are then those of the nominal rows. `recompute` marks work that model FLOPs do
    not count.
    """

    name: str
    cls: OperatorClass
    direction: Direction
    dtype: Dtype
    flop: float = 0.0
    bytes_read: float = 0.0
    bytes_written: float = 0.0
    gemm: GemmShape | None = None
    per_received_row: bool = False
    recompute: bool = False
    stream: int = 0
    """0 is the main compute stream, 1 the second compute stream of the weight-gradient phase."""
    variant: str = ""
    """Kernel family inside the class, such as "token" or "channel" of a cast; "" for the class as a whole."""
    launches: int = 1
    """Number of kernels that this operator represents (a chain of small kernels, or one per expert)."""
    accumulated_bytes: float = 0.0
    """Part of `bytes_read` + `bytes_written` with which a weight gradient updates its FP32 buffer."""
    uncounted_flop: float = 0.0
    """Part of `flop` that model FLOPs leave out without a recompute policy, such as the scores that the
    backward of flash attention computes again."""
