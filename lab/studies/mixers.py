"""GPU time and saved bytes of the scans, convolutions and gated norms of recurrent mixers, on one GPU.

    python -m lab.studies.mixers --out DIR [--minutes 5]

It needs fla-core and the Python files of mamba-ssm on PYTHONPATH (no compiled extension). The script first
compiles the Triton kernels of every number of heads in parallel processes, then times one shape after the
other and writes mixers.json after each. A kernel that fails is reported and the others continue.

A time is the median of `REPEATS` calls between two CUDA events with a cold L2; a spinning kernel in front
keeps the GPU busy while the host launches, so that the time holds no wait for the host.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")

import torch
import triton.testing
from triton.runtime.autotuner import Autotuner

REPEATS, WARM = 20, 3
SPIN_CYCLES = 12_000_000
"""About 6 ms at 1.9 GHz, longer than the host takes to launch the kernels of one call."""
HEADS: dict[str, tuple[tuple[int, ...], ...]] = {
    # heads, elements, groups, state, chunk
    "mamba2": (
        (64, 64, 8, 128, 128),
        (32, 64, 4, 128, 128),
        (16, 64, 2, 128, 128),
        (128, 64, 8, 128, 128),
        (32, 64, 1, 256, 128),
    ),
    "lightning": ((64, 128), (32, 128), (16, 128), (8, 128)),
    # key heads, value heads, key elements, value elements
    "gated_delta": ((16, 32, 128, 128), (8, 16, 128, 128), (4, 8, 128, 128), (16, 64, 128, 128)),
    # heads, elements
    "kda": ((32, 128), (16, 128), (8, 128)),
}
"""Heads of one GPU: of Qwen3-Next, Qwen3.5, Kimi Linear, Nemotron 3, Nemotron-H and MiniMax-M1, whole and
split by tensor parallelism."""
SHAPES = ((1, 8192), (4, 4096), (1, 32768), (2, 8192), (8, 4096), (1, 4096), (2, 4096), (1, 16384), (4, 8192))
"""Sequences and tokens of a sequence, the most telling ones first."""
CONVOLVED = ((8192, 8192), (8192, 2048), (4096, 6144), (16384, 4096), (16384, 12288), (32768, 8192))
"""Tokens and channels of the short convolution."""
GATED = ((8192, 32), (8192, 8), (4096, 32), (16384, 32), (32768, 64))
"""Tokens and heads of 128 elements of the gated norm."""
Call = Callable[[], torch.Tensor]


def randn(*shape: int, grad: bool = True, scale: float = 1.0) -> torch.Tensor:
    """Normal BF16 numbers."""
    values = torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale
    return values.requires_grad_(grad)


def vector(*shape: int, value: float = 0.0) -> torch.Tensor:
    """A learned FP32 vector."""
    return torch.full(shape, value, device="cuda", dtype=torch.float32, requires_grad=True)


def gated_delta(b: int, s: int, sizes: tuple[int, ...]) -> tuple[Call, list[torch.Tensor]]:
    """The gated delta rule with the norms of q and k and both gates inside the kernels."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    hk, hv, dk, dv = sizes
    q, k, v = randn(b, s, hk, dk), randn(b, s, hk, dk), randn(b, s, hv, dv)
    g, beta, decay, step = randn(b, s, hv), randn(b, s, hv), vector(hv), vector(hv)

    def call() -> torch.Tensor:
        out: torch.Tensor = chunk_gated_delta_rule(
            q, k, v, g, beta, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True,
            use_gate_in_kernel=True, A_log=decay, dt_bias=step,
        )[0]  # fmt: skip
        return out

    return call, [q, k, v, g, beta, decay, step]


def kda(b: int, s: int, sizes: tuple[int, ...]) -> tuple[Call, list[torch.Tensor]]:
    """Kimi delta attention with the norms of q and k and both gates inside the kernels."""
    from fla.ops.kda import chunk_kda

    h, d = sizes
    q, k, v, g = (randn(b, s, h, d) for _ in range(4))
    beta, decay, step = randn(b, s, h), vector(h), vector(h * d)

    def call() -> torch.Tensor:
        out: torch.Tensor = chunk_kda(
            q, k, v, g, beta, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True,
            use_gate_in_kernel=True, A_log=decay, dt_bias=step,
        )[0]  # fmt: skip
        return out

    return call, [q, k, v, g, beta, decay, step]


def mamba2(b: int, s: int, sizes: tuple[int, ...]) -> tuple[Call, list[torch.Tensor]]:
    """The chunked scan of Mamba-2 with the step size's activation inside the kernels."""
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    h, p, groups, n, chunk = sizes
    x, step = randn(b, s, h, p), randn(b, s, h)
    into, out_of = randn(b, s, groups, n), randn(b, s, groups, n)
    decay, bias = vector(h, value=-1.0), vector(h)
    skip = vector(h, value=1.0)

    def call() -> torch.Tensor:
        out: torch.Tensor = mamba_chunk_scan_combined(
            x, step, decay, into, out_of, chunk, D=skip, dt_bias=bias, dt_softplus=True
        )
        return out

    return call, [x, step, into, out_of, decay, bias, skip]


