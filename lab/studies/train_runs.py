"""Trains the runs of `own-runs.yaml` with torchtitan's own trainer and records steps, memory and kernels.

    sh lab/studies/train_runs.sh OUT_FOLDER [SECONDS]

`--dry` runs tiny sizes on CPU over gloo.

Nothing of torchtitan is changed but what `train_setup.REMARKS` lists. Data are random tokens, routing is
forced to round robin. Each run: 12 steps by wall clock, a step under the profiler (GPU activities, then
operators), a step with the allocator's history. Results are rewritten after every part.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml

from lab.studies import train_profile, train_setup

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "lab" / "scoring" / "data" / "own-runs.yaml"
STEPS, FIRST = 12, 6


class RunClock:
    """Wall clock of this process against the time budget."""

    def __init__(self, seconds: float) -> None:
        """Start now."""
        self.start, self.seconds = time.monotonic(), seconds

    def left(self) -> float:
        """Seconds left on rank 0, the same on every rank."""
        value = torch.tensor([self.seconds - (time.monotonic() - self.start)])
        if dist.is_initialized():
            value = value.cuda() if torch.cuda.is_available() else value
            dist.broadcast(value, 0)
        return float(value)


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def step_once(trainer: Any, data: Any) -> float:
    """One step as torchtitan's loop runs it, and its seconds."""
    began = time.perf_counter()
    trainer.step += 1
    trainer.gc_handler.run(trainer.step)
    trainer.train_step(data)
    synchronize()
    return time.perf_counter() - began


def memory_now() -> dict[str, Any]:
    """Peak bytes of tensors and of segments since the last reset, on every rank."""
    stats = torch.cuda.memory_stats() if torch.cuda.is_available() else {}
    keys = ("active_bytes.all.peak", "reserved_bytes.all.peak", "allocated_bytes.all.peak",
            "active_bytes.all.current", "reserved_bytes.all.current", "requested_bytes.all.peak",
            "num_alloc_retries", "segment.all.current")  # fmt: skip
    mine = {key: stats.get(key, 0) for key in keys}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return {key: [one[key] for one in every] for key in keys}


def keep_trace(trainer: Any, data: Any, path: Path) -> dict[str, Any]:
    """Profile three steps as torchtitan does and keep this rank's trace; seconds of the steps."""
    from torch.profiler import ProfilerActivity, profile, schedule

    seconds = []
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True,
                 schedule=schedule(wait=0, warmup=1, active=2, repeat=1),
                 on_trace_ready=lambda prof: prof.export_chrome_trace(str(path))) as prof:  # fmt: skip
        for _ in range(3):
            seconds.append(step_once(trainer, data))
            prof.step()
    return {"seconds": seconds, "file": path.name}


