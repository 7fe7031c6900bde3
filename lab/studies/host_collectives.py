"""Host time of PyTorch collectives through NCCL with tiny payloads and one process per GPU.

torchrun --nproc-per-node 2 -m lab.studies.host_collectives --out DIR
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

CALLS, REPEATS = 20, 9


def host_us(run: Callable[[], Any]) -> dict[str, float]:
    """Host microseconds of one call that starts on idle GPUs; the median over this rank's repeats."""
    for _ in range(3):
        run()
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            run()
        times.append((time.perf_counter() - start) / CALLS)
    torch.cuda.synchronize()
    return {"us": statistics.median(times) * 1e6, "min_us": min(times) * 1e6}


def main() -> None:
    """Measure and write host_collectives.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=".")
    out = Path(parser.parse_args().out)
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    n = dist.get_world_size()
    group = dist.group.WORLD
    x = torch.ones(64 * n, 64, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    part = torch.empty(64, 64, device="cuda", dtype=torch.bfloat16)
    counts = torch.ones(64, device="cuda", dtype=torch.int64)
    splits = [64] * n
    grads = x.clone().requires_grad_(True)

    cases: dict[str, Callable[[], Any]] = {
        "all_to_all_single": lambda: dist.all_to_all_single(y, x),
        "all_to_all_single with splits": lambda: dist.all_to_all_single(y, x, splits, splits),
        "functional all_to_all_single and wait": lambda: functional.wait_tensor(
            functional.all_to_all_single(counts, None, None, group)
        ),
        "functional all_to_all_single_autograd": lambda: functional.all_to_all_single_autograd(
            grads, splits, splits, group
        ),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(x, part),
        "all_gather_into_tensor async and wait": lambda: dist.all_gather_into_tensor(
            x, part, async_op=True
        ).wait(),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(part, x),
        "all_reduce": lambda: dist.all_reduce(part),
        "counts by all-to-all and two copies to the host": lambda: (
            functional.wait_tensor(functional.all_to_all_single(counts, None, None, group))
            .view(8, -1)
            .sum(1)
            .to("cpu")
            .tolist()
        ),
    }
    result: dict[str, Any] = {
        "world": n,
        "torch": torch.__version__,
        "nccl": torch.cuda.nccl.version(),
        "gpu": torch.cuda.get_device_name(rank),
    }
    for name, run in cases.items():
        try:
            result[name] = host_us(run)
        except Exception as error:
            result[name] = {"failed": repr(error)[:300]}
    if rank == 0:
        result["cpu"] = next(
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        )
        (out / "host_collectives.json").write_text(json.dumps(result, indent=1) + "\n")
        print(json.dumps(result, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
