"""Operators of a DeepSeek-V3 layer as repeatable calls over input sets larger than the L2 cache.

GEMMs and attention come from PyTorch. `operator.run(i)` runs input set i on the current stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

SET_BYTES = 300e6
"""Least total bytes of an operator's input sets (the L2 cache holds 60 MB)."""

FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16


@dataclass
class TimedOperator:
    """A repeatable call with the bytes that it must move through HBM and the FLOPs that it must compute."""

    name: str
    group: str
    run: Callable[[int], Any]
    sets: int
    flop: float = 0.0
    bytes: float = 0.0
    sm_aware: bool = False
    check: Callable[[], float] | None = None
    """Relative error against a float32 reference, for our own kernels."""


def normal(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Random normal numbers on the current GPU."""
    return torch.randn(shape, device="cuda", dtype=BF16).to(dtype)


def sets_for(size_bytes: float) -> int:
    """The number of input sets of this size that together exceed the L2 cache several times."""
    return max(2, math.ceil(SET_BYTES / size_bytes))


def fp8_rowwise(m: int, n: int, k: int) -> TimedOperator:
    """FP8 GEMM with one scale per row of A and column of B; it is SM-aware through PyTorch's carve-out."""
    sets = sets_for(m * k + n * k + 2 * m * n)
    data = [
        (
            normal(m, k, dtype=FP8),
            normal(n, k, dtype=FP8).t(),
            torch.rand(m, 1, device="cuda"),
            torch.rand(1, n, device="cuda"),
        )
        for _ in range(sets)
    ]
    return TimedOperator(
        f"fp8 row-wise {m}x{n}x{k}",
        "gemm_sm_aware",
        lambda i: torch._scaled_mm(*data[i], out_dtype=BF16, use_fast_accum=True),
        sets,
        flop=2.0 * m * n * k,
        sm_aware=True,
    )


def fp8_blockwise(m: int, n: int, k: int) -> TimedOperator:
    """FP8 GEMM with 1 x 128 scales of A and 128 x 128 scales of B (cuBLAS), as DeepSeek-V3 trains."""
    sets = sets_for(m * k + n * k + 2 * m * n)
    data = [
        (
            normal(m, k, dtype=FP8),
            normal(n, k, dtype=FP8).t(),
            torch.rand(k // 128, m, device="cuda").t(),
            torch.rand(n // 128, k // 128, device="cuda").t(),
        )
        for _ in range(sets)
    ]
    return TimedOperator(
        f"fp8 block-wise {m}x{n}x{k}",
        "gemm_sm_aware",
        lambda i: torch._scaled_mm(*data[i], out_dtype=BF16, use_fast_accum=False),
        sets,
        flop=2.0 * m * n * k,
        sm_aware=True,
    )


def fp8_grouped(m: int, n: int, k: int, groups: int) -> TimedOperator:
    """Grouped FP8 GEMM (row-wise scales) over `groups` experts of m / groups rows each."""
    data = [
        (
            normal(m, k, dtype=FP8),
            normal(groups * n, k, dtype=FP8).view(groups, n, k).transpose(-2, -1),
            torch.rand(m, device="cuda"),
            torch.rand(groups, n, device="cuda"),
        )
        for _ in range(2)
    ]
    ends = torch.arange(1, groups + 1, device="cuda", dtype=torch.int32) * (m // groups)
    return TimedOperator(
        f"fp8 grouped({groups}) {m}x{n}x{k}",
        "gemm_sm_aware",
        lambda i: torch._scaled_grouped_mm(*data[i], offs=ends, out_dtype=BF16, use_fast_accum=True),
        2,
        flop=2.0 * m * n * k,
        sm_aware=True,
    )


def bf16_gemm(m: int, n: int, k: int, library: str) -> TimedOperator:
    """BF16 GEMM through cuBLAS, or through cuBLASLt, to which PyTorch passes the SM carve-out."""
    sets = sets_for(2 * (m * k + n * k + m * n))
    data = [(normal(m, k), normal(n, k).t()) for _ in range(sets)]

    def run(i: int) -> torch.Tensor:
        torch.backends.cuda.preferred_blas_library(library)
        return torch.mm(*data[i])

    sm_aware = library == "cublaslt"
    group = "gemm_sm_aware" if sm_aware else "gemm_sm_unaware"
    return TimedOperator(f"bf16 {library} {m}x{n}x{k}", group, run, sets, 2.0 * m * n * k, sm_aware=sm_aware)


def attention(heads: int, length: int, dqk: int, dv: int, backward: bool) -> TimedOperator:
    """Causal attention of one sequence; PyTorch chooses the backend."""
    stream = torch.cuda.current_stream()
    data = []
    for _ in range(2):
        q, k, v = (normal(1, heads, length, d).requires_grad_(backward) for d in (dqk, dqk, dv))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True) if backward else None
        data.append((q, k, v, out, normal(1, heads, length, dv)))
    stream.synchronize()

    def forward(i: int) -> torch.Tensor:
        return F.scaled_dot_product_attention(*data[i][:3], is_causal=True)

    def gradients(i: int) -> tuple[torch.Tensor, ...]:
        q, k, v, out, g = data[i]
        return torch.autograd.grad(out, (q, k, v), g, retain_graph=True)

    flop = 2.0 * heads * length * length / 2 * ((3 * dqk + 2 * dv) if backward else (dqk + dv))
    name = f"attention {'backward' if backward else 'forward'} {heads} heads {length} {dqk}/{dv}"
    return TimedOperator(name, "attention", gradients if backward else forward, 2, flop=flop)
