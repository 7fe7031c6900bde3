"""Power of GPUs while NCCL's collectives run alone and beside GEMMs, on the GPUs of one host.

    python -m torch.distributed.run --standalone --nproc-per-node 2 \\
        -m lab.studies.power_collectives --out DIR

Each segment lasts `--seconds` (5); rank 0 samples NVML's mean power and SM clock of its GPU every 50 ms and
leaves the first 1.5 s out. No clock and no limit is set. `power_collectives.json` is written after every
segment.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
import pynvml
import torch
import torch.distributed as dist

SETTLE_S, INTERVAL_S = 1.5, 0.05
SIZES = (2**30, 2**26)
"""Bytes of the buffers of the collectives."""


class PowerSampler:
    """Samples power (W) and SM clock (MHz) of one GPU in a thread of its own."""

    def __init__(self, index: int) -> None:
        """Start without samples."""
        self.handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        self.rows: list[tuple[float, float, float]] = []
        self.ends = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while not self.ends.wait(INTERVAL_S):
            power = pynvml.nvmlDeviceGetPowerUsage(self.handle) / 1e3
            clock = pynvml.nvmlDeviceGetClockInfo(self.handle, pynvml.NVML_CLOCK_SM)
            self.rows.append((time.monotonic(), power, float(clock)))

    def since(self, start: float) -> dict[str, float]:
        """Medians of the samples from a moment on."""
        rows = [row for row in self.rows if row[0] >= start]
        return {
            "power_w": statistics.median(row[1] for row in rows),
            "clock_mhz": statistics.median(row[2] for row in rows),
            "samples": len(rows),
        }


def segment(run: Callable[[], None], seconds: float, sampler: PowerSampler | None) -> dict[str, float]:
    """Repeat a piece of work on all ranks for some seconds; its mean time and rank 0's power and clock."""
    run()
    torch.cuda.synchronize()
    dist.barrier()
    start, calls = time.monotonic(), 0
    more = torch.ones(1, device="cuda")
    while more.item():
        for _ in range(20):
            run()
        calls += 20
        more.fill_(float(time.monotonic() - start < seconds))
        dist.broadcast(more, 0)  # every rank stops after the same number of calls
    torch.cuda.synchronize()
    row = {"call_s": (time.monotonic() - start) / calls}
    return row | (sampler.since(start + SETTLE_S) if sampler else {})


def pieces() -> dict[str, Callable[[], None]]:
    """Work of the segments by name."""
    ranks = dist.get_world_size()
    work: dict[str, Callable[[], None]] = {}
    for size in SIZES:
        whole = torch.randn(size // 2, device="cuda").to(torch.bfloat16)
        part, other = whole[: whole.numel() // ranks].clone(), torch.empty_like(whole)
        name = f"{size // 2**20} MiB"
        work[f"all-gather {name}"] = lambda w=whole, p=part: dist.all_gather_into_tensor(w, p)  # type: ignore[misc]
        work[f"reduce-scatter {name}"] = lambda w=whole, p=part: dist.reduce_scatter_tensor(p, w)  # type: ignore[misc]
        work[f"all-to-all {name}"] = lambda w=whole, o=other: dist.all_to_all_single(o, w)  # type: ignore[misc]
    a = torch.randn(8192, 6144, device="cuda").to(torch.bfloat16)
    b = torch.randn(6144, 10240, device="cuda").to(torch.bfloat16)
    side = torch.cuda.Stream()
    gathered = torch.empty(SIZES[1] // 2, device="cuda", dtype=torch.bfloat16)
    sent = gathered[: gathered.numel() // ranks].clone()

    def beside() -> None:
        with torch.cuda.stream(side):
            dist.all_gather_into_tensor(gathered, sent)
        torch.mm(a, b)

    work["GEMM"] = lambda: torch.mm(a, b)
    work["GEMM beside an all-gather"] = beside
    return work


def main() -> None:
    """Run all segments and write their rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    torch.manual_seed(rank)
    pynvml.nvmlInit()
    sampler = PowerSampler(rank) if rank == 0 else None
    time.sleep(3.0)
    result: dict[str, object] = {
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "gpu": torch.cuda.get_device_name(),
        "gpus": dist.get_world_size(),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "limit_w": pynvml.nvmlDeviceGetPowerManagementLimit(pynvml.nvmlDeviceGetHandleByIndex(rank)) / 1e3,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "idle": sampler.since(0.0) if sampler else {},
        "segments": {},
    }
    rows: dict[str, dict[str, float]] = {}
    for name, run in pieces().items():
        rows[name] = segment(run, options.seconds, sampler)
        if rank == 0:
            print(name, rows[name], flush=True)
            result["segments"] = rows
            (options.out / "power_collectives.json").write_text(json.dumps(result, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
