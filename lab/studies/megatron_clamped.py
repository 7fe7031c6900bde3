"""Times what Megatron core runs around gpt-oss's attention and experts beside fused kernels, on one GPU.

    python -m lab.studies.megatron_clamped --out DIR [--part sync checkpoints pieces gemms]

The pieces are retyped from NVIDIA/Megatron-LM@d7288711b (the same code in 0d8e0714c, the Megatron core of NeMo
25.11): `rope_utils.py` `_apply_rotary_pos_emb_bshd`, which YaRN's scale keeps from the fused kernel;
`fused_bias_geglu.py` `weighted_bias_quick_geglu_impl`, whose clamps run apart; `experts.py` `_apply_bias`;
and the GEMMs of `TEGroupedMLP` as Transformer Engine runs them, one cuBLAS call an expert on four streams.
Times of pieces are sums of the profiler's kernel durations, each piece behind a kernel that overwrites L2;
times of GEMMs are CUDA events. `sync` is how long the host stays in `torch.tensor(1.0, device="cuda")` behind
queued work; `checkpoints` is the host's time of modules that are checkpointed by themselves
(`tensor_parallel/random.py`, `CheckpointWithoutOutput`). It needs torch alone.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

BF16, FP32, DEVICE = torch.bfloat16, torch.float32, "cuda"
HIDDEN, FFN, HEAD, SEQUENCE, SCALE, CLAMP = 2880, 2880, 64, 4096, 1.3466, 7.0
REPEATS = 10
Call = Callable[[], Any]


def random(*shape: int, dtype: torch.dtype = BF16, grad: bool = False) -> torch.Tensor:
    """A tensor of normal numbers."""
    return torch.randn(*shape, device=DEVICE, dtype=dtype).requires_grad_(grad)


# --- Megatron core's code -------------------------------------------------------------------------


def rope(t: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """Rotate [sequence, batch, heads, size] by halves."""
    t, rest = t[..., : freqs.shape[-1]], t[..., freqs.shape[-1] :]
    cos, sin = ((f(freqs) * SCALE).to(t.dtype) for f in (torch.cos, torch.sin))
    first, second = torch.chunk(t, 2, dim=-1)
    t = (t * cos) + (torch.cat((-second, first), dim=-1) * sin)
    return torch.cat((t, rest), dim=-1)


@torch.compile
def geglu(y: torch.Tensor, weights: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """The compiled activation."""
    a, b = torch.chunk(y, 2, -1)
    return (a * torch.sigmoid(1.702 * a) * (b + offset) * weights).to(y.dtype)


@torch.compile
def geglu_back(
    g: torch.Tensor, y: torch.Tensor, weights: torch.Tensor, offset: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Its compiled backward."""
    own = g * weights
    a, b = torch.chunk(y, 2, -1)
    s = torch.sigmoid(1.702 * a)
    da = own * s * (1 + 1.702 * a * (1 - s)) * (b + offset)
    db = own * a * s
    dw = a * torch.sigmoid(1.702 * a) * (b + offset) * g.to(weights.dtype)
    dw = torch.sum(dw, dim=-1, keepdim=True)
    return torch.cat((da, db), -1).to(y.dtype), dw.to(weights.dtype)


class Geglu(torch.autograd.Function):
    """`WeightedQuickGeGLUFunction`."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, weights: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(y, weights, offset)
        return geglu(y, weights, offset)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return *geglu_back(grad, *ctx.saved_tensors), None


OFFSET: list[torch.Tensor] = []


def clamped(y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The activation with its clamps; the offset stays on the device, so that nothing synchronises."""
    a, b = y.chunk(2, -1)
    y = torch.cat((a.clamp(min=None, max=CLAMP), b.clamp(min=-CLAMP, max=CLAMP)), -1)
    return Geglu.apply(y, weights, OFFSET[0])