def lightning(b: int, s: int, sizes: tuple[int, ...]) -> tuple[Call, list[torch.Tensor]]:
    """Linear attention with a fixed decay per head."""
    from fla.ops.lightning_attn import chunk_lightning_attn

    h, d = sizes
    q, k, v = (randn(b, s, h, d) for _ in range(3))

    def call() -> torch.Tensor:
        out: torch.Tensor = chunk_lightning_attn(q, k, v, layer_idx=10, num_layers=80)[0]
        return out

    return call, [q, k, v]


def convolution(b: int, s: int, sizes: tuple[int, ...]) -> tuple[Call, list[torch.Tensor]]:
    """Causal convolution over 4 tokens with SiLU."""
    from fla.modules.conv import causal_conv1d

    x, weight = randn(b, s, sizes[0]), randn(sizes[0], 4)

    def call() -> torch.Tensor:
        out: torch.Tensor = causal_conv1d(x, weight, activation="silu")[0]
        return out

    return call, [x, weight]


def gated_norm(b: int, s: int, sizes: tuple[int, ...]) -> tuple[Call, list[torch.Tensor]]:
    """RMSNorm of 128 elements times a gate with SiLU."""
    from fla.modules.fused_norm_gate import rms_norm_gated

    x, gate, weight = randn(b, s, sizes[0], 128), randn(b, s, sizes[0], 128), randn(128)

    def call() -> torch.Tensor:
        out: torch.Tensor = rms_norm_gated(x, gate, weight, None)
        return out

    return call, [x, gate, weight]


KINDS: dict[str, Callable[[int, int, tuple[int, ...]], tuple[Call, list[torch.Tensor]]]] = {
    "gated_delta": gated_delta,
    "kda": kda,
    "mamba2": mamba2,
    "lightning": lightning,
    "conv": convolution,
    "gated_norm": gated_norm,
}


def saved_bytes(call: Call) -> int:
    """Bytes of the distinct tensors that autograd keeps for the backward, parameters included."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = call()
    del out
    return sum(kept.values())


def median_us(run: Callable[[], Any], cold: torch.Tensor) -> tuple[float, float]:
    """Median time of a call and half the spread of its middle half, in microseconds."""
    for _ in range(WARM):
        run()
    events = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        cold.zero_()
        torch.cuda._sleep(SPIN_CYCLES)
        start.record()
        run()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(end) * 1e3 for start, end in events)
    return statistics.median(times), (times[3 * REPEATS // 4] - times[REPEATS // 4]) / 2


def kernels_of(run: Callable[[], Any]) -> dict[str, float]:
    """Microseconds of each kernel of one call, by name, as the profiler sees them."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    return {
        event.key[:80]: float(event.self_device_time_total)
        for event in trace.key_averages()
        if event.self_device_time_total > 0
    }


def measured(kind: str, b: int, s: int, sizes: tuple[int, ...], cold: torch.Tensor) -> dict[str, Any]:
    """Times of forward and backward of one shape, and what the forward keeps."""
    call, inputs = KINDS[kind](b, s, sizes)
    out = call()
    gradient = torch.randn_like(out)

    def backward() -> Any:
        return torch.autograd.grad(out, inputs, gradient, retain_graph=True)

    forward_us, forward_spread = median_us(call, cold)
    backward_us, backward_spread = median_us(backward, cold)
    row: dict[str, Any] = {
        "kind": kind, "sequences": b, "sequence": s, "sizes": sizes,
        "forward_us": forward_us, "backward_us": backward_us,
        "forward_spread_us": forward_spread, "backward_spread_us": backward_spread,
        "saved_bytes": saved_bytes(call),
    }  # fmt: skip
    if (b, s) == SHAPES[0] and kind in HEADS and sizes == HEADS[kind][0]:
        row["forward_kernels_us"], row["backward_kernels_us"] = kernels_of(call), kernels_of(backward)
    return row


