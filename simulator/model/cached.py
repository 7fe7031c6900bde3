"""Tensors that a block may keep from its forward to its backward pass (plain data)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal[
    "residual", "norm output", "latent", "expanded", "kept", "linear input", "swiglu output", "scores"
]  # fmt: skip
"""What a tensor is, which decides whether a recompute policy keeps it."""

Sharding = Literal["tokens", "width", "none"]
"""How tensor parallelism cuts it: by tokens (only with sequence parallelism), by width, or not at all."""


@dataclass(frozen=True, slots=True)
class CachedTensor:
    """One tensor of a block: bytes for one token of the micro-batch, and how it is cut."""

    name: str
    bytes_per_token: float
    role: Role
    sharding: Sharding
    kept_by_op: bool = False
    """Whether the recompute policy `op` keeps it although no counted GEMM wrote it."""


@dataclass(frozen=True, slots=True)
class GemmOutput:
    """Output of a dense GEMM of a layer: elements a token, and how it is cut."""

    name: str
    width: float
    sharding: Sharding