def add_biases(y: torch.Tensor, biases: list[torch.Tensor], rows: list[int], p: torch.Tensor) -> torch.Tensor:
    """`_apply_bias`."""
    parts = zip(torch.split(y, rows), biases, torch.split(p, rows), strict=True)
    return torch.cat([t + b * w for t, b, w in parts]).to(y.dtype)


# --- timing ---------------------------------------------------------------------------------------

_FLUSH: list[torch.Tensor] = []


def kernels(call: Call) -> dict[str, Any]:
    """Microseconds of a call's kernels, their number, and both by name, over `REPEATS` calls."""
    if not _FLUSH:
        _FLUSH.append(torch.rand(64 * 1024 * 1024, device=DEVICE) + 1.0)
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as prof:
        for _ in range(REPEATS):
            _FLUSH[0].lgamma_()
            call()
        torch.cuda.synchronize()
    us, count = Counter[str](), Counter[str]()
    for event in prof.events():
        if str(event.device_type).endswith("CUDA") and "lgamma" not in event.name:
            us[event.name] += event.time_range.elapsed_us() / REPEATS
            count[event.name] += 1
    total = sum(us.values())
    names = {n: [round(t, 2), count[n] / REPEATS] for n, t in us.most_common(8)}
    return {"us": total, "launches": sum(count.values()) / REPEATS, "kernels": names}


def host_us(call: Call) -> float:
    """Host microseconds of a call whose launches nothing holds up."""
    times = []
    for _ in range(30):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - begin))
    torch.cuda.synchronize()
    return statistics.median(times)


def piece(name: str, forward: Callable[[], torch.Tensor], leaves: list[torch.Tensor], **facts: Any) -> dict[str, Any]:
    """A piece's forward, and its whole pass less the forward as the backward."""
    out = forward()
    grad = torch.randn_like(out)

    def backward() -> None:
        torch.autograd.grad(out, leaves, grad, retain_graph=True)

    row = {"piece": name, **facts, "forward": kernels(forward), "backward": kernels(backward)}
    return row | {"forward_host_us": host_us(forward), "backward_host_us": host_us(backward)}