def gradient_errors() -> dict[str, float]:
    """Relative errors of output and gradients of the gated delta rule against a loop over the tokens.

    fla-core 0.6.0 refuses one backward kernel on Hopper with Triton 3.4 to 3.7.0, whose results can be wrong
    (its issue 640); where that check was removed to time the kernel, this says what the kernel computed.
    """
    hk, hv, d, s = 2, 4, 128, 256
    call, inputs = gated_delta(1, s, (hk, hv, d, d))
    out = call()
    upstream = torch.randn_like(out)
    fast = [out, *torch.autograd.grad(out, inputs, upstream)]
    q, k, v, g, beta, decay, step = (x.detach().float().requires_grad_() for x in inputs)
    unit = [x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k)]
    qs, ks = (x.repeat_interleave(hv // hk, 2)[0] for x in unit)
    keep = torch.exp(-decay.exp() * torch.nn.functional.softplus(g + step))[0]
    rate = torch.sigmoid(beta)[0]
    state, rows = torch.zeros(hv, d, d, device="cuda"), []
    for t in range(s):
        state = state * keep[t, :, None, None]
        change = (v[0, t] - torch.einsum("hkv,hk->hv", state, ks[t])) * rate[t, :, None]
        state = state + torch.einsum("hk,hv->hkv", ks[t], change)
        rows.append(torch.einsum("hkv,hk->hv", state, qs[t]) * d**-0.5)
    slow_out = torch.stack(rows)[None]
    slow = [slow_out, *torch.autograd.grad(slow_out, [q, k, v, g, beta, decay, step], upstream.float())]
    names = ("output", "q", "k", "v", "decay", "rate", "A_log", "dt_bias")
    pairs = zip(names, fast, slow, strict=True)
    return {name: float((a.float() - b).norm() / b.norm()) for name, a, b in pairs}


def all_shapes() -> Iterator[tuple[str, int, int, tuple[int, ...]]]:
    """Every shape; the quickly compiled kernels come first, Kimi delta attention last."""
    for tokens, channels in CONVOLVED:
        yield "conv", max(1, tokens // 8192), min(tokens, 8192), (channels,)
    for tokens, count in GATED:
        yield "gated_norm", max(1, tokens // 8192), min(tokens, 8192), (count,)
    for few in (True, False):
        for kind in ("gated_delta", "mamba2", "lightning", "kda"):
            for b, s in SHAPES:
                if (SHAPES.index((b, s)) < 5) == few:
                    for sizes in HEADS[kind]:
                        if b * s * sizes[0] <= 32768 * 64:
                            yield kind, b, s, sizes


def machine() -> dict[str, Any]:
    """The hardware and software of the measurement."""
    query = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    packages = {}
    for name in ("torch", "triton", "fla-core", "mamba-ssm"):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = os.environ.get(name.upper().replace("-", "_") + "_VERSION", "unknown")
    return {
        "gpu": subprocess.run(command, capture_output=True, text=True).stdout.strip(),
        "packages": packages,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "command": " ".join(sys.argv),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def compile_all(limit_s: float) -> list[str]:
    """Compile the kernels of every number of heads, one process each; names of those that failed."""
    jobs = [(kind, heads[0]) for kind, heads in HEADS.items()] + [("mamba2", HEADS["mamba2"][-1])]
    jobs += [("conv", (CONVOLVED[0][1],)), ("gated_norm", (GATED[0][1],))]
    running = {}
    for kind, sizes in jobs:
        command = [sys.executable, __file__, "--compile", kind, ",".join(map(str, sizes))]
        running[kind, sizes] = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    end, failed = time.monotonic() + limit_s, []
    for job, process in running.items():
        try:
            _, errors = process.communicate(timeout=max(1.0, end - time.monotonic()))
            if process.returncode:
                failed.append(f"{job}: {errors.decode()[-300:]}")
        except subprocess.TimeoutExpired:
            process.kill()
            failed.append(f"{job}: not compiled in {limit_s:.0f} s")
    return failed


def quick_tuning() -> None:
    """Tune Triton's kernels for a few milliseconds each, and once for all numbers of heads."""
    full, start = triton.testing.do_bench, Autotuner.__init__

    def quick_start(self: Any, fn: Any, names: Any, configs: Any, key: Any, *args: Any, **named: Any) -> None:
        start(self, fn, names, configs, [k for k in key if k not in ("H", "HV", "D")], *args, **named)

    Autotuner.__init__ = quick_start

    def quick(run: Callable[[], Any], quantiles: Any = None, **_: Any) -> Any:
        return full(run, warmup=2, rep=8, quantiles=quantiles)

    triton.testing.do_bench = quick


def main() -> None:
    """Measure every shape, within the given minutes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--compile", nargs=2)
    args = parser.parse_args()
    quick_tuning()
    if args.compile:
        kind, sizes = args.compile[0], tuple(map(int, args.compile[1].split(",")))
        call, inputs = KINDS[kind](1, 2048, sizes)
        torch.autograd.grad(call().float().sum(), inputs)
        return
    begin = time.monotonic()
    result: dict[str, Any] = {"machine": machine(), "rows": [], "failed": []}
    result["not_compiled"] = compile_all(args.minutes * 60 * 0.45)
    result["compile_s"] = time.monotonic() - begin
    try:
        result["gated_delta_errors"] = gradient_errors()
    except Exception:
        result["gated_delta_errors"] = traceback.format_exc()[-600:]
    cold = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    for kind, b, s, sizes in all_shapes():
        if time.monotonic() - begin > args.minutes * 60:
            result["failed"].append([kind, b, s, sizes, "no time left"])
            continue
        try:
            result["rows"].append(measured(kind, b, s, sizes, cold))
        except Exception:
            result["failed"].append([kind, b, s, sizes, traceback.format_exc()[-600:]])
        torch.cuda.empty_cache()
        result["seconds"] = time.monotonic() - begin
        result["machine_after"] = machine()["gpu"]
        (args.out / "mixers.json").write_text(json.dumps(result, indent=1))
        row = result["rows"][-1] if result["rows"] else {}
        print(f"{result['seconds']:.0f} s", kind, b, s, sizes, row.get("forward_us"), row.get("backward_us"))
    print("failed:", *result["failed"], *result["not_compiled"], sep="\n")


if __name__ == "__main__":
    main()
