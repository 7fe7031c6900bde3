"""GPU time of the work between GEMMs as PyTorch frameworks run it, on one GPU.

    python -m lab.studies.between_gemms --out DIR [--seconds 95] [--dry]

A time is the median of calls between two CUDA events with a cold L2; a spinning kernel in front keeps the GPU
busy while the host launches. Small pieces are also timed without the flush (`warm`). Eager pieces come
first, then GEMMs beside copies, then what torch.compile makes, then the kernels of each eager piece from
the profiler. `between_gemms.json` is written every few pieces. `--dry` runs tiny sizes on the CPU.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config

from lab.studies import between_pieces as pieces
from lab.studies.between_pieces import Make, TimedPiece

REPEATS, WARM = 13, 2
SPIN_CYCLES = 4_000_000
"""About 2.2 ms at 1.8 GHz, longer than the host takes to launch the kernels of one piece."""
WARM_BYTES = 120e6
"""Pieces that move less are also timed without a flush of the L2 cache (60 MB)."""
SHOWN = ("rows", "hidden", "width", "tokens", "vocabulary", "shards", "heads")
Makers = dict[str, Callable[[Make], Iterator[TimedPiece]]]
MAKERS: Makers = {
    "sharded parameters": pieces.sharded_parameters,
    "losses": pieces.losses,
    "activations": pieces.activations,
    "norms": pieces.norms,
    "ropes": pieces.ropes,
    "casts": pieces.casts,
    "steps": pieces.steps,
}


class PieceClock:
    """Times calls on the GPU, or on the CPU in dry runs."""

    def __init__(self, cuda: bool) -> None:
        """Allocate what flushes the L2 cache."""
        self.cuda = cuda
        self.cold = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda") if cuda else None

    def median_us(self, run: Callable[[], Any], flush: bool = True) -> tuple[float, float]:
        """Median microseconds of a call, and half the spread of the middle half."""
        if not self.cuda:
            start = time.perf_counter()
            run()
            return (time.perf_counter() - start) * 1e6, 0.0
        for _ in range(WARM):
            run()
        pairs = []
        for _ in range(REPEATS):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if flush and self.cold is not None:
                self.cold.zero_()
            torch.cuda._sleep(SPIN_CYCLES)
            first.record()
            run()
            last.record()
            pairs.append((first, last))
            last.synchronize()
        times = sorted(a.elapsed_time(b) * 1e3 for a, b in pairs)
        return statistics.median(times), (times[3 * REPEATS // 4] - times[REPEATS // 4]) / 2

    def seconds(self, run: Callable[[], Any], repeats: int) -> float:
        """Seconds of a call among `repeats` in a row."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        for _ in range(10):
            run()
        marks[0].record()
        for _ in range(repeats):
            run()
        marks[1].record()
        marks[1].synchronize()
        return marks[0].elapsed_time(marks[1]) * 1e-3 / repeats


def passes(piece: TimedPiece) -> Iterator[tuple[str, Callable[[], Any], float]]:
    """The forward and, for pieces with leaves, the backward: (name, call, bytes)."""
    call = torch.compile(piece.call, dynamic=False) if piece.compiled else piece.call
    yield "forward", call, piece.bytes
    if piece.leaves:
        out = call()
        outs = list(out) if isinstance(out, tuple) else [out]
        gradients = [torch.randn_like(o) for o in outs]
        leaves = piece.leaves
        yield (
            "backward",
            lambda: torch.autograd.grad(outs, leaves, gradients, retain_graph=True),
            piece.backward_bytes,
        )


def measured(piece: TimedPiece, clock: PieceClock) -> dict[str, Any]:
    """Times and bytes of a piece."""
    row: dict[str, Any] = {"name": piece.name, "compiled": piece.compiled} | piece.sizes
    if piece.check is not None:
        row["error"] = piece.check()
    if piece.compiled:
        torch._dynamo.reset()
    start = time.monotonic()
    for name, call, size in passes(piece):
        took, spread = clock.median_us(call)
        row |= {f"{name}_us": took, f"{name}_spread_us": spread, f"{name}_bytes": size}
        if size < WARM_BYTES:
            row[f"{name}_warm_us"] = clock.median_us(call, flush=False)[0]
    row["wall_s"] = round(time.monotonic() - start, 3)
    return row


