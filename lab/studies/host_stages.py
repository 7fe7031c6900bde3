"""Stages of interference.py that need no copy kernel: GPU spread, jitter, memory-bound rates."""

from __future__ import annotations

import argparse
import collections
import datetime
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import torch

from lab.studies import memory_operators as mem
from lab.studies import operators as ops
from lab.studies.harness import Bench, Kernels, cv

HERE = Path(__file__).parent
HBM_BYTES_PER_S = 4.8e12
"""Nominal memory bandwidth of an H200."""


class Monitor:
    """Clocks, power and temperature of every GPU, sampled by NVML in a thread."""

    def __enter__(self) -> Monitor:
        """Start sampling."""
        pynvml.nvmlInit()
        self.handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        self.samples: list[list[tuple[float, ...]]] = []
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._sample)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop sampling; the samples stay."""
        self.ended.set()
        self.thread.join()

    def _sample(self) -> None:
        while not self.ended.wait(0.2):
            self.samples.append([self._read(handle) for handle in self.handles])

    @staticmethod
    def _read(handle: Any) -> tuple[float, ...]:
        return (
            pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
            pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
            pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
            pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
        )

    def since(self, position: int) -> dict[str, dict[str, Any]]:
        """Medians per GPU of the samples from `position` on, and the throttle reasons seen (a bit set)."""
        names = ("sm_mhz", "memory_mhz", "power_w", "temperature_c")
        out: dict[str, dict[str, Any]] = {}
        for gpu, samples in enumerate(zip(*self.samples[position:], strict=True)):
            columns = list(zip(*samples, strict=True))
            out[str(gpu)] = {n: statistics.median(c) for n, c in zip(names, columns[:4], strict=True)}
            out[str(gpu)] |= {
                "throttle_reasons": sorted({hex(r) for r in columns[4]}),
                "samples": len(samples),
            }
        return out


def steps(events: list[torch.cuda.Event]) -> list[float]:
    """Milliseconds between neighbouring events."""
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def spread_operators() -> dict[str, Callable[[], Callable[[], Any]]]:
    """Builders of the operators that all GPUs run at the same time, each called with its GPU current."""

    def bf16() -> Callable[[], Any]:
        a, b, c = ops.normal(8192, 8192), ops.normal(8192, 8192), ops.normal(8192, 8192)
        return lambda: torch.mm(a, b.t(), out=c)

    def fp8() -> Callable[[], Any]:
        operator = ops.fp8_rowwise(8192, 8192, 8192)
        return lambda: operator.run(0)

    def copy() -> Callable[[], Any]:
        x = ops.normal(512 * 1024 * 1024)
        y = torch.empty_like(x)
        return lambda: torch.add(x, 1.0, out=y)

    def attention() -> Callable[[], Any]:
        operator = ops.attention(128, 4096, 128, 128, False)
        return lambda: operator.run(0)

    return {
        "bf16 8192^3": bf16,
        "fp8 row-wise 8192^3": fp8,
        "elementwise 2.1 GB": copy,
        "attention forward 128/128": attention,
    }


def spread(options: argparse.Namespace, _: Kernels, result: dict[str, Any]) -> None:
    """Run each operator on all GPUs at once; store per-GPU medians and their coefficient of variation."""
    gpus = range(torch.cuda.device_count())
    for name, build in spread_operators().items():
        calls = {}
        for gpu in gpus:
            with torch.cuda.device(gpu):
                calls[gpu] = build()
        with Monitor() as monitor:
            result.setdefault("spread", {})[name] = _spread_of(calls, options.warm_s, monitor)
        print(name, {k: v for k, v in result["spread"][name].items() if k != "gpus"})
        del calls
        for gpu in gpus:
            with torch.cuda.device(gpu):
                torch.cuda.empty_cache()


def _spread_of(calls: dict[int, Callable[[], Any]], warm_s: float, monitor: Monitor) -> dict[str, Any]:
    """Warm up and time 300 calls per GPU; a batch is queued ahead so that all GPUs stay busy."""
    events: dict[int, list[torch.cuda.Event]] = {gpu: [] for gpu in calls}
    begin, position = time.monotonic(), None
    waiting: list[torch.cuda.Event] = []
    while time.monotonic() < begin + warm_s:
        if position is None and time.monotonic() > begin + warm_s / 2:
            position = len(monitor.samples)
        marks = _batch(calls, 20)
        for mark in waiting:
            mark.synchronize()
        waiting = marks
    for _ in range(301):
        for gpu, call in calls.items():
            with torch.cuda.device(gpu):
                events[gpu].append(torch.cuda.Event(enable_timing=True))
                events[gpu][-1].record()
                call()
    tail = _batch(calls, 100)
    for gpu in calls:
        torch.cuda.synchronize(gpu)
    del tail
    smi = monitor.since(position or 0)
    times = {gpu: steps(e) for gpu, e in events.items()}
    medians = [statistics.median(t) for t in times.values()]
    rows = {
        str(gpu): {"median_ms": statistics.median(t), "mean_ms": statistics.fmean(t), "call_cv": cv(t)}
        | smi.get(str(gpu), {})
        for gpu, t in times.items()
    }
    return {
        "cv_over_gpus": cv(medians) if len(medians) > 1 else 0.0,
        "slowest_over_median": max(medians) / statistics.median(medians),
        "fastest_over_median": min(medians) / statistics.median(medians),
        "median_call_cv": statistics.median(r["call_cv"] for r in rows.values()),
        "gpus": rows,
    }


def _batch(calls: dict[int, Callable[[], Any]], count: int) -> list[torch.cuda.Event]:
    """Queue `count` calls on every GPU, interleaved, and return each GPU's event after its last call."""
    marks = []
    for _ in range(count):
        for gpu, call in calls.items():
            with torch.cuda.device(gpu):
                call()
    for gpu in calls:
        with torch.cuda.device(gpu):
            marks.append(torch.cuda.Event())
            marks[-1].record()
    return marks


