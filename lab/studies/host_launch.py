"""Host time of PyTorch operators, GPU time of its MoE routing kernels, memory of a MoE block and a loss.

    python -m lab.studies.host_launch --out DIR [--part host|kernels|block|loss]

One GPU is enough. The script writes host_launch.json. A part that fails is reported, and the others continue.
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
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from lab.studies.eager_moe import BF16, DEV, block_part, kernels_part, randn

CHAIN, REPEATS = 60, 9


def _chain(call: Callable[[], Any]) -> list[Any]:
    """Results of a chain of calls, all held so that no tensor is freed between two calls."""
    return [call() for _ in range(CHAIN)]


def machine() -> dict[str, Any]:
    """The hardware and software of the measurement."""
    lines = [line.split(":") for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line]
    models = [value.strip() for key, value, *_ in lines if key.startswith("model name")]
    mhz = [float(value) for key, value, *_ in lines if key.startswith("cpu MHz")]
    query = "name,driver_version,clocks.sm,clocks.max.sm,power.draw"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cpu_mhz_max_now": max(mhz, default=0.0),
        "cores": len(mhz),
        "gpu": subprocess.run(command, capture_output=True, text=True).stdout.strip().splitlines(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


# --- host time of an operator -----------------------------------------------------------------------


def host_seconds(run: Callable[[], Any], per: int) -> dict[str, float]:
    """Host seconds of one of the `per` calls in `run`, the median of repeats that start on an idle GPU."""
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


def chain_of(step: Callable[[torch.Tensor, int], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """CHAIN operators, each on the result of the one before."""

    def chain(y: torch.Tensor) -> torch.Tensor:
        for j in range(CHAIN):
            y = step(y, j)
        return y

    return chain


def forward_backward(
    chain: Callable[[torch.Tensor], torch.Tensor],
    start: Callable[[], torch.Tensor],
    parameters: list[torch.Tensor],
) -> dict[str, Any]:
    """Host time of the forward and backward of one operator of a chain of CHAIN operators."""
    forward, backward = [], []
    for i in range(REPEATS + 2):
        for p in parameters:
            p.grad = None
        x = start()
        torch.cuda.synchronize()
        t0 = time.perf_counter()
        y = chain(x)
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
    """Host microseconds of single operators, measured on chains of the same operator."""
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
            out[name] = forward_backward(chain_of(step), start, parameters)
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
                out[name] = host_seconds(partial(_chain, call), CHAIN)
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
    """Host time of cuLaunchKernel with an empty kernel and of cudaMemsetAsync, without the framework."""
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
    """Host time to replay a CUDA graph of CHAIN or 10 * CHAIN tiny kernels, and GPU time per node."""
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
    """Host time of one compiled call: two pointwise operators, or a norm with a GEMM and an addition."""
    weight, gain = randn(128, 128, grad=True), randn(128, grad=True)
    pointwise = torch.compile(lambda x: F.silu(x) * x)
    start = lambda: randn(128, 128, grad=True)  # noqa: E731
    block = torch.compile(lambda x: F.linear(F.rms_norm(x, (128,), gain), weight) + x)
    return {
        "compiled silu_mul": forward_backward(chain_of(lambda y, j: pointwise(y)), start, []),
        "compiled norm linear add": forward_backward(chain_of(lambda y, j: block(y)), start, [weight, gain]),
    }


def checkpointed() -> dict[str, Any]:
    """Host time of a chain of silu and linear with no, full and per-operator selective checkpointing."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    weights = [randn(128, 128, grad=True) for _ in range(CHAIN)]

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = op == torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(policy)

    def piece(x: torch.Tensor, first: int) -> torch.Tensor:
        for w in weights[first : first + 10]:
            x = F.silu(F.linear(x, w))
        return x

    def run(mode: str) -> dict[str, float]:
        def chain(x: torch.Tensor) -> torch.Tensor:
            for first in range(0, CHAIN, 10):
                if mode == "none":
                    x = piece(x, first)
                elif mode == "full":
                    x = checkpoint(piece, x, first, use_reentrant=False)
                else:
                    x = checkpoint(piece, x, first, use_reentrant=False, context_fn=contexts)
            return x

        times = forward_backward(chain, lambda: randn(128, 128, grad=True), weights)
        return {key: times[key] for key in ("forward_us", "backward_us")}

    return {f"linear+silu, checkpoint {mode}": run(mode) for mode in ("none", "full", "selective")}


def loss_bytes(tokens: int, vocabulary: int, hidden: int) -> dict[str, float]:
    """Bytes above those allocated before the head, per element of the logits."""
    h = torch.randn(1, tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(vocabulary, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, vocabulary, (tokens,), device="cuda")
    n = tokens * vocabulary
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logits = F.linear(h, w)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), labels)
    forward, kept = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    del logits
    torch.cuda.reset_peak_memory_stats()
    loss.backward()
    torch.cuda.synchronize()
    backward = torch.cuda.max_memory_allocated() - before
    return {
        "tokens": tokens,
        "vocabulary": vocabulary,
        "hidden": hidden,
        "forward_peak": forward / n,
        "kept": kept / n,
        "backward_peak": backward / n,
        "weight_and_input_gradient": 2 * (w.numel() + h.numel()) / n,
    }


def loss_part() -> list[dict[str, float]]:
    """Bytes of the loss at three sizes of model."""
    return [loss_bytes(8192, 102400, 2048), loss_bytes(4096, 129280, 7168), loss_bytes(8192, 128256, 4096)]


def main() -> None:
    """Run the parts and write host_launch.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=".")
    parser.add_argument("--part", choices=("host", "kernels", "block", "loss"))
    chosen = parser.parse_args()
    parts = {"host": host_part, "kernels": kernels_part, "block": block_part, "loss": loss_part}
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
