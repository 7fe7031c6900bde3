"""Host time of whole blocks of torchtitan's models, on one GPU or on two, and what gathers around them.

    python kernels/calibrate/studies/host_blocks.py --one --out DIR --budget 120
    torchrun --nproc-per-node 2 kernels/calibrate/studies/host_blocks.py --two --out DIR --budget 100

The host's time of a block is the difference between a deep and a shallow model, divided by the blocks
between them, so embedding, head and the root's hooks are not in it. Tensors are tiny, so that the device
never limits; one case of a family has real sizes. The script writes host_blocks_one.json or
host_blocks_two.json after every case. A case that fails loses its own row. `--dry` runs every path on a CPU,
with few repeats. As a script it needs PyTorch and torchtitan only.
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
import types
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
if __name__ == "__main__" and not __package__:  # run as a file: moesim's own imports are not needed
    HERE = Path(__file__).resolve().parent
    NAMES = ("moesim", "moesim.kernels", "moesim.kernels.calibrate", "moesim.kernels.calibrate.studies")
    for _name in NAMES:
        _package = types.ModuleType(_name)
        _package.__path__ = [str(HERE)]
        sys.modules[_name] = _package
import torch
import torch.distributed as dist

from moesim.kernels.calibrate.studies import host_blocks_models as models
from moesim.kernels.calibrate.studies.host_blocks_models import TOKENS, VOCABULARY, BlockCase
from moesim.kernels.calibrate.studies.host_launch import machine

SHALLOW, DEEP = 2, 8
LAUNCHES = (
    "cudaLaunchKernel",
    "cudaLaunchKernelExC",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cudaMemcpyAsync",
    "cudaMemsetAsync",
)


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
    if case.size == "real" or case.compile:
        depths = (1, 3)
    found = {depth: whole(study, replace(case, layers=depth)) for depth in depths}
    low, high = (found[depth] for depth in depths)
    span = depths[1] - depths[0]
    out: dict[str, Any] = {"depths": depths}
    for name in ("forward", "forward_done", "backward", "backward_done"):
        out[f"{name}_us"] = (high[name]["us"] - low[name]["us"]) / span
        out[f"{name}_p25_us"] = (high[name]["p25_us"] - low[name]["p25_us"]) / span
        out[f"{name}_p75_us"] = (high[name]["p75_us"] - low[name]["p75_us"]) / span
    return out | {"models": {str(depth): row for depth, row in found.items()}}


def stop_late(study: Study) -> None:
    """End the process where a case hangs well past the budget; what was written stays."""

    def watch() -> None:
        time.sleep(max(1.0, study.left_s() + 25.0))
        sys.stderr.write("host_blocks: a case ran past the budget, the process ends\n")
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Measure and write the results."""
    from moesim.kernels.calibrate.studies import host_blocks_parts as parts
    from moesim.kernels.calibrate.studies import host_blocks_two as two

    parser = argparse.ArgumentParser()
    parser.add_argument("--one", action="store_true")
    parser.add_argument("--two", action="store_true")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--out", default=".")
    parser.add_argument("--budget", type=float, default=120.0)
    parser.add_argument("--only", default="", help="texts, one of which a case's name has, between commas")
    options = parser.parse_args()
    device = "cpu" if options.dry else "cuda"
    rank, world = models.start_group(device)
    study = Study(options, "host_blocks_two.json" if options.two else "host_blocks_one.json", rank)
    study.result["world"] = world
    study.result["torchtitan"] = models.load_torchtitan()
    if options.dry:
        models.imitate_gpu_on_cpu()
        study.result["machine"] = {"torch": torch.__version__}
    else:
        study.result["machine"] = machine()
        models.use_untuned_flex_attention()
    stop_late(study)
    (two.run_two if options.two else parts.run_one)(study)
    study.write()
    if rank == 0:
        print(json.dumps({k: short(v) for k, v in study.result["blocks"].items()}, indent=1)[-9000:])
        print("seconds", study.result["total_s"], study.result["seconds"])
    sys.stdout.flush()
    os._exit(0)  # no tear-down of groups, which can wait for a rank that ended early


def short(row: dict[str, Any]) -> Any:
    """A block's two medians, or what became of it."""
    if "forward_us" not in row:
        return str(row)[-300:]
    return f"forward {row['forward_us']:.0f} us, backward {row['backward_us']:.0f} us"


if __name__ == "__main__":
    main()
