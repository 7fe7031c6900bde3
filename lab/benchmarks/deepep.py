"""Times of DeepEP's dispatch and combine inside a node, beside ours on the same sizes and GPUs.

    python -m lab.benchmarks.deepep --sms 24

Needs DeepEP (written against the Python interface of v1.2.1, without NVSHMEM) and PyTorch with NCCL; one
process a GPU. The last line of output is JSON, rows like those of kernels.py. A time is the median over
repeats of the slowest rank's; each repeat follows an all-reduce. Layout and the exchange of sizes with the
CPU are left out (DeepEP's cached mode: the handle of an earlier dispatch), its notify kernel is in. The
best of the listed chunk sizes is reported. Results are not checked here: DeepEP's own tests do that.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from typing import Any

import deep_ep
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TOKENS, HIDDEN, TOP_K, EXPERTS = 4096, 7168, 8, 256
NVLINK_BUFFER_TOKENS = 256
BUFFER_BYTES = 1 << 30


def cast(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 rows and f32 scales of 1x128 tiles."""
    tiles = x.float().view(x.shape[0], -1, 128)
    amax = tiles.abs().amax(dim=2).clamp(min=1e-4)
    rows = (tiles * (448.0 / amax)[:, :, None]).to(torch.float8_e4m3fn)
    return rows.view(x.shape), amax / 448.0


def slowest_us(work: Callable[[], Any], repeats: int = 30) -> float:
    """Median over repeats of the slowest rank's time."""
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    align = torch.ones(1, device="cuda")
    for _ in range(5):
        work()
    for first, last in marks:
        dist.all_reduce(align)
        first.record()
        work()
        last.record()
    torch.cuda.synchronize()
    times = torch.tensor([first.elapsed_time(last) for first, last in marks], device="cuda")
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return statistics.median(times.tolist()) * 1e3


def best(times: dict[int, float]) -> tuple[int, float]:
    """Chunk size and time of the fastest."""
    return min(times.items(), key=lambda item: item[1])


def rank_main(rank: int, ranks: int, sms: int) -> None:
    """One rank: random inputs, tune the chunk sizes, print on rank 0."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=ranks, device_id=torch.device("cuda", rank))
    torch.manual_seed(rank)
    buffer = deep_ep.Buffer(dist.group.WORLD, BUFFER_BYTES, 0)
    x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    scores = torch.randn(TOKENS, EXPERTS, device="cuda")
    ids = torch.topk(scores, TOP_K, dim=-1, sorted=False).indices
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)

    def config(chunk: int) -> Any:
        return deep_ep.Config(sms, chunk, NVLINK_BUFFER_TOKENS)

    received, _, _, _, handle, _ = buffer.dispatch(
        x,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        config=config(8),
    )
    found: dict[str, dict[int, float]] = {"deepep dispatch fp8": {}, "deepep dispatch bf16": {}}
    found["deepep combine bf16"] = {}
    for chunk in (4, 8, 12, 16, 24, 32, 48):
        for name, rows in (("fp8", cast(x)), ("bf16", x)):
            found[f"deepep dispatch {name}"][chunk] = slowest_us(
                lambda r=rows, c=chunk: buffer.dispatch(r, handle=handle, config=config(c))
            )
    for chunk in (1, 2, 3, 4, 6, 8, 12):
        found["deepep combine bf16"][chunk] = slowest_us(
            lambda c=chunk: buffer.combine(received, handle=handle, config=config(c))
        )
    if rank == 0:
        table = []
        for what, times in found.items():
            chunk, median_us = best(times)
            print(f"{what:28s} sms={sms:3d} {median_us:9.1f} us  chunk={chunk}")
            table.append({"what": what, "sms": sms, "chunk": chunk, "median_us": median_us, "tokens": TOKENS})
        print(json.dumps(table))
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sms", type=int, default=24)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    options = parser.parse_args()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29533")
    os.environ["PYTHONSAFEPATH"] = "1"  # the ranks run nothing that lies in the current folder
    mp.spawn(rank_main, args=(options.ranks, options.sms), nprocs=options.ranks)
