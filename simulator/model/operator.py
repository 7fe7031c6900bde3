"""One operator of a training step as plain data: what it computes and moves, not how long it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Direction = Literal["F", "I", "W"]
"""Forward, input gradient, weight gradient."""

Dtype = Literal["fp8", "bf16", "fp32"]

OperatorClass = Literal[
    "gemm",  # dense GEMM on tensor cores
    "grouped_gemm",  # the experts of one rank in one launch
    "wgrad_gemm",  # weight gradient, FP32 accumulation into the gradient buffer
    "gate_gemm",  # router logits (small n)
    "attention_forward",
    "attention_backward",
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
    "embedding",
    "loss",
    "optimizer",
]

GEMM_CLASSES: frozenset[OperatorClass] = frozenset({"gemm", "grouped_gemm", "wgrad_gemm", "gate_gemm"})
"""Operators that are matrix multiplications on tensor cores."""
COUNTED_GEMM_CLASSES = GEMM_CLASSES - {"gate_gemm"}
"""GEMMs that published MFUs count: the router is left out."""

Phase = Literal[
    "attn F", "mlp F", "mlp I", "mlp W", "attn I", "attn W",
    "dispatch F", "combine F", "combine B", "dispatch B",
    "gather F", "gather B", "scatter W",
]  # fmt: skip
"""Slots of the overlap schedule. The four expert-parallel phases hold only the small operators that run
on the communication stream before the payload (layout, cast); the last three are ZeRO-3's parameter
all-gathers and gradient reduce-scatter, without operators of their own."""

ONE_SCALE, ONE_SCALE_SPLIT = "tensor", "tensor-split"
"""Variants of FP8 GEMMs with one scale a tensor: with fast accumulation, and with a split one."""

BlockKind: TypeAlias = str
"""What a pipeline stage is made of: `embedding`, `dense` and `moe` layers, `mtp` (a multi-token-prediction
module: one more layer plus its projection and norms, its head pass is a separate block) and `head` (final
norm, output projection and loss over the local tokens). In a model with several kinds of attention layers are
`dense/name` and `moe/name`. What a kind is made of says `ModelShape.block`."""


@dataclass(frozen=True, slots=True)
class GemmShape:
    """[m, k] x [k, n], `groups` times with m rows in all (m is the sum over groups)."""

    m: float
    n: int
    k: float
    groups: int = 1


@dataclass(frozen=True, slots=True)
class Operator:
    """One kernel-sized piece of work on one GPU for one micro-batch.

    `flop`, `bytes_read` and `bytes_written` are totals of the launch. `per_received_row` is true where
    all of them (and gemm.m, or gemm.k of a weight gradient) grow with the token rows that routing sends
    to this rank; they are then given for the nominal rows. `recompute` marks work that model FLOPs do
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
    """0 = main compute stream; 1 = the second compute stream of the weight-gradient phase."""
    variant: str = ""
    """Kernel family inside the class, such as "token" or "channel" of a cast; "" = the class at large."""
    launches: int = 1
    """Kernels that this operator stands for (a chain of small kernels, or one per expert)."""
    accumulated_bytes: float = 0.0
    """Of `bytes_read` and `bytes_written`: what a weight gradient reads and writes of its FP32 buffer."""
    uncounted_flop: float = 0.0
    """Part of `flop` that model FLOPs leave out although nothing is recomputed by choice: the scores
    that a flash-attention backward forms again."""