def kernels_of(piece: TimedPiece) -> dict[str, Any]:
    """Kernels of the forward and backward of a piece by the profiler: (name, calls, microseconds)."""
    from torch.profiler import ProfilerActivity, profile

    rows: dict[str, Any] = {"name": piece.name, "compiled": piece.compiled} | piece.sizes
    for name, call, _ in passes(piece):
        call()
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            call()
            torch.cuda.synchronize()
        rows[name] = [
            [event.key[:90], event.count, float(event.self_device_time_total)]
            for event in trace.key_averages()
            if event.self_device_time_total > 0
        ]
    return rows


def machine(cuda: bool) -> dict[str, Any]:
    """Hardware, software, date and command line."""
    query = "name,driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu"
    try:
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        said = ""
    return {
        "gpu": said,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "dry": not cuda,
    }


class PieceStudy:
    """Rows so far, the time budget, and the file."""

    def __init__(self, out: Path, seconds: float, dry: bool) -> None:
        """Start the clock."""
        self.began, self.seconds, self.cuda = time.monotonic(), seconds, not dry
        self.path = out / "between_gemms.json"
        self.make = Make("cpu" if dry else "cuda", 64 if dry else 1)
        self.clock = PieceClock(self.cuda)
        self.written = 0.0
        self.result: dict[str, Any] = {
            "machine": machine(self.cuda), "rows": [], "beside": [], "kernels": [], "failed": []
        }  # fmt: skip

    def spent(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    def run(
        self, rows: str, makers: Makers, compiled: bool, until_s: float, of: Callable[[TimedPiece], Any]
    ) -> None:
        """Add what `of` says of every eager or compiled piece, until the time is over."""
        for name, maker in makers.items():
            try:
                for piece in maker(self.make):
                    if piece.compiled != compiled:
                        continue
                    if self.spent() > until_s:
                        self.result["failed"].append([rows, name, piece.name, piece.sizes, "no time left"])
                        continue
                    try:
                        self.result[rows].append({"maker": name} | of(piece))
                    except Exception:
                        error = traceback.format_exc()[-500:]
                        self.result["failed"].append([rows, name, piece.name, piece.sizes, error])
                    self.write(2.0)
            except Exception:
                self.result["failed"].append([rows, name, traceback.format_exc()[-500:]])
            if self.cuda:
                torch.cuda.empty_cache()
        self.write()
        print(f"{self.spent():6.1f} s  {rows}, compiled {compiled}: {len(self.result[rows])}", flush=True)

    def beside(self) -> None:
        """GEMMs beside copies."""
        try:
            for row in pieces.beside_copies(self.make, self.clock.seconds):
                self.result["beside"].append(row)
        except Exception:
            self.result["failed"].append(["beside", traceback.format_exc()[-700:]])
        self.write()
        print(f"{self.spent():6.1f} s  beside: {len(self.result['beside'])}", flush=True)

    def write(self, every_s: float = 0.0) -> None:
        """Write the file, at most every so many seconds."""
        if time.monotonic() - self.written < every_s:
            return
        self.written = time.monotonic()
        self.result["seconds"] = self.spent()
        self.result["machine_after"] = machine(self.cuda)["gpu"]
        self.path.write_text(json.dumps(self.result))


def main() -> None:
    """Measure all pieces within the time budget."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=95.0)
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(1)
    torch._functorch.config.donated_buffer = False  # the backward of one forward runs many times
    study = PieceStudy(args.out, args.seconds, args.dry)
    study.run("rows", MAKERS, False, 0.45 * args.seconds, lambda piece: measured(piece, study.clock))
    if study.cuda:
        study.beside()
    fused = {name: MAKERS[name] for name in ("losses", "activations", "norms", "ropes")}
    study.run("rows", fused, True, 0.85 * args.seconds, lambda piece: measured(piece, study.clock))
    if study.cuda:
        study.run("kernels", MAKERS, False, args.seconds, kernels_of)
    for row in study.result["rows"]:
        at = [value for key, value in row.items() if key in SHOWN]
        rates = [
            f"{kind} {row[f'{kind}_us']:.0f} us {row[f'{kind}_bytes'] / row[f'{kind}_us'] * 1e-3:.0f} GB/s"
            for kind in ("forward", "backward")
            if f"{kind}_us" in row
        ]
        print(row["name"], "compiled" if row["compiled"] else "", at, *rates)
    print("failed:", *study.result["failed"], sep="\n")


if __name__ == "__main__":
    main()
