"""Times small sums and gathers of all ranks, and BF16 products with cold weights, in CUDA graphs.

    NCCL_NVLS_ENABLE=0 torchrun --nproc-per-node 2 serving_calls.py OUT.json

Microseconds a call, the median of 20 replays. Rows: `ar`, `ag`, `rs` (NCCL), `one`, `two` (symmetric memory)
with bytes of the whole buffer; `bf16` with m, n, k and weights of at least 0.4 GB taken in turn.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

PRODUCTS = ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (2112, 7168), (24576, 1536),
            (7168, 16384), (5120, 2048), (128, 2048))  # fmt: skip
ROWS = (1, 8, 64, 128, 256, 512, 1024, 4096)
COLD_BYTES = 4e8


def replayed_us(call: Callable[[], Any], calls: int = 20) -> float:
    """Microseconds of a call in a graph of `calls` of them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for _ in range(20):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return sorted(times)[10]


def sums(world: int) -> list[tuple[Any, ...]]:
    """All-reduces, all-gathers and reduce-scatters of 4 KiB to 16 MiB a rank."""
    rows: list[tuple[Any, ...]] = []
    group, ops = dist.group.WORLD.group_name, torch.ops.symm_mem
    for power in range(12, 25):
        size = 2**power
        own = torch.ones(size // 2, dtype=torch.bfloat16, device="cuda")
        everyone = torch.empty(size // 2 * world, dtype=torch.bfloat16, device="cuda")
        shared = symmetric.empty(size // 2, dtype=torch.bfloat16, device="cuda")
        symmetric.rendezvous(shared, group)
        rows += [
            ("ar", size, replayed_us(lambda own=own: dist.all_reduce(own))),
            ("ag", world * size, replayed_us(lambda a=everyone, b=own: dist.all_gather_into_tensor(a, b))),
            ("rs", world * size, replayed_us(lambda a=own, b=everyone: dist.reduce_scatter_tensor(a, b))),
            ("one", size, replayed_us(lambda t=shared: ops.one_shot_all_reduce(t, "sum", group))),
            ("two", size, replayed_us(lambda t=shared: ops.two_shot_all_reduce_(t, "sum", group))),
        ]
        dist.barrier()
    return rows


def products() -> list[tuple[Any, ...]]:
    """Products of few and many rows."""
    rows: list[tuple[Any, ...]] = []
    for n, k in PRODUCTS:
        count = min(60, int(COLD_BYTES // (n * k * 2)) + 2)
        weights = [torch.randn(n, k, dtype=torch.bfloat16, device="cuda") for _ in range(count)]
        for m in ROWS:
            x, turn = torch.randn(m, k, dtype=torch.bfloat16, device="cuda"), iter(range(10**9))
            call = lambda x=x, turn=turn, w=weights: torch.mm(x, w[next(turn) % len(w)].t())  # noqa: E731
            rows.append(("bf16", m, n, k, replayed_us(call, count)))
    return rows


def main() -> None:
    """Measure on all ranks, products on the first."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    rows = sums(world)
    if rank == 0:
        result = {"device": torch.cuda.get_device_name(), "gpus": world, "torch": torch.__version__}
        Path(sys.argv[1]).write_text(json.dumps({**result, "rows": rows + products()}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
