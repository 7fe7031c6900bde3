"""Sizes of what one GPU does for one micro-batch: what every builder of operators needs."""

from __future__ import annotations

from dataclasses import dataclass

from moesim.simulator.model.operator import ONE_SCALE, ONE_SCALE_SPLIT, Direction, Dtype


@dataclass(frozen=True, slots=True)
class Work:
    """What one GPU does for one micro-batch; no part of it depends on the kinds of layer."""

    hidden: int
    fp8: bool
    """FP8 GEMMs with scales of tiles: casts and transposes are kernels of their own."""
    tokens: float
    """Token rows of GEMMs on this rank (micro-batch / CP)."""
    sequence: int
    tp: int
    ep: int
    rows: float
    """Rows that the experts of this rank compute (one row per token and chosen expert)."""
    received_tokens: float
    """Distinct tokens behind `rows`: one that chose two experts of this rank is sent once."""
    recompute: str
    redundant_experts: int = 0
    """Replicas of experts beyond one each, over all ranks."""
    unfused: bool = False
    """Attention scores go through memory instead of staying in a fused kernel."""
    dropout: bool = False
    """A dropout kernel works on these scores."""
    fp8_tensor: bool = False
    """FP8 GEMMs with one scale a tensor."""
    expert_tp: int = 1
    """Ranks that split the FFN of an expert, each for the received rows of all of them."""
    sequence_parallel: bool = True
    """Whether tensor-parallel ranks split the element-wise work, or each does all of it."""

    @property
    def norm_tokens(self) -> float:
        """Rows of element-wise work: sequence parallelism splits them over TP."""
        return self.tokens / self.tp if self.sequence_parallel else self.tokens

    @property
    def linear(self) -> Dtype:
        """Format of the linear layers."""
        return "fp8" if self.fp8 or self.fp8_tensor else "bf16"

    def gemm_variant(self, direction: Direction) -> str:
        """Kernel family of a GEMM: Transformer Engine splits the accumulation of FP8 gradients."""
        if not self.fp8_tensor:
            return ""
        return ONE_SCALE_SPLIT if direction == "I" else ONE_SCALE

    @property
    def selective(self) -> bool:
        """Whether norms, MLA up-projections and SwiGLU outputs are formed again in the backward."""
        return self.recompute == "selective"
