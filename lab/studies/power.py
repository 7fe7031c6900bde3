"""Power, clocks and rates of kernels under load on one GPU: a long soak, then classes, mixes and duties.

    python -m lab.studies.power --out DIR [--seconds 430] [--soak 240] [--segment 5] [--dry]

NVML is sampled every 50 ms by a process of its own. The parts in order: bursts of the cold card, a soak with
a mix like a training step's (until clock and temperature are steady), segments on the hot card, bursts of the
hot card, and the same shapes back to back. `power.json` is written after each part. No clock and no limit is
set. `--dry` runs all paths in tiny sizes on the CPU.
"""

from __future__ import annotations

import argparse
import json
import platform
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

from lab.studies import power_samples
from lab.studies.power_work import (
    Load,
    Maker,
    Marks,
    burst,
    segment,
    tune,
)

INTERVAL_S = 0.05
SEGMENT_S, SETTLE_S = 5.0, 1.5
BURST_SHAPES = (
    (8192, 10240, 6144), (4096, 6144, 6144), (4096, 5120, 3072), (2048, 6144, 5120), (16384, 18432, 6144),
)  # fmt: skip
"""Rows, columns and inner sides of the GEMMs timed in bursts and back to back: 0.2 to 5 ms each."""
DUTIES = (
    (0.5, 10.0), (0.75, 10.0), (0.5, 100.0), (0.9, 10.0), (0.5, 1.0), (0.25, 10.0), (0.75, 100.0),
    (0.75, 1.0), (0.5, 1000.0), (0.9, 100.0), (0.25, 100.0), (0.9, 1.0), (0.25, 1.0), (0.75, 1000.0),
)  # fmt: skip
"""Share of the time with GEMMs and period (ms) of the segments with gaps, the most telling ones first."""


class PowerRun:
    """The state of a run: its clock, samples, result and file."""

    def __init__(self, out: Path, seconds: float, dry: bool, segment_s: float = SEGMENT_S) -> None:
        """Start the sampler and the device."""
        self.began = time.monotonic()
        self.out, self.seconds, self.dry, self.segment_s = out, seconds, dry, segment_s
        samples = Path(tempfile.mkdtemp()) / "samples.csv"
        self.sampler = power_samples.Sampler(samples, INTERVAL_S)
        self.scale = 0.02 if dry else 1.0
        device = "cpu" if dry else "cuda"
        self.result: dict[str, Any] = {"machine": machine(dry), "parts": {}, "failed": {}}
        time.sleep(1.0 * self.scale)  # samples of the card before any context
        torch.manual_seed(1)
        self.marks = Marks(device)
        self.maker = Maker(device, 64 if dry else 1)
        self.result["machine"]["origin_s"] = self.marks.first_s

    def left(self) -> float:
        """Seconds until the time budget ends."""
        return self.began + self.seconds - time.monotonic()

    def part(self, name: str, call: Callable[[], Any]) -> None:
        """Run one part; a failure is noted and the run goes on. The file is written after each."""
        start = time.monotonic()
        try:
            self.result["parts"][name] = {"start_s": start, "result": call(), "end_s": time.monotonic()}
        except Exception:
            self.result["failed"][name] = traceback.format_exc()[-800:]
        print(f"{time.monotonic() - self.began:6.1f} s  {name}  {self.brief(name)}", flush=True)
        self.write()

    def brief(self, name: str) -> str:
        """Rates and clock of a finished part, or the end of its error."""
        if name in self.result["failed"]:
            return "failed: " + self.result["failed"][name][-200:]
        result = self.result["parts"][name]["result"]
        if not isinstance(result, dict) or "classes" not in result:
            return ""
        rates = [
            f"{cls} {v['flop_per_s'] / 1e12:.0f}T {v['bytes_per_s'] / 1e9:.0f}G"
            for cls, v in result["classes"].items()
        ]
        clocks = result["clock_mhz"]
        return f"{'; '.join(rates)}; busy {result['busy_share']:.2f}; clocks {clocks[-3:]}"

    def write(self) -> None:
        """Write the file with all samples so far."""
        self.result["seconds"] = time.monotonic() - self.began
        self.result["sample_columns"] = power_samples.COLUMNS
        self.result["samples"] = self.sampler.rows()
        (self.out / "power.json").write_text(json.dumps(self.result))


