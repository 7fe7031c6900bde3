"""Host time of PyTorch operators, GPU time of its MoE routing kernels, memory of a MoE block, on one GPU.

    python benchmarks/gpu/host_launch.py --out DIR [--part host|kernels|block]

Writes host_launch.json. Every part runs by itself; a part that fails says so and the others go on.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

DEV, BF16 = "cuda", torch.bfloat16
CHAIN, REPEATS = 60, 9


def randn(*shape: int, grad: bool = False, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Random values on the GPU."""
    return torch.randn(*shape, device=DEV, dtype=dtype).requires_grad_(grad)


def machine() -> dict[str, Any]:
    """What the numbers were taken on."""
    cpu = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    query = "name,driver_version,clocks.sm,clocks.max.sm,power.draw"
    smi = (
        subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True
        )
        .stdout.strip()
        .splitlines()
    )
    mhz = [
        float(line.split(":")[1])
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("cpu MHz")
    ]
    return {
        "cpu": cpu,
        "cpu_mhz_max_now": max(mhz, default=0.0),
        "cores": len(mhz),
        "gpu": smi,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


# --- host time of an operator -----------------------------------------------------------------------


def host_seconds(run: Callable[[], Any], per: int) -> dict[str, float]:
    """Host seconds of one of `per` calls inside `run`, median of repeats; the GPU is idle before each."""
    run()
    run()
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) / per)
    torch.cuda.synchronize()
    return {"us": statistics.median(times) * 1e6, "min_us": min(times) * 1e6, "max_us": max(times) * 1e6}


def forward_backward(
    step: Callable[[torch.Tensor, int], torch.Tensor],
    start: Callable[[], torch.Tensor],
    parameters: list[torch.Tensor],
) -> dict[str, Any]:
    """Host time of forward and backward of one operator, from a chain of CHAIN of them."""
    forward, backward = [], []
    for i in range(REPEATS + 2):
        for p in parameters:
            p.grad = None
        x = start()
        torch.cuda.synchronize()
        t0 = time.perf_counter()
        y = x
        for j in range(CHAIN):
            y = step(y, j)
        t1 = time.perf_counter()
        g = torch.ones_like(y)
        torch.cuda.synchronize()
        t2 = time.perf_counter()
        y.backward(g)
        t3 = time.perf_counter()
        torch.cuda.synchronize()
        if i >= 2:
            forward.append((t1 - t0) / CHAIN)
            backward.append((t3 - t2) / CHAIN)
    return {
        "forward_us": statistics.median(forward) * 1e6,
        "backward_us": statistics.median(backward) * 1e6,
        "forward_min_us": min(forward) * 1e6,
        "backward_min_us": min(backward) * 1e6,
    }


