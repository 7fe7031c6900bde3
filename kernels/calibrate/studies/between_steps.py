"""Pieces of FSDP2, clipping and optimizers, and GEMMs beside copies (part of between_gemms.py)."""

# ruff: noqa: B023 -- a piece is used before the loop goes on (see between_cases.py)

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from moesim.kernels.calibrate.studies.between_cases import BF16, EXPERTS, LAYER, Make, TimedPiece


def sharded_parameters(make: Make) -> Iterator[TimedPiece]:
    """What FSDP2 runs around its collectives for one group of parameters, at 1, 8 and 64 shards.

    The calls are those of torch's `_fsdp_collectives.py`; a group of one member runs them too.
    """
    for title, shapes in (("dense layer", LAYER), ("experts", EXPERTS)):
        for world in (1, 8, 64):
            yield from _gathered(make, title, shapes, world)
            yield from _reduced(make, title, shapes, world)


def _padded(shape: tuple[int, ...], world: int) -> tuple[int, ...]:
    return (math.ceil(shape[0] / world) * world, *shape[1:])


def _gathered(
    make: Make, title: str, shapes: tuple[tuple[int, ...], ...], world: int
) -> Iterator[TimedPiece]:
    """The cast of the shards, their copy into the gathered buffer, and the copies out of it."""
    whole = [_padded(tuple(make.size(n) for n in shape), world) for shape in shapes]
    counts = [math.prod(shape) // world for shape in whole]
    total = sum(counts)
    shards = [torch.randn(count, device=make.device) for count in counts]
    flat = torch.empty(total, device=make.device, dtype=BF16)
    gathered = torch.empty(total * world, device=make.device, dtype=BF16)
    slots, parts = list(flat.split(counts)), list(gathered.narrow(0, 0, total).split(counts))
    outputs = [torch.empty(count * world, device=make.device, dtype=BF16) for count in counts]
    views = [out.view(world, -1) for out in outputs]
    at = {"group": title, "shards": world, "parameters": total * world, "tensors": len(counts)}

    yield TimedPiece("fsdp cast of shards to bf16", lambda: torch._foreach_copy_(slots, shards), 6.0 * total,
                sizes=at)  # fmt: skip
    yield TimedPiece("fsdp copy in", lambda: torch._foreach_copy_(parts, slots), 4.0 * total, sizes=at)
    yield TimedPiece(
        "fsdp copy out",
        lambda: torch.split_with_sizes_copy(gathered.view(world, -1), counts, dim=1, out=views),
        4.0 * total * world, sizes=at,
    )  # fmt: skip


def _reduced(make: Make, title: str, shapes: tuple[tuple[int, ...], ...], world: int) -> Iterator[TimedPiece]:
    """Packing of gradients, the copy in place of a reduce-scatter of one member, division, accumulation."""
    sides = [tuple(make.size(n) for n in shape) for shape in shapes]
    grads = [torch.randn(shape, device=make.device, dtype=BF16) for shape in sides]
    padded = sum(math.prod(_padded(shape, world)) for shape in sides)
    real = float(sum(g.numel() for g in grads))
    wide = torch.empty(padded, device=make.device)
    narrow = torch.empty(padded, device=make.device, dtype=BF16)
    shard, total = (
        torch.randn(padded // world, device=make.device),
        torch.zeros(padded // world, device=make.device),
    )
    at = {"group": title, "shards": world, "parameters": padded, "tensors": len(grads)}

    def pack(out: torch.Tensor) -> Callable[[], Any]:
        return lambda: torch._chunk_cat(grads, dim=0, num_chunks=world, out=out.view(world, -1))

    yield TimedPiece("fsdp packing of gradients to fp32", pack(wide), 2 * real + 4.0 * padded, sizes=at)
    yield TimedPiece("fsdp packing of gradients in bf16", pack(narrow), 2 * real + 2.0 * padded, sizes=at)
    yield TimedPiece("fsdp division of the buffer", lambda: wide.div_(8.0), 8.0 * padded, sizes=at)
    yield TimedPiece(
        "fsdp accumulation of the shard", lambda: total.add_(shard), 12.0 * padded / world, sizes=at
    )
    if world == 1:
        out = torch.empty_like(wide)
        yield TimedPiece("fsdp copy of one member", lambda: out.copy_(wide), 8.0 * padded, sizes=at)
        yield TimedPiece("fsdp division and copy of one member", lambda: out.copy_(wide / 8.0), 16.0 * padded,
                    sizes=at)  # fmt: skip


def steps(make: Make) -> Iterator[TimedPiece]:
    """Global norm, clipping and Adam: few large tensors, and many small shards of 64 members."""
    for title, layers, world in (
        ("one layer whole", 1, 1),
        ("four layers whole", 4, 1),
        ("32 layers of 64 shards", 32, 64),
    ):
        shapes = [tuple(make.size(n) for n in shape) for shape in LAYER * layers]
        counts = [math.ceil(math.prod(shape) / world) for shape in shapes]
        values = [torch.randn(count, device=make.device) for count in counts]
        for value in values:
            value.grad = torch.randn_like(value)
        grads = [value.grad for value in values]
        n = float(sum(counts))
        at = {"tensors": len(counts), "parameters": int(n), "title": title}
        one = torch.ones((), device=make.device)

        def norm() -> torch.Tensor:
            return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2.0)), 2.0)

        yield TimedPiece("global norm", norm, 4 * n, sizes=at)
        yield TimedPiece("clipping", lambda: torch._foreach_mul_(grads, one), 8 * n, sizes=at)
        yield TimedPiece("zero gradients", lambda: torch._foreach_zero_(grads), 4 * n, sizes=at)
        for kind in ("fused", "foreach"):
            if kind == "foreach" and layers == 4:
                continue  # its temporaries would take 20 GB
            adam = torch.optim.AdamW(values, lr=1e-5, fused=kind == "fused", foreach=kind == "foreach")
            yield TimedPiece(f"adamw {kind} fp32", adam.step, 28 * n, sizes=at)
            adam.state.clear()
        if layers != 4:
            narrow = [torch.empty_like(value, dtype=BF16) for value in values]
            yield TimedPiece("masters to bf16", lambda: torch._foreach_copy_(narrow, values), 6 * n, sizes=at)
        if layers == 1:
            yield from _narrow_adam(make, counts, at)