def profiled(trainer: Any, data: Any, operators: bool) -> dict[str, Any]:
    """Kernels of one step; with `operators`, also the operator that launched each."""
    from torch.profiler import ProfilerActivity, profile

    gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CUDA] if gpu else [ProfilerActivity.CPU]
    if operators and gpu:
        activities.append(ProfilerActivity.CPU)
    with profile(activities=activities, record_shapes=operators) as prof:
        seconds = step_once(trainer, data)
    if dist.get_rank():
        return {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        prof.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    made = train_profile.operators_of_kernels(events) if operators else train_profile.kernel_table(events)
    return {"step_s": seconds, **made}


def with_history(trainer: Any, data: Any) -> dict[str, Any]:
    """One step with the allocator's history: what is active at its peak, and the segments after it."""
    if not torch.cuda.is_available():
        return train_profile.memory_at_peak({"segments": [], "device_traces": [[]]}, {"segments": []})
    memory = torch.cuda.memory
    memory._record_memory_history("all", context=None, stacks="python", max_entries=400_000)
    before = memory._snapshot()
    step_once(trainer, data)
    after = memory._snapshot()
    memory._record_memory_history(None)
    return train_profile.memory_at_peak(after, before, torch.cuda.current_device())


def train(run: dict[str, Any], file: dict[str, Any], dry: bool, left: Callable[[], float],
          save: Callable[[dict[str, Any]], None], suffix: str = "", traces: Path | None = None) -> None:  # fmt: skip
    """Train one run and save its results after every part."""
    from torchtitan.train import Trainer

    result: dict[str, Any] = {"name": run["name"] + suffix, "run": run}
    spec = train_setup.built_spec(f"own-{run['name']}{suffix}", file["models"][run["model"]], run, dry)
    began = time.perf_counter()
    torch.cuda.is_available() and torch.cuda.reset_peak_memory_stats()
    trainer = Trainer(train_setup.configuration(spec, run, dist.get_world_size(), dry))
    data = trainer.batch_generator(trainer.dataloader)
    result["build_s"] = time.perf_counter() - began
    result["parameters"] = sum(p.numel() for p in trainer.model_parts[0].parameters())
    result["before"] = memory_now()
    seconds = [step_once(trainer, data) for _ in range(FIRST - 1)]
    result["warm"] = memory_now()
    torch.cuda.is_available() and torch.cuda.reset_peak_memory_stats()
    seconds += [step_once(trainer, data) for _ in range(STEPS - FIRST + 1)]
    measured = seconds[FIRST - 1 :]
    result["seconds"] = seconds
    result["median_step_s"] = statistics.median(measured)
    result["least_step_s"], result["most_step_s"] = min(measured), max(measured)
    result["memory"] = memory_now()
    result["after_steps"] = nvidia_smi()
    save(result)
    if traces:
        rank = dist.get_rank()
        result["trace"] = keep_trace(trainer, data, traces / f"{result['name']}.rank{rank}.json.gz")
        dist.barrier()
        save(result)
    parts = (("kernels", lambda: profiled(trainer, data, False)),
             ("history", lambda: with_history(trainer, data)),
             ("operators", lambda: profiled(trainer, data, True)))  # fmt: skip
    for name, part in parts:
        if left() < 5.0:
            break
        try:
            result[name] = part()
        except Exception:
            result[name] = {"failed": traceback.format_exc()[-2000:]}
        dist.barrier()
        save(result)
    trainer.close()


def cleaned() -> None:
    """Give back what the last run held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def nvidia_smi() -> list[str]:
    """Driver, clocks, power and temperature of the GPUs."""
    if not torch.cuda.is_available() or int(os.environ["RANK"]):
        return []
    query = "driver_version,clocks.sm,clocks.max.sm,power.draw,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()


def environment() -> dict[str, Any]:
    """Versions, driver, date and command of this measurement."""
    found: dict[str, Any] = {
        "date": datetime.now(tz=UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "remarks": train_setup.REMARKS,
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("NCCL_", "PYTORCH_", "OMP_"))},
    }
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
        found["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
        found["nvidia_smi"] = nvidia_smi()
    return found


def main() -> None:
    """Run everything that the time allows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--traces", type=Path, help="folder for the traces of every rank")
    parser.add_argument("--only", default="", help="names of runs, with commas between")
    options = parser.parse_args()
    train_setup.stand_in_for_absent_packages()
    if options.dry:
        train_setup.on_cpu()
    clock = RunClock(options.seconds)
    file = yaml.safe_load(RUNS.read_text())
    results: list[dict[str, Any]] = []
    head = environment()

    def save(result: dict[str, Any]) -> None:
        if result not in results:
            results.append(result)
        if int(os.environ["RANK"]) == 0:
            options.out.write_text(json.dumps({**head, "runs": results}))

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    train_setup.start_processes()
    for run in file["runs"]:
        if options.only and run["name"] not in options.only.split(","):
            continue
        if clock.left() < 15.0:
            break
        attempts = [("", train_setup.flex_without_search), (".causal", train_setup.causal_without_sinks)]
        for suffix, prepared in attempts if run["attention"] == "flex" else [("", cleaned)]:
            try:
                prepared()
                train(run, file, options.dry, clock.left, save, suffix, options.traces)
                cleaned()
                break
            except Exception:
                print(traceback.format_exc(), file=sys.stderr, flush=True)
                save({"name": run["name"] + suffix, "failed": traceback.format_exc()[-4000:]})
                cleaned()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