def pieces() -> list[dict[str, Any]]:
    """All pieces at micro-batches of 1, 2 and 4 sequences; 16 experts are those of EP8, 2 of EP64."""
    rows = []
    OFFSET.append(torch.tensor(1.0, dtype=BF16, device=DEVICE))
    freqs = random(SEQUENCE, 1, 1, HEAD, dtype=FP32)
    for batch in (1, 2, 4):
        for heads in (64, 8):
            t = random(SEQUENCE, batch, heads, HEAD, grad=True)
            rows.append(piece("rope", lambda t=t: rope(t, freqs), [t], batch=batch, heads=heads))
        routed = 4 * SEQUENCE * batch
        for dtype in (BF16, FP32):
            p = torch.rand(routed, 1, device=DEVICE, dtype=dtype).requires_grad_()
            y = random(routed, 2 * FFN, grad=True)
            facts = {"batch": batch, "rows": routed, "weights": str(dtype)}
            rows.append(piece("clamped", lambda y=y, p=p: clamped(y, p), [y, p], **facts))
            rows.append(piece("fused", lambda y=y, p=p: Geglu.apply(y, p, OFFSET[0]), [y, p], **facts))
            del y
            for experts in (16, 2):
                biases = [random(HIDDEN, grad=True) for _ in range(experts)]
                y, each = random(routed, HIDDEN, grad=True), [routed // experts] * experts
                rows.append(
                    piece(
                        "biases", lambda y=y, b=biases, e=each, p=p: add_biases(y, b, e, p), [y, *biases, p],
                        experts=experts, **facts,
                    )
                )  # fmt: skip
    return rows


# --- GEMMs ----------------------------------------------------------------------------------------


def on_streams(calls: list[Call], streams: list[torch.cuda.Stream]) -> None:
    """The calls in turn on all streams, as `nvte_multi_tensor_gemm` does."""
    main = torch.cuda.current_stream()
    ready = main.record_event()
    for stream in streams:
        stream.wait_event(ready)
    for n, call in enumerate(calls):
        with torch.cuda.stream(streams[n % len(streams)]):
            call()
    for stream in streams:
        main.wait_event(stream.record_event())


def event_us(call: Call) -> dict[str, float]:
    """Median, least and greatest microseconds of a call by CUDA events."""
    times = []
    for n in range(3 + 2 * REPEATS):
        _FLUSH[0].lgamma_()
        _FLUSH[0].lgamma_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times += [1e3 * start.elapsed_time(end)] if n >= 3 else []
    return {"us": statistics.median(times), "least_us": min(times), "most_us": max(times)}


def gemms() -> list[dict[str, Any]]:
    """Both projections of 16 experts: forward with bias, input gradient, accumulated weight gradient."""
    streams, rows = [torch.cuda.Stream() for _ in range(4)], []
    for m in (1024, 2048, 4096):
        for name, wide, deep in (("gate_up", 2 * FFN, HIDDEN), ("down", HIDDEN, FFN)):
            x, g = random(16 * m, deep), random(16 * m, wide)
            w = [random(wide, deep) for _ in range(16)]
            grads, bias = [torch.zeros_like(t) for t in w], [random(wide) for _ in range(16)]
            y, dx = torch.empty_like(g), torch.empty_like(x)
            xs, gs, ys, dxs = (torch.split(t, m) for t in (x, g, y, dx))
            parts = range(16)
            calls: dict[str, list[Call]] = {
                "forward": [lambda n=n: torch.mm(xs[n], w[n].t(), out=ys[n]) for n in parts],
                "forward bias": [lambda n=n: torch.addmm(bias[n], xs[n], w[n].t(), out=ys[n]) for n in parts],
                "dgrad": [lambda n=n: torch.mm(gs[n], w[n], out=dxs[n]) for n in parts],
                "wgrad": [lambda n=n: grads[n].addmm_(gs[n].t(), xs[n]) for n in parts],
                "bias gradient": [lambda n=n: gs[n].sum(0) for n in parts],
            }
            for what, own in calls.items():
                flop = 2.0 * 16 * m * wide * deep
                row = {"gemm": name, "rows": m, "what": what, **event_us(lambda own=own: on_streams(own, streams))}
                row["one_stream_us"] = event_us(lambda own=own: on_streams(own, streams[:1]))["us"]
                rows.append(row | {"tflops": 0.0 if what == "bias gradient" else flop / row["us"] / 1e6})
    return rows


# --- checkpoints of modules -----------------------------------------------------------------------


def rng_states() -> tuple[Any, ...]:
    """`_get_all_rng_states`, with two named states as Megatron core's tracker holds."""
    return torch.get_rng_state(), torch.cuda.get_rng_state("cuda"), dict(TRACKED)


TRACKED: dict[str, torch.Tensor] = {}


def set_rng_states(cpu: torch.Tensor, cuda: torch.Tensor, tracked: dict[str, torch.Tensor]) -> None:
    """`_set_all_rng_states`."""
    torch.set_rng_state(cpu)
    torch.cuda.default_generators[torch.cuda.current_device()].set_state(cuda)
    TRACKED.update(tracked)


class Without(torch.autograd.Function):
    """`CheckpointWithoutOutputFunction`."""

    @staticmethod
    def forward(ctx: Any, run: Call, holder: Any, *args: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            out = run(*args)
        ctx.save_for_backward(*(a.detach().requires_grad_(a.requires_grad) for a in args))
        holder.ctx = ctx
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        torch.autograd.backward(ctx.outputs, grad)
        return None, None, *(a.grad for a in ctx.inputs)


class CheckpointWithoutOutput:
    """Megatron core's `tensor_parallel/random.py`, without FP8 and CUDA graphs."""

    def checkpoint(self, run: Call, *args: torch.Tensor) -> torch.Tensor:
        self.run, self.states = run, rng_states()
        self.out = Without.apply(run, self, *args)
        return self.out

    def recompute(self, _: torch.Tensor) -> None:
        current = rng_states()
        set_rng_states(*self.states)
        inputs = tuple(t.detach().requires_grad_(t.requires_grad) for t in self.ctx.saved_tensors)
        with torch.enable_grad():
            again = self.run(*inputs)
        set_rng_states(*current)
        self.out.untyped_storage().resize_(again.untyped_storage().nbytes())
        with torch.no_grad():
            self.out.untyped_storage().copy_(again.untyped_storage())
        self.ctx.outputs, self.ctx.inputs = again, inputs

    def discard(self, hook: torch.Tensor) -> None:
        self.out.untyped_storage().resize_(0)
        hook.register_hook(self.recompute)


def checkpoints() -> dict[str, float]:
    """Host microseconds of a norm and an activation before a GEMM, plain and checkpointed by themselves."""
    TRACKED.update({name: torch.cuda.get_rng_state() for name in ("model-parallel-rng", "expert-parallel-rng")})
    x, w, g = random(64, 1, 256, grad=True), random(256, 256, grad=True), random(256, grad=True)
    modules: dict[str, Call] = {
        "norm": lambda t: torch.nn.functional.rms_norm(t, (256,), g),
        "silu": torch.nn.functional.silu,
    }
    found = {"pointwise": host_us(lambda: torch.nn.functional.silu(x))}
    for name, module in modules.items():
        for how in ("plain", "checkpoint"):

            def forward(module: Call = module, how: str = how) -> torch.Tensor:
                if how == "plain":
                    return torch.nn.functional.linear(module(x), w)
                own = CheckpointWithoutOutput()
                out = torch.nn.functional.linear(own.checkpoint(module, x), w)
                own.discard(out)
                return out

            found[f"{name} {how} forward"] = host_us(forward)
            times = []
            for _ in range(60):
                out = forward()
                grad = torch.ones_like(out)
                torch.cuda.synchronize()
                begin = time.perf_counter()
                out.backward(grad)
                times.append(1e6 * (time.perf_counter() - begin))
            found[f"{name} {how} backward"] = statistics.median(times)
    return found


def synchronises() -> dict[str, float]:
    """Milliseconds on the host of the offset's tensor behind queued work, and of the queue itself."""
    a = random(8192, 8192)

    def timed(call: Call) -> float:
        torch.cuda.synchronize()
        for _ in range(10):
            a @ a
        begin = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - begin)

    names: dict[str, Call] = {
        "offset_ms": lambda: torch.tensor(1.0, dtype=BF16, device=DEVICE),
        "queue_ms": torch.cuda.synchronize,
        "kernel_ms": lambda: a[0].add(1.0),
    }
    return {name: statistics.median(timed(call) for _ in range(5)) for name, call in names.items()}


def main() -> None:
    """Measure and write megatron_clamped.json after every part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", nargs="*", default=[])
    options = parser.parse_args()
    out, chosen = options.out, options.part
    query = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
    smi = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    about = {
        "torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "command": " ".join(sys.argv),
    }  # fmt: skip
    data: dict[str, Any] = {"about": about}
    parts: dict[str, Call] = {
        "sync": synchronises, "checkpoints": checkpoints, "pieces": pieces, "gemms": gemms,
    }  # fmt: skip
    for name in (n for n in parts if not chosen or n in chosen):
        part = parts[name]
        data[name] = part()
        about[f"gpu after {name}"] = subprocess.run(smi, capture_output=True, text=True).stdout.strip()
        (out / "megatron_clamped.json").write_text(json.dumps(data, indent=1))
        print(name, "done", flush=True)
    print(json.dumps({k: v for k, v in data.items() if k not in ("pieces", "gemms")}, indent=1))

if __name__ == "__main__":
    main()