def jitter(options: argparse.Namespace, kernels: Kernels, result: dict[str, Any]) -> None:
    """Measure the variation between repetitions of a fixed 5 ms block on one GPU while others are idle."""
    stream = torch.cuda.Stream(0)
    with torch.cuda.stream(stream):
        gemm = ops.fp8_rowwise(4096, 7168, 16384)
        mix = [gemm, ops.fp8_rowwise(4096, 24576, 1536), ops.attention(128, 4096, 128, 128, False)]
        mix += [mem.cast(kernels, 4096, 7168), *mem.swiglu(kernels, 4096, 18432)]
        mix += [*mem.rmsnorm(kernels, 4096, 7168)]
    for name, block, times in (("fp8 gemm", [gemm], 8), ("mixed", mix, 2)):
        with torch.cuda.stream(stream):
            for operator in block:
                operator.run(0)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(times):
                for operator in block:
                    operator.run(i % operator.sets)
        with Monitor() as monitor, torch.cuda.stream(stream):
            begin = time.monotonic()
            while time.monotonic() < begin + options.warm_s / 2:
                for _ in range(20):
                    graph.replay()
                stream.synchronize()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(401)]
            for event in events:
                event.record()
                graph.replay()
            stream.synchronize()
            smi = monitor.since(0).get("0", {})
        t = steps(events)
        change = [b - a for a, b in itertools.pairwise(t)]
        twentieths = statistics.quantiles(t, n=20)
        result.setdefault("jitter", {})[name] = {
            "kernels": times * len(block),
            "median_ms": statistics.median(t),
            "cv": cv(t),
            "cv_without_drift": statistics.pstdev(change) / 2**0.5 / statistics.fmean(t),
            "p5_over_median": twentieths[0] / statistics.median(t),
            "p95_over_median": twentieths[-1] / statistics.median(t),
            "max_over_median": max(t) / statistics.median(t),
            "gpu": smi,
        }
        print("jitter", name, result["jitter"][name])


def memory(options: argparse.Namespace, kernels: Kernels, result: dict[str, Any]) -> None:
    """Time memory-bound operators alone on all SMs; store the fraction of the nominal HBM bandwidth."""
    stream, out = torch.cuda.Stream(0), result.setdefault("memory_bound", {})
    with torch.cuda.stream(stream):
        operators = list(mem.memory_bound(kernels))
    benches: list[tuple[ops.TimedOperator, Any, Bench, list[float]]] = []
    for operator in operators:
        try:
            with torch.cuda.stream(stream):
                error = operator.check() if operator.check else None
            stream.synchronize()
            benches.append((operator, error, Bench(operator, (), stream), []))
        except Exception:
            result.setdefault("errors", []).append(traceback.format_exc()[-1500:])
    for _ in range(options.rounds):
        for _, _, bench, times in benches:
            times.append(bench.window(0, options.window_ms, [])[0])
    for operator, error, _, times in benches:
        median = statistics.median(times)
        out[operator.name] = {
            "class": operator.group,
            "bytes": operator.bytes,
            "time_us": median * 1e6,
            "fraction_of_4.8_TB_per_s": operator.bytes / median / HBM_BYTES_PER_S,
            "time_cv": cv(times) if len(times) > 1 else 0.0,
            "relative_error": error,
        }
        row = out[operator.name]
        print(
            f"{operator.name:36s} {median * 1e6:9.1f} us {row['fraction_of_4.8_TB_per_s']:.3f} error {error}"
        )


def environment() -> dict[str, Any]:
    """The date, hardware and software of the measurement."""
    query = [
        "nvidia-smi",
        "--query-gpu=name,driver_version,power.limit,clocks.max.sm,ecc.mode.current",
        "--format=csv,noheader",
    ]
    smi = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "gpus": collections.Counter(smi),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "sms": torch.cuda.get_device_properties(0).multi_processor_count,
        "clocks": "not pinned",
    }


def run_all(options: argparse.Namespace, stages: dict[str, Callable[..., None]]) -> None:
    """Run the named stages in order; rewrite the result file, failures included, after each."""
    torch.cuda.set_device(0)
    torch.manual_seed(20261120)
    cubin = Path(tempfile.mkdtemp()) / "memory_bound.cubin"
    subprocess.run(["nvcc", "-cubin", "-arch=sm_90", "-o", cubin, HERE / "memory_bound.cu"], check=True)
    kernels = Kernels(str(cubin))
    result: dict[str, Any] = {"environment": environment()}
    for name in options.stages.split(","):
        begin = time.monotonic()
        try:
            with Monitor() as monitor:
                stages[name](options, kernels, result)
                result.setdefault("clocks_by_stage", {})[name] = monitor.since(0)
        except Exception:
            result.setdefault("errors", []).append(traceback.format_exc()[-2000:])
            print("STAGE FAILED", name, result["errors"][-1])
        result.setdefault("stage_s", {})[name] = round(time.monotonic() - begin, 1)
        options.out.write_text(json.dumps(result, indent=1))
    print("stage seconds", result["stage_s"])
