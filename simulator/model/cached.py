"""Tensors that a block may keep from its forward to its backward pass (plain data)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moesim.simulator.model.recompute import Module

Role = Literal[
    "residual", "norm output", "latent", "expanded", "kept", "linear input", "swiglu output", "scores"
]  # fmt: skip
"""Role of a tensor in its block, by which a recompute policy decides whether to keep it."""

Sharding = Literal["tokens", "width", "none"]
"""How tensor parallelism shards a tensor: by tokens (with sequence parallelism only), by width or not."""


@dataclass(frozen=True, slots=True)
class CachedTensor:
    """One tensor of a block, with its bytes per token of the micro-batch and its sharding."""

    name: str
    bytes_per_token: float
    role: Role
    sharding: Sharding
    kept_by_op: bool = False
    """Whether the recompute policy `op` keeps the tensor although it is not the output of a counted GEMM."""
    modules: frozenset[Module] = frozenset()
    """Modules of which the recompute of any one frees the tensor."""
    routed: bool = False
    """Whether its rows are those that routed experts receive."""
    whole_in_dtensor: bool = False
    """Whether every tensor-parallel rank holds all tokens of it under PyTorch's DTensor (eq. M46)."""


@dataclass(frozen=True, slots=True)
class GemmOutput:
    """Output of a dense GEMM of a layer, with its elements per token and its sharding."""

    name: str
    width: float
    sharding: Sharding
    row_parallel: bool = False
    """Whether every tensor-parallel rank computes a part of the sum over all columns, for all tokens."""
