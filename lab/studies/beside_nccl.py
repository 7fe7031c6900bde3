"""Slow-down of kernels overlapped with an NCCL ring collective, and of the collective (eq. O5).

    torchrun --nproc-per-node 4 -m lab.studies.beside_nccl -o beside-nccl.json

Every GPU runs one operator over and over and, on another stream, one collective after the other. The
collective moves the parameters or gradients of a layer, as ZeRO-3 does. A window counts only if the other
work (the collectives, or for the collective's slow-down the operators) ran from its begin past its end.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as f

LAYER = 218_112_000
"""Parameters of one layer of Llama 3 8B."""
WINDOW_S = 0.03
WINDOWS = 7
PRODUCTS = (
    (8192, 28672, 4096),
    (8192, 4096, 14336),
    (8192, 4096, 4096),
    (16384, 8192, 8192),
    (4096, 14336, 8192),
)
Call = Callable[[], Any]


def operators(device: torch.device) -> dict[str, Call]:
    """The operators by name, on random data."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    calls: dict[str, Call] = {}
    for m, n, k in PRODUCTS:
        a, b = random(m, k), random(n, k).t()
        calls[f"bf16 product {m}x{n}x{k}"] = partial(torch.matmul, a, b)
    one = torch.ones((), device=device)
    for m, n, k in PRODUCTS[:2]:
        a8, b8 = random(m, k).to(torch.float8_e4m3fn), random(n, k).to(torch.float8_e4m3fn).t()
        calls[f"fp8 product {m}x{n}x{k}"] = partial(
            torch._scaled_mm, a8, b8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    q, k_, v = (random(1, 32, 8192, 128) for _ in range(3))
    calls["attention forward 32x8192x128"] = lambda: f.scaled_dot_product_attention(q, k_, v, is_causal=True)
    x, y = random(8192, 14336), random(8192, 14336)
    calls["multiply 8192x14336"] = lambda: torch.mul(x, y)
    h, w = random(8192, 4096), random(4096)
    calls["rms norm 8192x4096"] = lambda: f.rms_norm(h, (4096,), w)
    return calls


def collectives(device: torch.device, ranks: int) -> dict[str, Call]:
    """All-gather of a layer in BF16 and reduce-scatter of its gradients in FP32."""
    own = LAYER // ranks
    whole16, part16 = (torch.zeros(n, device=device, dtype=torch.bfloat16) for n in (own * ranks, own))
    whole32, part32 = (torch.zeros(n, device=device) for n in (own * ranks, own))
    return {
        "all-gather bf16": lambda: dist.all_gather_into_tensor(whole16, part16),
        "reduce-scatter fp32": lambda: dist.reduce_scatter_tensor(part32, whole32),
    }


def seconds(call: Call, count: int, stream: torch.cuda.Stream) -> float:
    """Mean seconds of `count` calls back to back on `stream`."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        begin.record()
        for _ in range(count):
            call()
        end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / count


def beside(timed: Call, n: int, at: torch.cuda.Stream, other: Call, m: int, on: torch.cuda.Stream) -> float:
    """Seconds of one call of `timed` while `other` runs; RuntimeError if `other` ended inside the window."""
    started, finished, begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(4))
    with torch.cuda.stream(on):
        started.record()
        other()
        running = torch.cuda.Event()
        running.record()
        for _ in range(m):
            other()
        finished.record()
    with torch.cuda.stream(at):
        at.wait_event(running)
        begin.record()
        for _ in range(n):
            timed()
        end.record()
    torch.cuda.synchronize()
    if begin.elapsed_time(finished) < begin.elapsed_time(end):
        raise RuntimeError("the other work ended inside the window")
    return begin.elapsed_time(end) / 1e3 / n


def agreed(value: float, device: torch.device) -> float:
    """The maximum over all ranks, so that every rank launches the same number of collectives."""
    tensor = torch.tensor([value], device=device, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor.item())


def main() -> None:
    """Measure on every rank; rank 0 prints a table and writes JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    work, side = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
    rows = []
    for collective, move in collectives(device, ranks).items():
        for operator, run in operators(device).items():
            seconds(run, 5, work), seconds(move, 3, side)
            guess = agreed(seconds(run, 20, work), device)
            moves_s = agreed(seconds(move, 5, side), device)
            n = max(4, round(WINDOW_S / guess))
            m = 2 + int(2.5 * WINDOW_S / moves_s)
            seconds(run, 10 * n, work)
            alone, together, moved_alone, moved_together = [], [], [], []
            for _ in range(WINDOWS):
                dist.barrier()
                alone.append(seconds(run, n, work))
                dist.barrier()
                together.append(beside(run, n, work, move, m, side))
                dist.barrier()
                moved_alone.append(seconds(move, m, side))
                dist.barrier()
                moved_together.append(beside(move, m // 2, side, run, 4 * n, work))
            a, b, c, d = map(statistics.median, (alone, together, moved_alone, moved_together))
            mine = torch.tensor([a, b, c, d], device=device, dtype=torch.float64)
            every = [torch.zeros_like(mine) for _ in range(ranks)]
            dist.all_gather(every, mine)
            a, b, c, d = (statistics.fmean(float(t[i]) for t in every) for i in range(4))
            lost = [1.0 - float(t[0] / t[1]) for t in every]
            row = {
                "collective": collective,
                "operator": operator,
                "alone_s": a,
                "beside_s": b,
                "lost": 1.0 - a / b,
                "lost_least": min(lost),
                "lost_most": max(lost),
                "collective_alone_s": c,
                "collective_beside_s": d,
                "collective_ratio": d / c,
                "windows": WINDOWS,
                "launches_a_window": n,
            }
            rows.append(row)
            if rank == 0:
                print({k: round(v, 7) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    if rank == 0:
        smi = "name,driver_version,clocks.sm,clocks.mem,power.limit"
        machine = subprocess.run(
            ["nvidia-smi", f"--query-gpu={smi}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split("\n")[:-1]
        options.output.write_text(
            json.dumps(
                {
                    "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
                    "command": "torchrun " + " ".join(sys.argv),
                    "machine": machine,
                    "torch": torch.__version__,
                    "nccl": ".".join(map(str, torch.cuda.nccl.version())),
                    "ranks": ranks,
                    "environment": {k: v for k, v in os.environ.items() if k.startswith("NCCL_")},
                    "rows": rows,
                },
                indent=1,
            )
            + "\n"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