def host_part() -> dict[str, Any]:
    """Host microseconds of single operators, from chains of the same one."""
    out: dict[str, Any] = {}
    n = 128
    weights = [randn(n, n, grad=True) for _ in range(CHAIN)]
    gains = [randn(n, grad=True) for _ in range(CHAIN)]
    wide = [randn(8, n, n, grad=True) for _ in range(CHAIN)]
    offsets = torch.tensor([16 * (i + 1) for i in range(8)], device=DEV, dtype=torch.int32)
    index = torch.randperm(n, device=DEV)
    cosine = torch.polar(torch.ones(n, 1, 32, device=DEV), torch.randn(n, 1, 32, device=DEV))
    x0 = lambda: randn(n, n, grad=True)  # noqa: E731
    heads = lambda: randn(1, 4, n, 64, grad=True)  # noqa: E731
    rotary = lambda: randn(1, n, 4, 64, grad=True)  # noqa: E731

    def rope(y: torch.Tensor, j: int) -> torch.Tensor:
        z = torch.view_as_complex(y.float().view(*y.shape[:-1], -1, 2))
        return torch.view_as_real(z * cosine).flatten(3).to(y.dtype)

    def put(y: torch.Tensor, j: int) -> torch.Tensor:
        z = torch.zeros_like(y)
        z[index] = y
        return z

    scores = torch.randn(n, 64, device=DEV)
    chains: dict[str, tuple[Any, Any, list[torch.Tensor]]] = {
        "linear": (lambda y, j: F.linear(y, weights[j]), x0, weights),
        "rms_norm": (lambda y, j: F.rms_norm(y, (n,), gains[j]), x0, gains),
        "silu": (lambda y, j: F.silu(y), x0, []),
        "mul": (lambda y, j: y * y, x0, []),
        "add": (lambda y, j: y + y, x0, []),
        "scale": (lambda y, j: y * 1.0001, x0, []),
        "silu_mul": (lambda y, j: F.silu(y) * y, x0, []),
        "sdpa": (lambda y, j: F.scaled_dot_product_attention(y, y, y, is_causal=True), heads, []),
        "rope_complex": (rope, rotary, []),
        "to_float_and_back": (lambda y, j: y.float().to(BF16), x0, []),
        "view_transpose": (lambda y, j: y.view(n, n).transpose(0, 1), x0, []),
        "contiguous_transpose": (lambda y, j: y.transpose(0, 1).contiguous(), x0, []),
        "index_rows": (lambda y, j: y[index], x0, []),
        "index_put_rows": (put, x0, []),
        "grouped_mm": (lambda y, j: torch._grouped_mm(y, wide[j], offs=offsets), x0, wide),
        "bmm": (lambda y, j: torch.bmm(y, y), lambda: randn(4, 64, 64, grad=True), []),
        "cat": (lambda y, j: torch.cat((y[: n // 2], y[n // 2 :])), x0, []),
        "softmax": (
            lambda y, j: F.softmax(y, dim=-1),
            lambda: randn(n, 64, grad=True, dtype=torch.float32),
            [],
        ),
        "split_cat": (lambda y, j: torch.cat(torch.split(y, [48, n - 48], dim=-1), dim=-1), x0, []),
    }
    for name, (step, start, parameters) in chains.items():
        try:
            out[name] = forward_backward(step, start, parameters)
        except Exception as error:
            out[name] = {"failed": repr(error)[:300]}
    a, b = randn(n, n), torch.randn(n, n, device=DEV)
    fa = torch.randn(64, 64, device=DEV).to(torch.float8_e4m3fn)
    one = torch.ones((), device=DEV)
    experts = torch.randint(0, 64, (n * 4,), device=DEV)
    counts = torch.randint(0, 9, (64,), device=DEV)
    tensors = [torch.zeros(1024, device=DEV) for _ in range(40)]
    calls: dict[str, Callable[[], Any]] = {
        "no_grad add_": lambda: b.add_(1.0),
        "no_grad topk": lambda: torch.topk(scores, 8, dim=-1, sorted=False),
        "no_grad argsort stable": lambda: torch.argsort(experts, stable=True),
        "no_grad histc": lambda: torch.histc(experts.float(), bins=64, min=0, max=64),
        "no_grad bincount": lambda: torch.bincount(experts, minlength=64),
        "no_grad cumsum": lambda: torch.cumsum(counts, 0),
        "no_grad gather": lambda: scores.gather(1, experts.view(n, 4)),
        "no_grad scatter": lambda: torch.zeros_like(scores).scatter_(1, experts.view(n, 4), 1.0),
        "no_grad scatter_add": lambda: b.scatter_add_(0, index.view(n, 1).expand(n, n), b),
        "no_grad masked_select free masked_fill": lambda: scores.masked_fill(scores > 0, 0.0),
        "no_grad zeros": lambda: torch.zeros(n, n, device=DEV),
        "no_grad empty": lambda: torch.empty(n, n, device=DEV),
        "no_grad cast fp8": lambda: (a.float() * one).clamp(-448, 448).to(torch.float8_e4m3fn),
        "no_grad amax": lambda: a.abs().amax(),
        "no_grad scaled_mm": lambda: torch._scaled_mm(fa, fa.t(), scale_a=one, scale_b=one, out_dtype=BF16),
        "no_grad linear": lambda: F.linear(a, a),
        "view": lambda: a.view(-1, 64),
        "foreach add 40 tensors": lambda: torch._foreach_add_(tensors, 1.0),
    }
    with torch.no_grad():
        for name, call in calls.items():
            try:
                out[name] = host_seconds(lambda call=call: [call() for _ in range(CHAIN)], CHAIN)
            except Exception as error:
                out[name] = {"failed": repr(error)[:300]}
        out["item of a finished tensor"] = host_seconds(lambda: [one.item() for _ in range(CHAIN)], CHAIN)
        cpu = torch.device("cpu")
        out["tolist through a blocking copy"] = host_seconds(
            lambda: [counts.to(cpu).tolist() for _ in range(CHAIN)], CHAIN
        )
        out["synchronise an idle stream"] = host_seconds(
            lambda: [torch.cuda.current_stream().synchronize() for _ in range(CHAIN)], CHAIN
        )
        out["item behind one kernel"] = host_seconds(
            lambda: [b.add_(1.0).sum().item() for _ in range(CHAIN)], CHAIN
        )
    for part in (bare_launch, graphs, compiled, checkpointed):
        try:
            out |= part()
        except Exception:
            out[f"{part.__name__} failed"] = {"failed": traceback.format_exc()[-600:]}
    return out


def bare_launch() -> dict[str, Any]:
    """cuLaunchKernel of an empty kernel, and cudaMemsetAsync, without the framework."""
    import ctypes

    import cupy

    kernel = cupy.RawKernel('extern "C" __global__ void nothing(float* x) { if (x == 0) return; }', "nothing")
    x = cupy.zeros(4, dtype=cupy.float32)
    kernel((1,), (32,), (x,))
    pointer = ctypes.c_void_p(x.data.ptr)
    table = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.pointer(pointer), ctypes.c_void_p))
    cuda = ctypes.CDLL("libcuda.so.1")
    function = ctypes.c_void_p(kernel.kernel.ptr)
    launch = cuda.cuLaunchKernel
    launch.argtypes = [ctypes.c_void_p] + [ctypes.c_uint] * 7 + [ctypes.c_void_p] * 3
    call = lambda: launch(function, 1, 1, 1, 32, 1, 1, 0, None, table, None)  # noqa: E731
    assert call() == 0
    get = cuda.cuDriverGetVersion
    number = ctypes.c_int()
    return {
        "cuLaunchKernel through ctypes": host_seconds(lambda: [call() for _ in range(200)], 200),
        "ctypes call alone": host_seconds(lambda: [get(ctypes.byref(number)) for _ in range(200)], 200),
    }


def graphs() -> dict[str, Any]:
    """Host time of a replay of a graph of CHAIN and of 10 * CHAIN tiny kernels, GPU time of a node."""
    out = {}
    b = torch.zeros(1024, device=DEV)
    for nodes in (CHAIN, 10 * CHAIN):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(nodes):
                b.add_(1.0)
        out[f"replay of {nodes} nodes"] = host_seconds(graph.replay, 1)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        out[f"replay of {nodes} nodes"]["gpu_us_per_node"] = start.elapsed_time(end) * 1e3 / (2 * nodes)
    return out


def compiled() -> dict[str, Any]:
    """Host time of one call of a compiled graph of two pointwise operators, and of a norm with a product."""
    weight, gain = randn(128, 128, grad=True), randn(128, grad=True)
    pointwise = torch.compile(lambda x: F.silu(x) * x)
    block = torch.compile(lambda x: F.linear(F.rms_norm(x, (128,), gain), weight) + x)
    return {
        "compiled silu_mul": forward_backward(
            lambda y, j: pointwise(y), lambda: randn(128, 128, grad=True), []
        ),
        "compiled norm linear add": forward_backward(
            lambda y, j: block(y), lambda: randn(128, 128, grad=True), [weight, gain]
        ),
    }


def checkpointed() -> dict[str, Any]:
    """A chain of silu and linear inside checkpoints: none, full, and selective by operator."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    weights = [randn(128, 128, grad=True) for _ in range(CHAIN)]

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = op == torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def piece(x: torch.Tensor, first: int) -> torch.Tensor:
        for w in weights[first : first + 10]:
            x = F.silu(F.linear(x, w))
        return x

    def run(mode: str) -> dict[str, float]:
        forward, backward = [], []
        for i in range(REPEATS + 2):
            for w in weights:
                w.grad = None
            x = randn(128, 128, grad=True)
            torch.cuda.synchronize()
            t0 = time.perf_counter()
            for first in range(0, CHAIN, 10):
                if mode == "none":
                    x = piece(x, first)
                elif mode == "full":
                    x = checkpoint(piece, x, first, use_reentrant=False)
                else:
                    x = checkpoint(
                        piece,
                        x,
                        first,
                        use_reentrant=False,
                        context_fn=lambda: create_selective_checkpoint_contexts(policy),
                    )
            t1 = time.perf_counter()
            g = torch.ones_like(x)
            torch.cuda.synchronize()
            t2 = time.perf_counter()
            x.backward(g)
            t3 = time.perf_counter()
            torch.cuda.synchronize()
            if i >= 2:
                forward.append((t1 - t0) / CHAIN)
                backward.append((t3 - t2) / CHAIN)
        return {
            "forward_us": statistics.median(forward) * 1e6,
            "backward_us": statistics.median(backward) * 1e6,
        }

    return {f"linear+silu, checkpoint {mode}": run(mode) for mode in ("none", "full", "selective")}


# --- GPU time of kernels ------------------------------------------------------------------------------


def gpu_seconds(run: Callable[[], Any], repeats: int = 7) -> float:
    """GPU seconds of `run`: events around three calls, a write through L2 before; median."""
    flush = torch.empty(128 * 2**20, device=DEV, dtype=torch.uint8)
    run()
    times = []
    for _ in range(repeats):
        flush.zero_()
        torch.cuda._sleep(400_000)  # the host gets ahead
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(3):
            run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 3e3)
    return statistics.median(times)


def both(function: Callable[..., torch.Tensor], *leaves: torch.Tensor) -> dict[str, float]:
    """GPU microseconds of forward and of backward of a piece, from its leaves."""
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
    """Pieces of a MoE layer written with PyTorch's own operators."""
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
    """Stand-in of the all-to-all: as many rows come as go."""
    return x.clone()


@exchange.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


exchange.register_autograd(lambda ctx, g: g.clone())


def block_part() -> dict[str, Any]:
    """Bytes kept and at the peak, host and GPU time, kernels of a block of routed and shared experts."""
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
    """One block: bytes kept and at the peak, host and GPU time, launches; medians of seven."""
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
    launches = [
        e
        for e in profile.events()
        if e.name
        in (
            "cudaLaunchKernel",
            "cudaLaunchKernelExC",
            "cuLaunchKernel",
            "cuLaunchKernelEx",
            "cudaMemcpyAsync",
            "cudaMemsetAsync",
        )
    ]
    for name in ("FORWARD", "BACKWARD"):
        low, high = spans[name]
        seen[name.lower()] = sum(low <= e.time_range.start <= high for e in launches)
    found |= {f"launches_{key}": value for key, value in seen.items() if value}
    found["launches_all"] = len(launches)
    return found


def main() -> None:
    """Run the parts and write host_launch.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=".")
    parser.add_argument("--part", choices=("host", "kernels", "block"))
    chosen = parser.parse_args()
    parts = {"host": host_part, "kernels": kernels_part, "block": block_part}
    result: dict[str, Any] = {"machine": machine()}
    path = Path(chosen.out) / "host_launch.json"
    for name, part in parts.items():
        if chosen.part in (None, name):
            started = time.perf_counter()
            try:
                result[name] = part()
            except Exception:
                result[name] = {"failed": traceback.format_exc()[-1500:]}
            result[f"{name}_wall_s"] = time.perf_counter() - started
            path.write_text(json.dumps(result, indent=1) + "\n")
            print(name, f"{result[f'{name}_wall_s']:.1f} s", flush=True)
    result["machine_after"] = machine()["gpu"]
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
