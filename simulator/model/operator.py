"""One operator of a training step as plain data, and the sizes of a GPU's share from which it is built."""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import Struct

from moesim.simulator.model.precision import Blocks
from moesim.simulator.model.recompute import Module, modules_of

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


class GemmShape(Struct, frozen=True):
    """Shape of `groups` GEMMs [m, k] x [k, n]; m (k of a weight gradient) is the sum over the groups."""

    m: float
    n: int
    k: float
    groups: int = 1


class Operator(Struct, frozen=True):
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
    choices: float = 0.0
    """Expert rows of a token, of kernels whose rate depends on them; 0 for all others."""
    uncounted_flop: float = 0.0
    """Part of `flop` that model FLOPs leave out without a recompute policy, such as the scores that the
    backward of flash attention computes again."""


class Work(Struct, frozen=True):
    """One GPU's share of a micro-batch, as the sizes and options that all kinds of layer need."""

    hidden: int
    fp8: bool
    """Whether GEMMs are in FP8 with one scale per tile; casts and transposes are then separate kernels."""
    tokens: float
    """Token rows of GEMMs on this rank (micro-batch / CP)."""
    sequence: int
    tp: int
    ep: int
    rows: float
    """Rows that the experts of this rank compute (one row per token and chosen expert)."""
    received_tokens: float
    """Distinct tokens among `rows`; a token that chose two experts of this rank is sent once."""
    recompute: str | tuple[Module, ...]
    redundant_experts: int = 0
    """Replicas of experts beyond one each, over all ranks."""
    unfused: bool = False
    """Whether attention scores go through memory instead of staying in a fused kernel."""
    flex: bool = False
    """Whether the core attention is PyTorch's compiled flex_attention."""
    dropout: bool = False
    """Whether a dropout kernel runs over these scores."""
    fp8_tensor: bool = False
    """Whether GEMMs are in FP8 with one scale per tensor."""
    current_scales: bool = False
    """Whether a tensor's scale comes from the tensor itself, which a kernel reads before the cast."""
    separate_casts: bool = False
    """Whether an FFN's activation writes BF16 that kernels of their own cast to FP8, forward and backward."""
    blocks: Blocks = ""
    """Format of the GEMMs' operands, if their elements have scales by blocks (MXFP8, NVFP4)."""
    attention: str = ""
    """Format of the core attention's operands, one of `LOW_ATTENTION`; empty for BF16."""
    expert_tp: int = 1
    """Ranks that split the FFN of an expert, each for the received rows of all of them."""
    sequence_parallel: bool = True
    """Whether tensor-parallel ranks split the element-wise work, or each does all of it."""

    pieces: int = 1
    """Parts in which ring attention computes the core; 1 without it."""
    own_latents: bool = False
    """Whether sequence-parallel ranks form the latents of MLA from their own tokens only, and gather them."""

    @property
    def latent_tokens(self) -> float:
        """Rows of the down-projections of MLA and of the norms behind them."""
        return self.norm_tokens if self.own_latents else self.tokens

    @property
    def norm_tokens(self) -> float:
        """Rows of element-wise work, which sequence parallelism splits over TP."""
        return self.tokens / self.tp if self.sequence_parallel else self.tokens

    @property
    def linear(self) -> Dtype:
        """Number format of the linear layers."""
        if self.blocks:
            return "fp4" if self.blocks == "nvfp4" else "fp8"
        return "fp8" if self.fp8 or self.fp8_tensor else "bf16"

    def gemm_variant(self, direction: Direction) -> str:
        """Kernel variant of a GEMM; Transformer Engine splits the accumulation of FP8 input gradients."""
        if not self.fp8_tensor:
            return ""
        return ONE_SCALE_SPLIT if direction == "I" else ONE_SCALE

    def repeats(self, module: Module) -> bool:
        """Whether the backward computes a module of the layer again, one by one."""
        return module in modules_of(self.recompute)