def machine(dry: bool) -> dict[str, Any]:
    """Hardware, software, date and command line."""
    query = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,power.draw,temperature.gpu"
    try:
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        said = ""
    return {
        "gpu": said,
        "limits": power_samples.limits(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": None if dry else torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "dry": dry,
    }


def bursts(run: PowerRun, loads: list[Load]) -> list[dict[str, Any]]:
    """Twelve calls of each load after an idle second: three to warm up and nine that a planner would time."""
    rows = []
    for load in loads:
        took = burst(run.marks, load, 1.0 * run.scale, 12)
        rows.append({"name": load.name, "flop": load.flop, "seconds": took})
    return rows


def transient(run: PowerRun, load: Load) -> list[list[float]]:
    """(time since the start, seconds of a call) of every call of 600 ms of GEMMs after two idle seconds."""
    calls = max(4, int(0.6 * run.scale / load.seconds))
    took = burst(run.marks, load, 2.0 * run.scale, calls)
    at, rows = 0.0, []
    for one in took:
        rows.append([round(at, 6), round(one, 8)])
        at += one
    return rows


def back_to_back(run: PowerRun, loads: list[Load]) -> list[dict[str, Any]]:
    """Rate of each load in 1.6 s without a gap, of which the first 0.8 s do not count."""
    return [
        {"name": load.name, "flop": load.flop}
        | segment(run.marks, [(load, 1)], 1.6 * run.scale, settle_s=0.8 * run.scale)
        for load in loads
    ]


def idle(run: PowerRun, seconds: float, spinning: bool) -> dict[str, float]:
    """Seconds without work, or with one spinning thread; the samples say what they cost."""
    start = time.monotonic()
    while time.monotonic() - start < seconds * run.scale:
        if spinning:
            run.marks.spin(50_000_000 if not run.dry else 1000)
            run.marks.sync()
        else:
            time.sleep(0.1 * run.scale)
    return {"from_s": start, "to_s": time.monotonic()}


def soak(run: PowerRun, parts: list[tuple[Load, int]], seconds: float) -> dict[str, Any]:
    """The mix like a training step's for the given time, in stretches of 20 s until nothing changes."""
    stretches: list[dict[str, Any]] = []
    began, steady = time.monotonic(), False
    while time.monotonic() - began < seconds - 5 * run.scale:
        step = min(20.0 * run.scale, seconds - (time.monotonic() - began))
        stretches.append(segment(run.marks, parts, step, settle_s=0.0))
        rows = [r for r in run.sampler.rows() if r[0] > time.monotonic() - 60.0]
        steady = len(rows) > 20 and _steady(rows)
        if steady and time.monotonic() - began > min(200.0, 0.7 * seconds):
            break
    return {"stretches": stretches, "steady": steady}


def _steady(rows: list[list[float]]) -> bool:
    """Whether temperature and clock of the last minute's halves agree to 0.7 degrees and 0.5 %."""
    half = len(rows) // 2
    mean = lambda part, j: sum(r[j] for r in part) / len(part)  # noqa: E731
    warm, clock = power_samples.COLUMNS.index("gpu_c"), power_samples.COLUMNS.index("sm_mhz")
    first, second = rows[:half], rows[half:]
    same = abs(mean(first, clock) / mean(second, clock) - 1.0) < 0.005
    return same and abs(mean(first, warm) - mean(second, warm)) < 0.7


def segments_of(run: PowerRun, loads: dict[str, list[Load]]) -> dict[str, Callable[[], Any]]:
    """The segments in the order of their worth; those for which no time is left are not run."""
    big, small = loads["gemm"][0], loads["gemm"][2]

    def run_parts(parts: list[tuple[Load, int]], gap_s: float = 0.0, host: bool = False) -> dict[str, Any]:
        return segment(
            run.marks, parts, run.segment_s * run.scale, gap_s=gap_s * run.scale, host_gap=host,
            settle_s=SETTLE_S * run.scale,
        )  # fmt: skip

    def share(load: Load, seconds: float) -> tuple[Load, int]:
        return load, max(1, round(seconds * run.scale / load.seconds))

    def duty(load: Load, part: float, period_ms: float, host: bool = False) -> Callable[[], Any]:
        busy = part * period_ms * 1e-3
        return lambda: run_parts([share(load, busy)], period_ms * 1e-3 - busy, host)

    attention, memory = loads["attention"], loads["memory"]
    all_memory = [share(load, 2e-3) for load in memory]
    both = [share(load, 4e-3) for load in attention]
    plan: dict[str, Callable[[], Any]] = {
        "gemm large": lambda: run_parts([share(big, 10e-3)]),
        "gemm of the duties": lambda: run_parts([share(small, 10e-3)]),
        "memory": lambda: run_parts(all_memory),
        "attention": lambda: run_parts(both),
    }
    for part, period in DUTIES[:4]:
        plan[f"duty {part} of {period} ms"] = duty(small, part, period)
    for load in loads["pieces"]:
        plan[load.name] = lambda load=load: run_parts([share(load, 10e-3)])  # type: ignore[misc]
    plan |= {
        "gemm and memory": lambda: run_parts([share(small, 8e-3), *all_memory]),
        "gemm zeros": lambda: run_parts([share(loads["zeros"][0], 10e-3)]),
        "gemm fp8": lambda: run_parts([share(loads["fp8"][0], 10e-3)]),
        "mix with a fifth idle": lambda: run_parts(loads_of_mix(loads), 4e-3),
    }
    for part, period in DUTIES[4:9]:
        plan[f"duty {part} of {period} ms"] = duty(small, part, period)
    plan |= {
        "spinning": lambda: idle(run, 3.0, True),
        "idle": lambda: idle(run, 3.0, False),
        "gemm spread 0.02": lambda: run_parts([share(loads["small spread"][0], 10e-3)]),
        "gemm and attention": lambda: run_parts([share(small, 8e-3), *both]),
        "duty 0.5 of 100 ms, host gap": duty(small, 0.5, 100.0, True),
        "gemm and copies on few blocks": lambda: run_parts(
            [share(small, 5e-3), *(share(load, 5e-3) for load in loads["few blocks"])]
        ),
        "fp8 duty 0.5 of 10 ms": duty(loads["fp8"][0], 0.5, 10.0) if loads["fp8"] else lambda: None,
        "memory duty 0.5": lambda: run_parts(all_memory, 8e-3),
        "gemm short": lambda: run_parts([share(loads["gemm"][3], 10e-3)]),
        "attention duty 0.5": lambda: run_parts(both, 8e-3),
    }
    for part, period in DUTIES[9:]:
        plan[f"duty {part} of {period} ms"] = duty(small, part, period)
    if loads["pieces"]:
        rows = [share(load, 4e-3) for load in loads["pieces"] if "permute" in load.name]
        plan["gemm and rows"] = lambda: run_parts([share(small, 8e-3), *rows])
    plan["mix again"] = lambda: run_parts(loads_of_mix(loads))
    return plan


def loads_of_mix(loads: dict[str, list[Load]]) -> list[tuple[Load, int]]:
    """The kernels of two layers, forward and backward: mostly GEMMs, then attention and norms."""
    gemm, (forward, backward), memory = loads["gemm"], loads["attention"], loads["mix memory"]
    parts = [(gemm[1], 2), (forward, 1), (gemm[2], 2), (memory[3], 4), (gemm[0], 3), (memory[0], 4)]
    return [*parts, (backward, 1), (gemm[1], 4), (memory[1], 2), (gemm[0], 4), (memory[2], 2)]


def make(run: PowerRun) -> dict[str, list[Load]]:
    """All kernels of the run; FP8 is left out where it does not run."""
    maker = run.maker
    loads: dict[str, list[Load]] = {
        "gemm": [maker.gemm(*shape) for shape in BURST_SHAPES],
        "attention": list(maker.attention(2, 24, 6144)),
        "memory": maker.memory(384 * 2**20),
        "mix memory": maker.memory(96 * 2**20),
        "zeros": [maker.gemm(*BURST_SHAPES[0], spread=0.0, name="zeros")],
        "small spread": [maker.gemm(*BURST_SHAPES[0], spread=0.02, name="spread 0.02")],
        "fp8": [],
        "few blocks": [],
        "pieces": [] if run.dry else maker.pieces(),
    }
    try:
        loads["fp8"] = [maker.gemm_fp8(8192, 10240, 6144)]
    except Exception:
        run.result["failed"]["fp8"] = traceback.format_exc()[-600:]
    try:
        loads["few blocks"] = [maker.few_blocks(16, 32 * 2**20)]
    except Exception:
        run.result["failed"]["few blocks"] = traceback.format_exc()[-600:]
    for group in loads.values():
        tune(run.marks, group)
    return loads


def main() -> None:
    """Run all parts within the time budget."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=430.0)
    parser.add_argument("--soak", type=float, default=240.0)
    parser.add_argument("--segment", type=float, default=SEGMENT_S)
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    run = PowerRun(args.out, args.seconds, args.dry, args.segment)
    try:
        loads = make(run)
        gemms = loads["gemm"] + loads["fp8"]
        run.result["loads"] = {
            name: [[x.name, x.cls, x.flop, x.bytes, x.seconds] for x in group]
            for name, group in loads.items()
        }
        run.part("bursts cold", lambda: bursts(run, gemms))
        run.part("transient cold", lambda: transient(run, loads["gemm"][2]))
        end = 30.0 * run.scale  # bursts and shapes back to back, at the end
        soak_s = min(args.soak, 0.6 * (run.left() - end)) * run.scale
        run.part("soak", lambda: soak(run, loads_of_mix(loads), soak_s))
        for name, call in segments_of(run, loads).items():
            if run.left() < end + run.segment_s * run.scale:
                run.result["failed"][name] = "no time left"
                continue
            run.part(name, call)
        run.part("transient hot", lambda: transient(run, loads["gemm"][2]))
        run.part("bursts hot", lambda: bursts(run, gemms))
        if run.left() > 10.0 * run.scale:
            run.part("back to back", lambda: back_to_back(run, gemms))
    finally:
        run.write()
        run.sampler.stop()
    print("failed:", json.dumps(run.result["failed"])[:1500])


if __name__ == "__main__":
    main()
