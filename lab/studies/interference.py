"""Slow-down of compute that overlaps a communication kernel, and the spread between GPUs of one host.

Stages, each of which can run alone: interference, sustained, jitter, memory, spread, kernels, margin. They
need two or more Hopper GPUs of one host with peer access, PyTorch, CuPy, pynvml and nvcc.

    python -m lab.studies.interference --out results.json

In the stage interference, a persistent PTX copy (kernels/ptx/copy.ptx, n CTAs, each alone on its SM) pushes
from GPU 0 to GPU 1 while an operator runs on GPU 0. An operator is captured as a CUDA graph of about 6 ms; a
window replays the graph once untimed and then, timed by events, until `--window-ms` is filled. The windows of
an operator (alone, SM-aware, beside the copy, both, for every n) are shuffled within a round and the GPU
rests before each, so that neither drift nor the power limit favours one. An overlapped window counts only if
the copy was running before it and was stopped after it. "told" in a name of a condition means SM-aware
through PyTorch's SM carve-out (cuBLAS SM count target, CUTLASS grid).
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lab.studies import host_stages
from lab.studies import memory_operators as memory
from lab.studies import operators as ops
from lab.studies.harness import Bench, Copy, Kernels, cv

Sample = tuple[float, float]
"""(seconds per call, bytes/s that the copy carried)."""

COPY_SMS = (4, 8, 12, 16, 20, 24, 32)
SINGLE_SMS = (8, 20, 32)
GEMM_SHAPES = (
    (4096, 24576, 1536),
    (4096, 7168, 16384),
    (4096, 4096, 7168),
    (4096, 7168, 2048),
    (32768, 4096, 7168),
    (32768, 7168, 2048),
)


def beside(
    bench: Bench, left_free: int, copies: list[Copy], sms: int, placement: str, ms: float
) -> Sample | None:
    """A window overlapped with the copies, or None where a copy ended before the window did."""
    for copy in copies:
        copy.start(sms, placement)
    value = bench.window(left_free, ms, copies)
    stopped = [copy.stop() for copy in copies]
    return value if all(stopped) else None


def conditions(counts: list[int]) -> list[tuple[str, int, int, int, str]]:
    """(name, SMs left free, copy SMs, copies, placement) of the windows of one round."""
    plan = [("alone", 0, 0, 0, "")] * 3 + [("beside both ways 20", 0, 20, 2, "pairs")]
    plan += [(f"beside {n}", 0, n, 1, "pairs") for n in COPY_SMS]
    plan += [(f"beside singles {n}", 0, n, 1, "singles") for n in SINGLE_SMS]
    plan += [(f"told {n}", n, 0, 0, "") for n in counts]
    plan += [(f"told beside {n}", n, n, 1, "pairs") for n in counts]
    return plan + [(f"told beside singles {n}", n, n, 1, "singles") for n in SINGLE_SMS if n in counts]


def measure(
    bench: Bench, copies: list[Copy], options: argparse.Namespace, rng: random.Random
) -> dict[str, Any]:
    """Measure all conditions of one operator, shuffled within each round, with a rest before each window."""
    plan = conditions([n for n in bench.graphs if n])
    found: dict[str, list[Sample]] = {}
    ratios: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        this: dict[str, list[float]] = {}
        for name, left_free, n, ways, placement in rng.sample(plan, len(plan)):
            time.sleep(options.gap_ms * 1e-3)
            if n:
                value = beside(bench, left_free, copies[:ways], n, placement, options.window_ms)
            else:
                value = bench.window(left_free, options.window_ms, [])
            if value is not None:
                found.setdefault(name, []).append(value)
                this.setdefault(name, []).append(value[0])
        for name, seconds in this.items():
            ratios.setdefault(name, []).append(statistics.median(seconds) / statistics.median(this["alone"]))
    return {name: summary(values, ratios[name]) for name, values in found.items()}


def summary(samples: list[Sample], ratios: list[float]) -> dict[str, float]:
    """Medians and spread of one condition; `ratio` is the time over that alone in the same round."""
    times, rates = zip(*samples, strict=True)
    return {
        "time_us": round(statistics.median(times) * 1e6, 2),
        "time_cv": round(cv(list(times)), 4),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_low": round(min(ratios), 4),
        "ratio_high": round(max(ratios), 4),
        "copy_gb_per_s": round(statistics.median(rates) / 1e9, 1),
        "copy_cv": round(cv(list(rates)), 4),
        "windows": len(samples),
    }


def tested_operators(kernels: Kernels) -> list[Any]:
    """Builders of the operators that overlap the copy, each called inside the measuring stream."""
    gemms = [partial(ops.fp8_rowwise, *s) for s in GEMM_SHAPES]
    gemms += [partial(ops.fp8_blockwise, *s) for s in ((4096, 4096, 7168), (4096, 7168, 16384))]
    gemms += [partial(ops.fp8_grouped, 32768, *sides, 8) for sides in ((4096, 7168), (7168, 2048))]
    gemms += [partial(ops.bf16_gemm, 4096, 4096, 7168, b) for b in ("cublas", "cublaslt")]
    heads = [partial(ops.attention, 128, 4096, d, 128, b) for d in (192, 128) for b in (False, True)]
    moved = [
        lambda: memory.cast(kernels, 4096, 7168),
        lambda: memory.cast(kernels, 32768, 7168),
        lambda: next(memory.rmsnorm(kernels, 32768, 7168)),
        lambda: next(memory.swiglu(kernels, 32768, 2048)),
        lambda: next(memory.torch_kernels()),
    ]
    return [*gemms, *heads, *moved]


def interference(options: argparse.Namespace, kernels: Kernels, result: dict[str, Any]) -> None:
    """Measure every tested operator overlapped with the copy, and the copy alone."""
    copies = [Copy(0, 1), Copy(1, 0)]
    result["copied_words_right"] = [copy.verify(p) for copy in copies for p in ("pairs", "singles")]
    stream, rng = torch.cuda.Stream(0), random.Random(20261120)
    spin = ops.TimedOperator("nothing (one thread spins)", "none", lambda i: torch.cuda._sleep(2_000_000), 1)
    out = result["operators"] = {}
    for build in [lambda: spin, *tested_operators(kernels)]:
        try:
            with torch.cuda.stream(stream):
                operator = build()
            bench = Bench(operator, COPY_SMS if operator.sm_aware else (), stream)
            rows = measure(bench, copies, options, rng)
        except Exception as error:
            result.setdefault("errors", []).append(traceback.format_exc()[-1500:])
            print("FAILED", error)
            torch.cuda.synchronize()
            continue
        out[operator.name] = {
            "group": operator.group,
            "flop": operator.flop,
            "bytes": operator.bytes,
            "rows": rows,
        }
        print(
            operator.name,
            {k: (round(v["ratio"], 3), round(v["copy_gb_per_s"])) for k, v in sorted(rows.items())},
        )
        del bench, operator
    result["copy_sms"] = copies[0].places


def sustained(options: argparse.Namespace, _: Kernels, result: dict[str, Any]) -> None:
    """Measure seconds-long runs at the power limit, where clocks may rise because the copy takes 20 SMs."""
    copy, stream = Copy(0, 1), torch.cuda.Stream(0)
    copy.verify("pairs")
    builders = [
        partial(ops.fp8_rowwise, 4096, 7168, 16384),
        partial(ops.bf16_gemm, 4096, 4096, 7168, "cublas"),
        *(partial(ops.attention, 128, 4096, 192, 128, b) for b in (False, True)),
    ]
    for build in builders:
        with torch.cuda.stream(stream):
            operator = build()
        bench = Bench(operator, (20,) if operator.sm_aware else (), stream)
        rows = result.setdefault("sustained", {})[operator.name] = []
        for name, left_free, n in (
            ("alone", 0, 0),
            ("beside 20", 0, 20),
            ("told beside 20", 20, 20),
            ("alone", 0, 0),
        ):
            if left_free and not operator.sm_aware:
                continue
            with host_stages.Monitor() as monitor:
                if n:
                    copy.start(n, "pairs", limit_s=10)
                bench.window(left_free, options.warm_s * 200, [])
                position = len(monitor.samples)
                seconds, rate = bench.window(left_free, 800, [copy] if n else [])
                valid = copy.stop() if n else True
                gpu = monitor.since(position).get("0", {})
            rows.append(
                {"what": name, "time_us": seconds * 1e6, "copy_gb_per_s": rate / 1e9, "valid": valid} | gpu
            )
        print("sustained", operator.name, rows)


def margin(options: argparse.Namespace, _: Kernels, result: dict[str, Any]) -> None:
    """Measure carve-outs larger than the copy on two GPUs, as clusters may not fit the rest exactly."""
    builders = [lambda: ops.fp8_rowwise(4096, 7168, 16384), lambda: ops.fp8_rowwise(32768, 7168, 2048)]
    builders += [lambda: ops.fp8_grouped(32768, 4096, 7168, 8)]
    for gpu in (0, 1):
        with torch.cuda.device(gpu):
            copy, stream = Copy(gpu, 1 - gpu), torch.cuda.Stream(gpu)
            copy.verify("pairs")
            for build in builders:
                with torch.cuda.stream(stream):
                    operator = build()
                bench = Bench(operator, tuple(range(8, 42, 2)), stream)
                alone = statistics.median(bench.window(0, options.window_ms, [])[0] for _ in range(5))
                rows = result.setdefault("margin", {}).setdefault(f"gpu {gpu}", {})[operator.name] = {}
                for n, more in ((n, more) for n in (8, 12, 16, 20, 24, 32) for more in (0, 2, 4, 8)):
                    samples = [
                        beside(bench, n + more, [copy], n, "pairs", options.window_ms) for _ in range(3)
                    ]
                    times = [sample[0] for sample in samples if sample]
                    rows[f"copy {n} told {n + more}"] = round(statistics.median(times) / alone, 3)
                    time.sleep(options.gap_ms * 1e-3)
                print("margin", gpu, operator.name, rows)
            result["margin"][f"gpu {gpu}"]["copy_sms"] = copy.places


def kernel_names(_: argparse.Namespace, kernels: Kernels, result: dict[str, Any]) -> None:
    """Store which GPU kernels each operator of the stage interference launches."""
    from torch.profiler import ProfilerActivity, profile

    out = result.setdefault("kernels", {})
    for build in tested_operators(kernels):
        try:
            operator = build()
            operator.run(0)
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                operator.run(1 % operator.sets)
                torch.cuda.synchronize()
            out[operator.name] = sorted({e.key[:160] for e in seen.key_averages() if "Sync" not in e.key})
        except Exception as error:
            result.setdefault("errors", []).append(str(error)[-500:])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results.json"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--window-ms", type=float, default=12.0)
    parser.add_argument("--gap-ms", type=float, default=25.0)
    parser.add_argument("--warm-s", type=float, default=6.0)
    parser.add_argument("--stages", default="interference,sustained,jitter,memory,spread,kernels,margin")
    arguments = parser.parse_args()
    stages = {
        "interference": interference,
        "sustained": sustained,
        "spread": host_stages.spread,
        "jitter": host_stages.jitter,
        "memory": host_stages.memory,
        "kernels": kernel_names,
        "margin": margin,
    }
    host_stages.run_all(arguments, stages)
