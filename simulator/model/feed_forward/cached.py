"""Tensors that SwiGLU keeps for the backward, in a dense FFN and in routed and shared experts."""

from __future__ import annotations

from collections.abc import Iterator

from moesim.simulator.model.cached import CachedTensor, GemmOutput, Sharding
from moesim.simulator.model.precision import Precision, row_bytes
from moesim.simulator.model.recompute import Module


def swiglu_tensors(
    name: str,
    rows: float,
    width: int,
    precision: Precision,
    sharding: Sharding,
    branches: int = 2,
    *,
    modules: frozenset[Module],
    activation: frozenset[Module] = frozenset(),
    routed: bool = False,
) -> Iterator[CachedTensor]:
    """Outputs of the branches and of the activation, for `rows` rows per token.

    The recompute of any of `modules` frees both outputs, that of `activation` frees the second only.
    """
    up = rows * row_bytes(branches * width, precision.activation_cache)
    out = rows * row_bytes(width, precision.activation_cache)
    inner = modules | activation
    yield CachedTensor(f"{name} gate and up", up, "kept", sharding, modules=modules, routed=routed)
    yield CachedTensor(f"{name} SwiGLU output", out, "swiglu output", sharding, modules=inner, routed=routed)


def swiglu_outputs(width: int, hidden: int, branches: int = 2) -> Iterator[GemmOutput]:
    """Outputs of the dense GEMMs in the order of their calls."""
    for n in range(branches):
        yield GemmOutput(f"FFN branch {n}", width, "width")
    yield GemmOutput("FFN output", hidden, "tokens", row_parallel=True)
