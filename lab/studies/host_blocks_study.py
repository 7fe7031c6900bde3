"""Times of the host in whole blocks: a study of one device, its cases, and what a block costs.

Part of host_blocks.py and host_megatron.py.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from msgspec.structs import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lab.studies import host_blocks_models as models
from lab.studies.host_blocks_models import TOKENS, VOCABULARY, BlockCase
from lab.studies.kept_bytes import kept_bytes, slope
from lab.studies.eager_moe import LAUNCHES

SHALLOW, DEEP = 2, 8


class Study:
    """The device, the time left and the results, which are rewritten after every case."""

    def __init__(self, options: argparse.Namespace, file: str, rank: int) -> None:
        """Start the clock of the budget."""
        self.began, self.rank = time.monotonic(), rank
        self.budget_s: float = options.budget
        self.device: str = "cpu" if options.dry else "cuda"
        self.dry: bool = options.dry
        self.only: list[str] = [text for text in options.only.split(",") if text]
        self.passes: int = 3 if options.dry else 25
        self.file = Path(options.out) / file
        self.result: dict[str, Any] = {
            "command": " ".join(sys.argv),
            "blocks": {},
            "parts": {},
            "seconds": {},
        }

    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self.budget_s - (time.monotonic() - self.began)

    def synchronise(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def agreed(self, enough: bool) -> bool:
        """Whether every rank says yes, so that all ranks skip the same cases."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return enough
        flag = torch.tensor([float(enough)], device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag.item())

    def run(self, group: str, name: str, call: Callable[[], Any], needs_s: float = 3.0) -> None:
        """Store what a case returns, or its failure; leave it out if not asked for or without time."""
        if self.only and not any(text in name for text in self.only):
            return
        if not self.agreed(self.left_s() > needs_s):
            self.result[group][name] = {"skipped": f"{self.left_s():.0f} s left"}
            return
        start = time.monotonic()
        try:
            self.result[group][name] = call()
        except Exception:
            self.result[group][name] = {"failed": traceback.format_exc()[-1500:]}
        self.result["seconds"][name] = round(time.monotonic() - start, 2)
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()
        self.write()

    def write(self) -> None:
        """Write the results of rank 0."""
        if self.rank == 0:
            self.result["total_s"] = round(time.monotonic() - self.began, 1)
            self.file.write_text(json.dumps(self.result, indent=1) + "\n")


def spread(seconds: list[float]) -> dict[str, float]:
    """Median and quantiles of some times, in microseconds."""
    cuts = statistics.quantiles(seconds, n=20)
    return {
        "us": statistics.median(seconds) * 1e6,
        "p5_us": cuts[0] * 1e6,
        "p25_us": cuts[4] * 1e6,
        "p75_us": cuts[14] * 1e6,
        "p95_us": cuts[18] * 1e6,
    }


def passes(study: Study, forward: Callable[[], torch.Tensor], clear: Callable[[], None]) -> dict[str, Any]:
    """Host time of a forward and of its backward, each from an idle device, and until the device is done."""
    times: dict[str, list[float]] = {"forward": [], "forward_done": [], "backward": [], "backward_done": []}
    gc.collect()
    gc.disable()
    try:
        for i in range(study.passes + (1 if study.dry else 5)):
            clear()
            study.synchronise()
            t0 = time.perf_counter()
            y = forward()
            t1 = time.perf_counter()
            study.synchronise()
            t2 = time.perf_counter()
            seed = torch.ones_like(y)
            study.synchronise()
            t3 = time.perf_counter()
            y.backward(seed)
            t4 = time.perf_counter()
            study.synchronise()
            t5 = time.perf_counter()
            del y, seed
            if i >= (1 if study.dry else 5):
                for name, value in zip(times, (t1 - t0, t2 - t0, t4 - t3, t5 - t3), strict=True):
                    times[name].append(value)
    finally:
        gc.enable()
    return {name: spread(values) for name, values in times.items()}


