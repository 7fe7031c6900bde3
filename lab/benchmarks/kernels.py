"""Times of the communication kernels on the GPUs of this machine, beside what the links carry.

    python -m lab.benchmarks.kernels --out results.json --stages copy,alltoall,ep,deepep

Check, then time: expert-parallel results are compared with their inputs at full size before any timing.
Every time is the slowest rank's, from events around the work, launched behind a gate (all launches queued,
then run); the median of the repeats is printed. Needs CuPy and Hopper GPUs of one host with peer access.

Napkin math (8 ranks, 4,096 tokens, hidden 7168, top-8 of 256, random scores): a token reaches 8 (1 -
C(224,8)/C(256,8)) = 5.30 ranks, 4.64 of them remote. FP8 row 7,168 B + side record 384 B: 4,096 x 4.64 x
7,552 = 144 MB a rank over NVLink; at 373 GB/s (the best a copy reaches in one direction) 385 us. BF16 row
14,336 B + 128 B: 275 MB, 737 us. Combine: rows only, 272 MB, 730 us.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lab.benchmarks import kernel_stages as stages
from moesim.kernels.catalog import KERNELS
from moesim.kernels.launch import GpuGroup
from moesim.kernels.launch import cupy
from lab.benchmarks.collective_times import Summary, time_collective
from moesim.kernels.timing import StartGate


class Bench:
    """The group, its gate, and the rows measured so far."""

    def __init__(self, ranks: int, repeats: int) -> None:
        """One rank a GPU."""
        self.group, self.repeats = GpuGroup(range(ranks)), repeats
        self.gate, self.rows = StartGate(self.group), list[dict[str, Any]]()

    def time(self, what: str, n_bytes: float, work: Any, sms: int = 0, **more: Any) -> Summary:
        """Time work(i), print and keep a row; n_bytes (busiest rank) gives GB/s."""
        ranks = more.pop("ranks", None)
        found = time_collective(
            self.group,
            work,
            repeats=self.repeats,
            gate=self.gate,
            ranks=ranks,
            before=more.pop("before", None),
        )
        row = {
            "what": what, "sms": sms, **more, "median_us": found.median_s * 1e6, "iqr_us": found.iqr_s * 1e6,
            "least_us": found.least_s * 1e6, "repeats": found.repeats, "bytes": n_bytes,
            "gb_per_s": n_bytes / found.median_s / 1e9,
        }  # fmt: skip
        self.rows.append(row)
        extra = " ".join(f"{k}={v}" for k, v in more.items())
        print(f"{what:28s} sms={sms:3d} {row['median_us']:9.1f} us  {row['gb_per_s']:7.1f} GB/s  {extra}")
        return found


def deepep(bench: Bench) -> None:
    """DeepEP on the same GPUs, if it is installed, by its own script in processes of its own."""
    if importlib.util.find_spec("deep_ep") is None:
        print("DeepEP is not importable here: not measured")
        return
    script = Path(__file__).with_name("deepep.py")
    for sms in (8, 20, 24):
        command = [sys.executable, str(script), "--ranks", str(bench.group.ranks), "--sms", str(sms)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"DeepEP on {sms} SMs failed: {done.stderr.strip().splitlines()[-1:]}")
            continue
        *lines, table = done.stdout.strip().splitlines()
        print("\n".join(lines))
        bench.rows += json.loads(table)


STAGES = {
    "nothing": stages.nothing,
    "quantize": stages.quantisation,
    "copy": stages.copies,
    "alltoall": stages.all_to_all,
    "ep": stages.expert_parallel,
    "ll": stages.low_latency,
    "twohop": stages.two_hop,
    "hoptunings": stages.hop_tunings,
    "tunings": stages.tunings,
    "deepep": deepep,
}


def machine() -> dict[str, Any]:
    """GPU, driver, clocks, versions, kernel hashes."""
    cp = cupy()
    query = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,temperature.gpu"
    asked = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv"], capture_output=True, text=True, check=False
    )
    return {
        "nvidia_smi": asked.stdout.strip().splitlines(),
        "cuda_runtime": cp.cuda.runtime.runtimeGetVersion(),
        "cuda_driver": cp.cuda.runtime.driverGetVersion(),
        "cupy": cp.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "kernels_sha256": {name: kernel.digest() for name, kernel in KERNELS.items()},
    }


def main() -> None:
    """Run the stages named on the command line and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("kernels.json"))
    parser.add_argument("--ranks", type=int, default=0, help="GPUs to use (default: all)")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--stages", default=",".join(STAGES), help=f"of: {', '.join(STAGES)}")
    options = parser.parse_args()
    chosen = options.stages.split(",")
    if unknown := [name for name in chosen if name not in STAGES]:
        parser.error(f"unknown stage {unknown[0]!r}; known: {', '.join(STAGES)}")
    bench = Bench(options.ranks or cupy().cuda.runtime.getDeviceCount(), options.repeats)
    result: dict[str, Any] = {"command": " ".join(sys.argv), "machine": machine()}
    for stage in chosen:
        began = time.monotonic()
        STAGES[stage](bench)
        print(f"-- {stage}: {time.monotonic() - began:.1f} s")
        result |= {"rows": bench.rows, "machine_after": machine()["nvidia_smi"]}
        options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
