"""Memory-bound operators of a DeepSeek-V3 layer: the plain kernels of memory_bound.cu, and PyTorch's own."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from lab.studies.harness import Kernels
from lab.studies.operators import BF16, FP8, TimedOperator, normal, sets_for

HIDDEN = 7168


def relative_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """||ours - reference|| / ||reference|| in float32."""
    return float((ours.float() - reference.float()).norm() / reference.float().norm())


def memory_bound(k: Kernels) -> Iterator[TimedOperator]:
    """The operator classes of a DeepSeek-V3 layer that move bytes rather than compute."""
    for rows, columns in ((4096, HIDDEN), (32768, HIDDEN), (32768, 2048), (4096, 16384)):
        yield cast(k, rows, columns)
    for rows in (4096, 32768):
        yield from rmsnorm(k, rows, HIDDEN)
    for rows, width in ((32768, 2048), (4096, 2048), (4096, 18432)):
        yield from swiglu(k, rows, width)
    for rows in (4096, 32768):
        yield gather(k, rows, HIDDEN)
    yield combine(k, 4096, HIDDEN)
    for rows, columns in ((4096, HIDDEN), (32768, 2048)):
        yield transpose(k, rows, columns)
    yield rope(k, 4096, 128)
    yield from torch_kernels()


def cast(k: Kernels, rows: int, columns: int) -> TimedOperator:
    """Cast of bf16 to fp8 with 1 x 128 scales."""
    size = rows * columns
    sets = sets_for(3 * size)
    data = [
        (
            normal(rows, columns),
            torch.empty(rows, columns, device="cuda", dtype=FP8),
            torch.empty(rows, columns // 128, device="cuda"),
        )
        for _ in range(sets)
    ]

    def run(i: int) -> None:
        k("cast_1x128", (size // 8 // 1024,), (256,), *data[i], size // 8)

    def check() -> float:
        run(0)
        x, y, scale = data[0]
        return relative_error(y.float().view(-1, 128) * scale.view(-1, 1), x.float().view(-1, 128))

    return TimedOperator(
        f"cast 1x128 {rows}x{columns}", "cast", run, sets, bytes=size * (3 + 4 / 128), check=check
    )


def rmsnorm(k: Kernels, rows: int, columns: int) -> Iterator[TimedOperator]:
    """RMSNorm forward and backward."""
    size, ctas = rows * columns, 396
    sets = sets_for(4 * size)
    weight, partial = normal(columns), torch.empty(ctas, columns, device="cuda")
    data = [
        (normal(rows, columns), normal(rows, columns), torch.empty(rows, columns, device="cuda", dtype=BF16))
        for _ in range(sets)
    ]
    inverse = torch.empty(rows, device="cuda")
    block = (columns // 8 // 7,)  # 7 vectors a thread, see memory_bound.cu

    def forward(i: int) -> None:
        k("rmsnorm_forward", (rows,), block, data[i][0], weight, data[i][2], inverse)

    def backward(i: int) -> None:
        x, dy, dx = data[i]
        k("rmsnorm_backward", (ctas,), block, dy, x, weight, inverse, dx, partial, np.int32(rows))

    def reference() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        x, w = data[0][0].float().requires_grad_(), weight.float().requires_grad_()
        y = F.rms_norm(x, (columns,), w, 1e-6)
        return y.detach(), *torch.autograd.grad(y, (x, w), data[0][1].float()), x

    def check_forward() -> float:
        forward(0)
        return relative_error(data[0][2], reference()[0])

    def check_backward() -> float:
        forward(0)
        backward(0)
        _, dx, dw, _ = reference()
        return max(relative_error(data[0][2], dx), relative_error(partial.sum(0), dw))

    yield TimedOperator(
        f"rmsnorm forward {rows}x{columns}", "rmsnorm", forward, sets, bytes=4 * size, check=check_forward
    )
    yield TimedOperator(
        f"rmsnorm backward {rows}x{columns}", "rmsnorm", backward, sets, bytes=6 * size, check=check_backward
    )


def swiglu(k: Kernels, rows: int, width: int) -> Iterator[TimedOperator]:
    """SwiGLU, silu(gate) * up, forward and backward."""
    size, vectors = rows * width, rows * width // 8
    sets = sets_for(6 * size)
    empty = lambda columns: torch.empty(rows, columns, device="cuda", dtype=BF16)  # noqa: E731
    data = [
        (normal(rows, 2 * width), normal(rows, width), empty(width), empty(2 * width)) for _ in range(sets)
    ]

    def forward(i: int) -> None:
        k("swiglu_forward", (vectors // 256,), (256,), data[i][0], data[i][2], vectors, np.int32(width // 8))

    def backward(i: int) -> None:
        gu, dy, _, dgu = data[i]
        k("swiglu_backward", (vectors // 256,), (256,), gu, dy, dgu, vectors, np.int32(width // 8))

    def check(i: int = 0) -> float:
        forward(i)
        backward(i)
        gu = data[i][0].float().requires_grad_()
        y = F.silu(gu[:, :width]) * gu[:, width:]
        (dgu,) = torch.autograd.grad(y, gu, data[i][1].float())
        return max(relative_error(data[i][2], y.detach()), relative_error(data[i][3], dgu))

    yield TimedOperator(
        f"swiglu forward {rows}x{width}", "swiglu", forward, sets, bytes=6 * size, check=check
    )
    yield TimedOperator(
        f"swiglu backward {rows}x{width}", "swiglu", backward, sets, bytes=10 * size, check=check
    )


def gather(k: Kernels, rows: int, columns: int) -> TimedOperator:
    """Gather of rows in a random order (token permutation)."""
    size = rows * columns
    sets = sets_for(4 * size)
    data = [
        (
            normal(rows, columns),
            torch.randperm(rows, device="cuda").int(),
            torch.empty(rows, columns, device="cuda", dtype=BF16),
        )
        for _ in range(sets)
    ]

    def run(i: int) -> None:
        k("gather_rows", (rows,), (columns // 8,), *data[i])

    def check() -> float:
        run(0)
        return relative_error(data[0][2], data[0][0][data[0][1].long()])

    return TimedOperator(f"gather rows {rows}x{columns}", "permute", run, sets, bytes=4 * size, check=check)


def combine(k: Kernels, tokens: int, columns: int) -> TimedOperator:
    """Weighted sum of eight rows per token (local combine of the routed experts)."""
    x, y = normal(8 * tokens, columns), torch.empty(tokens, columns, device="cuda", dtype=BF16)
    index = torch.randperm(8 * tokens, device="cuda").int()
    weight = torch.rand(tokens, 8, device="cuda")

    def run(i: int) -> None:
        k("combine_rows", (tokens,), (columns // 8,), x, index, weight, y)

    def check() -> float:
        run(0)
        rows = x[index.long()].float().view(tokens, 8, columns)
        return relative_error(y, (rows * weight[:, :, None]).sum(1))

    return TimedOperator(
        f"combine 8 rows {tokens}x{columns}", "permute", run, 1, bytes=18 * tokens * columns, check=check
    )


def transpose(k: Kernels, rows: int, columns: int) -> TimedOperator:
    """Transpose of a bf16 matrix."""
    size = rows * columns
    sets = sets_for(4 * size)
    data = [
        (normal(rows, columns), torch.empty(columns, rows, device="cuda", dtype=BF16)) for _ in range(sets)
    ]

    def run(i: int) -> None:
        k("transpose_bf16", (columns // 64, rows // 64), (32, 8), *data[i], np.int32(rows), np.int32(columns))

    def check() -> float:
        run(0)
        return relative_error(data[0][1], data[0][0].t())

    return TimedOperator(f"transpose {rows}x{columns}", "transpose", run, sets, bytes=4 * size, check=check)


def rope(k: Kernels, tokens: int, heads: int) -> TimedOperator:
    """Rotary embedding in place, 64 columns per head."""
    size = tokens * heads * 64
    data = [normal(tokens, heads, 64) for _ in range(sets_for(2 * size))]
    angle = torch.rand(tokens, 32, device="cuda") * 6
    cosine, sine = angle.cos(), angle.sin()

    def run(i: int) -> None:
        k("rope", (size // 16 // 256,), (256,), data[i], cosine, sine, size // 16, np.int32(heads))

    def check() -> float:
        a, b = data[0].float().split(32, -1)
        c, s = cosine[:, None], sine[:, None]
        reference = torch.cat((a * c - b * s, b * c + a * s), -1)
        run(0)
        return relative_error(data[0], reference)

    return TimedOperator(f"rope {tokens}x{heads}x64", "rope", run, len(data), bytes=4 * size, check=check)


def torch_kernels() -> Iterator[TimedOperator]:
    """PyTorch's own elementwise and norm kernels, for comparison."""
    big = 128 * 1024 * 1024
    x, y = normal(big), torch.empty(big, device="cuda", dtype=BF16)
    yield TimedOperator(
        "torch elementwise add 537 MB", "elementwise", lambda i: torch.add(x, 1.0, out=y), 1, bytes=4 * big
    )
    total, part = torch.zeros(big, device="cuda"), normal(big)
    yield TimedOperator(
        "torch fp32 += bf16 1.3 GB", "elementwise", lambda i: total.add_(part), 1, bytes=10 * big
    )
    rows = normal(32768, HIDDEN)
    weight = normal(HIDDEN)
    yield TimedOperator(
        "torch rms_norm 32768x7168",
        "torch",
        lambda i: F.rms_norm(rows, (HIDDEN,), weight),
        1,
        bytes=4 * rows.numel(),
    )
    index = torch.randperm(32768, device="cuda")
    yield TimedOperator(
        "torch index_select 32768x7168",
        "torch",
        lambda i: rows.index_select(0, index),
        1,
        bytes=4 * rows.numel(),
    )
    yield TimedOperator(
        "torch transpose copy 32768x7168", "torch", lambda i: rows.t().contiguous(), 1, bytes=4 * rows.numel()
    )