def wall(study: Study, call: Callable[[], Any]) -> dict[str, float]:
    """Host time of a call from an idle device."""
    times = []
    for i in range(study.passes // 2 + 3):
        study.synchronise()
        start = time.perf_counter()
        call()
        if i >= 2:
            times.append(time.perf_counter() - start)
    study.synchronise()
    return spread(times)


def whole(study: Study, case: BlockCase) -> dict[str, Any]:
    """Times of a whole model."""
    model = models.build(case, study.device)
    tokens = torch.randint(0, VOCABULARY, (1, TOKENS[case.size]), device=study.device)
    more = models.attention_masks(case, tokens)

    def clear() -> None:
        for parameter in model.parameters():
            parameter.grad = None

    out = passes(study, lambda: model(tokens, **more), clear)
    out["host_reads"] = host_reads(study, lambda: model(tokens, **more))
    out["parameters"] = len(list(model.parameters()))
    out["kept"] = kept_bytes(study.device, lambda: model(tokens, **more), clear)
    return out


def launches(study: Study, case: BlockCase) -> dict[str, float]:
    """Kernels, copies and clears that one block's forward and backward launch, counted by the profiler."""
    from torch.profiler import ProfilerActivity, profile

    counts = {}
    for layers in (2, 4):
        model = models.build(replace(case, layers=layers), study.device)
        tokens = torch.randint(0, VOCABULARY, (1, TOKENS[case.size]), device=study.device)
        more = models.attention_masks(case, tokens)
        y = model(tokens, **more)
        y.backward(torch.ones_like(y))
        kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (study.device == "cuda")
        for name in ("forward", "backward"):
            if name == "forward":
                study.synchronise()
            with profile(activities=kinds) as seen:
                if name == "forward":
                    y = model(tokens, **more)
                else:
                    y.backward(torch.ones_like(y))
                study.synchronise()
            counts[name, layers] = sum(e.name in LAUNCHES for e in seen.events())
    return {name: (counts[name, 4] - counts[name, 2]) / 2 for name in ("forward", "backward")}


def host_reads(study: Study, forward: Callable[[], torch.Tensor]) -> dict[str, int] | None:
    """How often a forward and its backward wait for the device, as PyTorch's own check counts it."""
    if study.device != "cuda":
        return None
    counts = {}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            y = forward()
            counts["forward"] = sum("synchroniz" in str(w.message) for w in seen)
            y.backward(torch.ones_like(y))
            counts["both"] = sum("synchroniz" in str(w.message) for w in seen)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return counts


def block(study: Study, case: BlockCase) -> dict[str, Any]:
    """Host time of one block of a case: the slope between two depths; both depths are kept."""
    depths = (SHALLOW, SHALLOW + 2) if study.dry else (SHALLOW, DEEP)
    if case.size in ("real", "large"):
        depths = (1, 3)
    models.forget_compiled()
    began = time.monotonic()
    found = {depth: whole(study, replace(case, layers=depth)) for depth in depths}
    low, high = (found[depth] for depth in depths)
    span = depths[1] - depths[0]
    out: dict[str, Any] = {"depths": depths}
    for name in ("forward", "forward_done", "backward", "backward_done"):
        out[f"{name}_us"] = (high[name]["us"] - low[name]["us"]) / span
        out[f"{name}_p25_us"] = (high[name]["p25_us"] - low[name]["p25_us"]) / span
        out[f"{name}_p75_us"] = (high[name]["p75_us"] - low[name]["p75_us"]) / span
    out["kept"] = slope(low["kept"], high["kept"], span, TOKENS[case.size])
    if case.compile:
        out["seconds"] = time.monotonic() - began
        out["graphs"] = dict(torch._dynamo.utils.counters["stats"])
    return out | {"models": {str(depth): row for depth, row in found.items()}}


def conduct(study: Study, run: Callable[[Study], None], short: Callable[[dict[str, Any]], Any]) -> None:
    """Run a study to its end, print its blocks in short and its parts, and end the process."""
    stop_late(study)
    run(study)
    study.write()
    if study.rank == 0:
        print(
            json.dumps({name: short(row) for name, row in study.result["blocks"].items()}, indent=1)[-6000:]
        )
        print(json.dumps(study.result["parts"])[-4000:])
        print("seconds", study.result["total_s"], study.result["seconds"])
    sys.stdout.flush()
    os._exit(0)  # no tear-down of groups, which can wait for a rank that ended early


def stop_late(study: Study) -> None:
    """End the process where a case hangs well past the budget; what was written stays."""

    def watch() -> None:
        time.sleep(max(1.0, study.left_s() + 25.0))
        sys.stderr.write("a case ran past the budget, the process ends\n")
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