def _narrow_adam(make: Make, counts: list[int], at: dict[str, Any]) -> Iterator[TimedPiece]:
    """Fused Adam with weights, gradients and moments in BF16."""
    values = [torch.randn(count, device=make.device, dtype=BF16) for count in counts]
    for value in values:
        value.grad = torch.randn_like(value)
    adam = torch.optim.AdamW(values, lr=1e-5, fused=True)
    yield TimedPiece("adamw fused bf16", adam.step, 14.0 * sum(counts), sizes=at)


def beside_copies(make: Make, seconds: Callable[[Callable[[], Any], int], float]) -> Iterator[dict[str, Any]]:
    """GEMMs alone and beside copies on another stream: over PCIe either way, on the device, and by few SMs.

    `seconds(call, repeats)` times repeated calls on the current stream. A copy over PCIe moves about what
    a pipeline send moves over a NIC, without SMs; a copy kernel on few thread blocks stands for NCCL's sends.
    """
    aside = torch.cuda.Stream()
    host = torch.empty(512 * 2**20, dtype=torch.uint8).pin_memory()
    source = torch.randint(0, 255, (512 * 2**20,), device=make.device, dtype=torch.uint8)
    target = torch.empty_like(source)
    from moesim.kernels.calibrate.studies.block_copy import copy as kernel

    def blocks(count: int) -> Callable[[], Any]:
        words, a, b = source.numel() // 4, source.view(torch.int32), target.view(torch.int32)
        return lambda: kernel[(count,)](a, b, words, BLOCK=4096, num_warps=16)

    copies: dict[str, Callable[[], Any] | None] = {
        "alone": None,
        "device to host": lambda: host.copy_(source, non_blocking=True),
        "host to device": lambda: target.copy_(host, non_blocking=True),
        "device to device": lambda: target.copy_(source),
        "copy kernel on 4 blocks": blocks(4),
        "copy kernel on 16 blocks": blocks(16),
    }
    for m, n, k in ((4096, 6144, 5120), (8192, 3072, 6144)):
        a, b = make.normal(m, k), make.normal(n, k).t()
        out = torch.empty(m, n, device=make.device, dtype=BF16)
        repeats = 150
        for name, copy in copies.items():
            yield _beside(aside, name, copy, lambda: torch.mm(a, b, out=out), repeats, seconds) | {
                "m": m, "n": n, "k": k, "copy_bytes": source.numel(), "flop": 2.0 * m * n * k,
            }  # fmt: skip


def _beside(
    aside: Any, name: str, copy: Callable[[], Any] | None, gemm: Callable[[], Any], repeats: int, seconds: Any
) -> dict[str, Any]:
    """Seconds of a GEMM while the copy repeats on another stream, and of a copy during that."""
    if copy is None:
        return {"beside": name, "gemm_s": seconds(gemm, repeats)}
    copy()
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    with torch.cuda.stream(aside):
        marks[0].record()
        copy()
        marks[1].record()
    torch.cuda.synchronize()
    once = marks[0].elapsed_time(marks[1]) * 1e-3
    count = max(2, math.ceil(0.4 / once))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    with torch.cuda.stream(aside):
        torch.cuda._sleep(2_000_000)
        events[0].record()
        for i in range(count):
            copy()
            events[i + 1].record()
    took = seconds(gemm, repeats)
    still = not aside.query()
    torch.cuda.synchronize()
    beside = sorted(x.elapsed_time(y) * 1e-3 for x, y in itertools.pairwise(events))
    return {"beside": name, "gemm_s": took, "copy_alone_s": once, "copy_s": beside[len(beside) // 2],
            "copy_outlasted": still}  # fmt: skip
