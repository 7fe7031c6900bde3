"""GPU time of PyTorch's operators in a MoE layer, and the memory and launches of a whole MoE block.

These are two parts of host_launch.py.
"""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

DEV, BF16 = "cuda", torch.bfloat16
LAUNCHES = (
    "cudaLaunchKernel",
    "cudaLaunchKernelExC",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cudaMemcpyAsync",
    "cudaMemsetAsync",
)
"""The driver's and the runtime's calls with which a host gives work to a GPU, as a profiler names them."""


def randn(*shape: int, grad: bool = False, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Random values on the GPU."""
    return torch.randn(*shape, device=DEV, dtype=dtype).requires_grad_(grad)


# --- GPU time of kernels ------------------------------------------------------------------------------


def gpu_seconds(run: Callable[[], Any], repeats: int = 7) -> float:
    """Median GPU seconds of `run`, by events around three calls after a write that flushes the L2 cache."""
    flush = torch.empty(128 * 2**20, device=DEV, dtype=torch.uint8)
    run()
    times = []
    for _ in range(repeats):
        flush.zero_()
        torch.cuda._sleep(400_000)  # lets the host run ahead
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(3):
            run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 3e3)
    return statistics.median(times)


def both(function: Callable[..., torch.Tensor], *leaves: torch.Tensor) -> dict[str, float]:
    """GPU microseconds of the forward and the backward of a piece with these leaf tensors."""
    forward = gpu_seconds(lambda: function(*leaves))
    y = function(*leaves)
    g = torch.randn_like(y)
    backward = gpu_seconds(lambda: torch.autograd.grad(y, leaves, g, retain_graph=True))
    return {"forward_us": forward * 1e6, "backward_us": backward * 1e6}


SIZES = [
    (1024, 6, 64, 2048),
    (4096, 6, 64, 2048),
    (16384, 6, 64, 2048),
    (4096, 8, 128, 2048),
    (2048, 8, 256, 7168),
    (8192, 8, 256, 7168),
    (4096, 4, 32, 2880),
    (16384, 4, 32, 2880),
]


def kernels_part() -> list[dict[str, Any]]:
    """GPU microseconds of the pieces of a MoE layer, by size."""
    rows = []
    for tokens, k, experts, hidden in SIZES:
        row: dict[str, Any] = {"tokens": tokens, "top_k": k, "experts": experts, "hidden": hidden}
        rows.append(row)
        try:
            row |= routing(tokens, k, experts, hidden)
        except Exception:
            row["failed"] = traceback.format_exc()[-600:]
        torch.cuda.empty_cache()
    return rows


def routing(tokens: int, k: int, experts: int, hidden: int) -> dict[str, Any]:
    """GPU microseconds of pieces of a MoE layer that are written with PyTorch's own operators."""
    out: dict[str, Any] = {}
    rows = tokens * k
    logits = randn(tokens, experts, grad=True)
    bias = torch.zeros(experts, device=DEV)

    def gate(z: torch.Tensor) -> torch.Tensor:
        scores = F.softmax(z.to(torch.float32), dim=1)
        _, chosen = torch.topk(scores + bias, k=k, dim=-1, sorted=False)
        torch.histc(chosen.view(-1), bins=experts, min=0, max=experts)
        return scores.gather(1, chosen) * 1.0

    chosen = torch.stack([torch.randperm(experts, device=DEV)[:k] for _ in range(64)]).repeat(tokens // 64, 1)
    out["gate"] = both(gate, logits)
    out["argsort"] = {"forward_us": gpu_seconds(lambda: torch.argsort(chosen.view(-1), stable=True)) * 1e6}
    order = torch.argsort(chosen.view(-1), stable=True)
    x = randn(tokens, hidden, grad=True)
    out["gather rows of tokens"] = both(lambda z: z[order // k], x)
    routed = randn(rows, hidden, grad=True)
    shuffle = torch.cat((torch.randperm(rows, device=DEV), torch.full((64,), rows, device=DEV)))
    out["append a row"] = both(lambda z: torch.vstack((z, z.new_zeros(z.shape[-1]))), routed)
    padded = randn(rows + 1, hidden, grad=True)
    out["gather into groups"] = both(lambda z: z[shuffle, :], padded)
    grouped = randn(rows + 64, hidden, grad=True)

    def back(z: torch.Tensor) -> torch.Tensor:
        target = z.new_empty(rows + 1, hidden)
        target[shuffle, :] = z
        return target[:-1]

    out["scatter from groups"] = both(back, grouped)

    def unsort(z: torch.Tensor) -> torch.Tensor:
        target = torch.zeros(rows, hidden, device=DEV, dtype=z.dtype)
        target[order] = z
        return target

    out["scatter to tokens"] = both(unsort, routed)
    weight = torch.rand(tokens, k, device=DEV, requires_grad=True)

    def combine(w: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return torch.bmm(w.reshape(-1, 1, k), z.reshape(-1, k, hidden).float()).to(BF16).squeeze(1)

    out["weighted sum"] = both(combine, weight, routed)
    width = {2048: 1408, 7168: 2048, 2880: 2880}[hidden]
    a, b = randn(rows, width, grad=True), randn(rows, width, grad=True)
    out["silu_mul"] = both(lambda u, v: F.silu(u) * v, a, b) | {"width": width}
    out["add"] = both(lambda u: u + x.detach(), x)
    gain = randn(hidden, grad=True)
    out["rms_norm"] = both(lambda u, g: F.rms_norm(u, (hidden,), g), x, gain)
    heads = 16
    turned = randn(1, tokens, heads, 64, grad=True)
    wave = torch.polar(torch.ones(1, tokens, 1, 32, device=DEV), torch.randn(1, tokens, 1, 32, device=DEV))

    def rope(u: torch.Tensor) -> torch.Tensor:
        z = torch.view_as_complex(u.float().view(*u.shape[:-1], -1, 2))
        return torch.view_as_real(z * wave).flatten(3).to(u.dtype)

    out["rope_complex"] = both(rope, turned) | {"width": heads * 64}
    del routed, padded, grouped
    here = max(8, experts // 8)
    share = rows // here // 8 * 8
    offsets = torch.tensor([share * (i + 1) for i in range(here)], device=DEV, dtype=torch.int32)
    m = share * here
    u, w1 = randn(m, hidden, grad=True), randn(here, hidden, width, grad=True)
    up = both(lambda p, q: torch._grouped_mm(p, q, offs=offsets), u, w1)
    v, w2 = randn(m, width, grad=True), randn(here, width, hidden, grad=True)
    down = both(lambda p, q: torch._grouped_mm(p, q, offs=offsets), v, w2)
    flop = 2.0 * m * hidden * width
    for name, found in (("grouped up", up), ("grouped down", down)):
        out[name] = found | {
            "rows": m,
            "groups": here,
            "width": width,
            "forward_tflops": flop / found["forward_us"] / 1e6,
            "backward_tflops": 2 * flop / found["backward_us"] / 1e6,
        }
    return out


# --- a whole MoE feed-forward block -------------------------------------------------------------------


@torch.library.custom_op("moesim_bench::exchange", mutates_args=())
def exchange(x: torch.Tensor) -> torch.Tensor:
    """Stand-in for the all-to-all, which receives as many rows as it sends."""
    return x.clone()


@exchange.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


exchange.register_autograd(lambda ctx, g: g.clone())


def block_part() -> dict[str, Any]:
    """Saved and peak bytes, host and GPU time, and kernels of a block of routed and shared experts."""
    out: dict[str, Any] = {}
    for tokens, k, experts, here, hidden, width, shared in (
        (8192, 6, 64, 8, 2048, 1408, 2816),
        (4096, 8, 256, 32, 7168, 2048, 2048),
        (64, 6, 64, 8, 2048, 1408, 2816),
    ):
        for mode in ("none", "selective"):
            name = f"tokens {tokens}, hidden {hidden}, checkpoint {mode}"
            try:
                out[name] = moe_block(tokens, k, experts, here, hidden, width, shared, mode)
            except Exception:
                out[name] = {"failed": traceback.format_exc()[-800:]}
            torch.cuda.empty_cache()
    return out


def moe_block(
    tokens: int, k: int, experts: int, here: int, hidden: int, width: int, shared: int, mode: str
) -> dict[str, Any]:
    """Saved and peak bytes, host and GPU time, and launches of one block, as medians of seven."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    rows = tokens * k
    gain, router = randn(hidden, grad=True), randn(experts, hidden, grad=True)
    w1, w3 = randn(here, width, hidden, grad=True), randn(here, width, hidden, grad=True)
    w2 = randn(here, hidden, width, grad=True)
    s1, s3, s2 = (
        randn(shared, hidden, grad=True),
        randn(shared, hidden, grad=True),
        randn(hidden, shared, grad=True),
    )
    parameters = [gain, router, w1, w2, w3, s1, s2, s3]
    bias = torch.zeros(experts, device=DEV)
    share = rows // here // 8 * 8
    counts = torch.full((here,), share, device=DEV, dtype=torch.int64)
    m = share * here
    shuffle = torch.cat((torch.randperm(rows, device=DEV)[:m], torch.full((8 * here,), rows, device=DEV)))

    def block(x: torch.Tensor) -> torch.Tensor:
        h = F.rms_norm(x, (hidden,), gain)
        scores = F.softmax(F.linear(h, router).to(torch.float32), dim=1)
        _, chosen = torch.topk(scores + bias, k=k, dim=-1, sorted=False)
        top = scores.gather(1, chosen) * 1.0
        torch.histc(chosen.view(-1), bins=experts, min=0, max=experts)
        torch.histc(chosen.view(-1), bins=experts, min=0, max=experts)
        order = torch.argsort(chosen.view(-1), stable=True)
        top.view(-1)[order]
        sent = h[order // k]
        counts.view(8, -1).sum(1).to("cpu").tolist()
        received = torch.ops.moesim_bench.exchange(sent)
        longer = torch.vstack((received, received.new_zeros(hidden)))
        z = longer[shuffle, :]
        offsets = torch.cumsum(counts, 0, dtype=torch.int32)
        u = F.silu(torch._grouped_mm(z, w1.transpose(-2, -1), offs=offsets))
        u = u * torch._grouped_mm(z, w3.transpose(-2, -1), offs=offsets)
        y = torch._grouped_mm(u, w2.transpose(-2, -1), offs=offsets)
        target = y.new_empty(rows + 1, hidden)
        target[shuffle, :] = y
        home = torch.ops.moesim_bench.exchange(target[:-1])
        common = F.linear(F.silu(F.linear(h, s1)) * F.linear(h, s3), s2)
        unsorted = torch.zeros(rows, hidden, device=DEV, dtype=BF16)
        unsorted[order] = home
        routed = torch.bmm(top.reshape(-1, 1, k), unsorted.reshape(-1, k, hidden).float()).to(BF16).squeeze(1)
        return x + (common + routed)

    seen = {"forward": 0, "backward": 0}

    def contexts() -> Any:
        meta = {False: 0, True: 0}

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if op == torch.ops.aten.mm.default:
                meta[ctx.is_recompute] += 1
                keep = meta[ctx.is_recompute] % 2 == 1
            else:
                keep = op == torch.ops.moesim_bench.exchange.default or (
                    op == torch.ops.aten._to_copy.default and str(kwargs.get("device")) == "cpu"
                )
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    def forward(x: torch.Tensor) -> torch.Tensor:
        if mode == "none":
            return block(x)
        return checkpoint(block, x, use_reentrant=False, context_fn=contexts)

    def once() -> dict[str, float]:
        for p in parameters:
            p.grad = None
        x = randn(tokens, hidden, grad=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        t0 = time.perf_counter()
        events[0].record()
        y = forward(x)
        events[1].record()
        t1 = time.perf_counter()
        torch.cuda.synchronize()
        kept = torch.cuda.memory_allocated() - before
        peak_f = torch.cuda.max_memory_allocated() - before
        g = torch.ones_like(y)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        t2 = time.perf_counter()
        start = torch.cuda.Event(enable_timing=True)
        start.record()
        y.backward(g)
        events[2].record()
        t3 = time.perf_counter()
        torch.cuda.synchronize()
        return {
            "kept_bytes": kept,
            "output_bytes": y.numel() * 2,
            "peak_forward_bytes": peak_f,
            "peak_backward_over_kept_bytes": torch.cuda.max_memory_allocated() - base,
            "parameter_gradient_bytes": sum(p.numel() for p in parameters) * 2,
            "host_forward_us": (t1 - t0) * 1e6,
            "host_backward_us": (t3 - t2) * 1e6,
            "gpu_forward_us": events[0].elapsed_time(events[1]) * 1e3,
            "gpu_backward_us": start.elapsed_time(events[2]) * 1e3,
        }

    for _ in range(3):
        once()
    runs = [once() for _ in range(7)]
    found = {key: statistics.median(r[key] for r in runs) for key in runs[0]}
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    ) as profile:
        x = randn(tokens, hidden, grad=True)
        with torch.profiler.record_function("FORWARD"):
            y = forward(x)
        torch.cuda.synchronize()
        with torch.profiler.record_function("BACKWARD"):
            y.backward(torch.ones_like(y))
        torch.cuda.synchronize()
    spans = {
        e.name: (e.time_range.start, e.time_range.end)
        for e in profile.events()
        if e.name in ("FORWARD", "BACKWARD") and e.device_type == torch.autograd.DeviceType.CPU
    }
    launches = [e for e in profile.events() if e.name in LAUNCHES]
    for name in ("FORWARD", "BACKWARD"):
        low, high = spans[name]
        seen[name.lower()] = sum(low <= e.time_range.start <= high for e in launches)
    found |= {f"launches_{key}": value for key, value in seen.items() if value}
    found["launches_all"] = len(launches)
    return found
