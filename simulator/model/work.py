"""Sizes of one GPU's share of a micro-batch, from which operators are built."""

from __future__ import annotations

from dataclasses import dataclass

from moesim.simulator.model.operator import ONE_SCALE, ONE_SCALE_SPLIT, Direction, Dtype
from moesim.simulator.model.precision import Blocks
from moesim.simulator.model.recompute import Module, modules_of


@dataclass(frozen=True, slots=True)
class Work:
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
