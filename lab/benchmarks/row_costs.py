"""What a row costs in dispatch and combine of DeepEP, by its width and the choices of a token.

    python -m lab.benchmarks.row_costs --ranks 2 --out deepep-2.jsonl --seconds 180

It needs PyTorch, CuPy and the extension `deep_ep_cpp` of DeepEP v1.2.1, built without NVSHMEM for ranks of
one process: its three calls of cudaIpc* hand the pointer through (`-include` of a header that defines them
so), and `attr[0].val.cooperative` in csrc/kernels/launch.cuh is 0, so that kernels of several ranks run on
one GPU at a time. CUDA_MODULE_LOADING=EAGER and CUDA_DEVICE_MAX_CONNECTIONS=32 must be set. With more ranks
than GPUs, ranks share them: they have SMs of their own, but memory and links together.

A time is the median over repeats of the slowest rank's, notify included. Each repeat follows a write of 256
MB, so that nothing is left in L2. DeepEP runs in its cached mode, with every chunk size listed, and the
fastest counts. All launches are queued behind a waiting kernel, so that no launch is timed. The first line
of the output is the machine, every other line one row. Routings: `top-k` takes the k best of 256 random
scores; `share p` sends each token to each rank with probability p, as a rank of a larger group sees it.
`our_row_costs.py` runs our kernels on the same points, `row_law.py` fits the law.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

EXPERTS, MOST_TOKENS, MOST_HIDDEN, MOST_ROWS = 256, 8192, 7168, 24576
WIDTHS = (7168, 2048, 4096, 1024, 5120, 2880)
LEFT_OUT = (3072, 6144)
ROUTINGS = ("top-8", "top-1", "top-2", "top-4", "share 0.125", "share 0.25", "share 0.66")
OPERATIONS = ("dispatch fp8", "dispatch bf16", "combine bf16")
CHUNKS = {
    ("dispatch", 2): (12, 24, 32), ("combine", 2): (4, 8, 12, 24),
    ("dispatch", 4): (6, 12, 24), ("combine", 4): (4, 6, 12),
    ("dispatch", 8): (6, 9, 16), ("combine", 8): (3, 4, 8),
}  # fmt: skip
"""Tokens of a chunk that are tried, by operation and ranks; the fastest counts."""
SLOTS = 256
BUFFER_BYTES = 1 << 30
FLUSHED_BYTES = 256 << 20
SEED = 20261125

Point = tuple[int, int, str, int]
"""SMs, tokens of a rank, routing, width of a row."""


def chosen(routing: str, tokens: int, ranks: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Expert ids [tokens, choices] of a routing; -1 is no choice."""
    kind, _, figure = routing.replace("-", " ").partition(" ")
    if kind == "top":
        return np.argsort(rng.random((tokens, EXPERTS)), axis=1)[:, : int(figure)]
    ids = np.arange(ranks) * (EXPERTS // ranks) + rng.integers(0, EXPERTS // ranks, (tokens, ranks))
    return np.where(rng.random((tokens, ranks)) < float(figure), ids, -1)


def row_bytes(operation: str, hidden: int) -> int:
    """Bytes of a row: BF16, or FP8 with a scale for each 128 elements."""
    return hidden + hidden // 32 if operation.endswith("fp8") else 2 * hidden


def deepep_points() -> Iterator[Point]:
    """The points of a sweep over DeepEP, the most telling first."""
    both = (20, 8)
    yield from ((n, 4096, r, h) for n in both for r in ROUTINGS for h in WIDTHS)
    yield from ((n, 4096, r, h) for n in both for r in ("top-8", "top-1", "share 0.125") for h in LEFT_OUT)
    yield from ((n, 4096, r, h) for n in (12, 16, 24) for r in ("top-8", "top-1") for h in (7168, 2048, 4096))
    yield from (
        (n, t, r, h)
        for n in both
        for t in (512, 2048, 8192)
        for r in ("top-8", "top-1")
        for h in (7168, 2048)
    )
    yield from ((n, 4096, "top-6", h) for n in both for h in (7168, 2048))
    yield from ((8, 4096, "top-8", h) for h in (1280, 1536, 1920, 2816, 2944, 3200))


def shared_points() -> Iterator[Point]:
    """The points of a sweep with more ranks than GPUs, on few SMs each."""
    for sms in (8, 4):
        for hidden in (7168, 2048, 4096, 1024, 5120, *LEFT_OUT):
            yield from ((sms, 4096, routing, hidden) for routing in ("top-8", "top-1", "top-4", "top-2"))


def machine() -> dict[str, Any]:
    """GPU, driver, clocks, limits and date."""
    query = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu"
    asked = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv"], capture_output=True, text=True, check=False
    )
    return {
        "command": " ".join(["python -m lab.benchmarks." + Path(sys.argv[0]).stem, *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "nvidia_smi": asked.stdout.strip().splitlines(),
        "nvlink_multicast": "off",
    }


class DeepEp:
    """All ranks of DeepEP in this process, on all GPUs: buffers, inputs, a handle for each routing."""

    def __init__(self, ranks: int) -> None:
        """Allocate buffers and random rows of the largest size on every rank."""
        import cupy
        import deep_ep_cpp
        import torch

        self.torch, self.cpp, self.ranks = torch, deep_ep_cpp, ranks
        gpus = torch.cuda.device_count()
        self.gpu = [rank * gpus // ranks for rank in range(ranks)]
        for a, b in ((a, b) for a in range(gpus) for b in range(gpus) if a != b):
            with cupy.cuda.Device(a):
                try:
                    cupy.cuda.runtime.deviceEnablePeerAccess(b)
                except cupy.cuda.runtime.CUDARuntimeError as error:
                    if "AlreadyEnabled" not in str(error):
                        raise
        self.streams = [torch.cuda.Stream(gpu) for gpu in self.gpu]
        self.buffers = []
        for rank in range(ranks):
            with torch.cuda.device(self.gpu[rank]):
                self.buffers.append(deep_ep_cpp.Buffer(rank, ranks, BUFFER_BYTES, 0, False, True))
        handles = [buffer.get_local_ipc_handle() for buffer in self.buffers]
        for rank, buffer in enumerate(self.buffers):
            with torch.cuda.device(self.gpu[rank]):
                buffer.sync(self.gpu, handles, None)
        self.flat, self.scales = [], []
        for gpu in self.gpu:
            self.flat.append(torch.randn(MOST_ROWS * MOST_HIDDEN, device=gpu, dtype=torch.bfloat16))
            self.scales.append(torch.rand(MOST_TOKENS * MOST_HIDDEN // 128, device=gpu))
        self.flushed = [torch.empty(FLUSHED_BYTES // 4, device=g, dtype=torch.int32) for g in range(gpus)]
        self._handles: dict[tuple[str, int, int], Any] = {}
        for rank in range(ranks):  # an allocation while kernels wait for each other would wait for them
            with self.on(rank):
                sizes = [3 << 30, *[1 << 19] * 64]
                kept = [torch.empty(size, device=self.gpu[rank], dtype=torch.uint8) for size in sizes]
                del kept
        self.wait()

    def on(self, rank: int) -> Any:
        """The rank's stream, on its GPU."""
        return self.torch.cuda.stream(self.streams[rank])

    def wait(self) -> None:
        """Until all GPUs are done."""
        for gpu in set(self.gpu):
            self.torch.cuda.synchronize(gpu)

    def rows(self, rank: int, operation: str, tokens: int, hidden: int) -> tuple[Any, Any]:
        """Random rows of an operation's format, and their scales or None."""
        flat = self.flat[rank]
        if not operation.endswith("fp8"):
            return flat[: tokens * hidden].view(tokens, hidden), None
        fp8 = flat.view(self.torch.float8_e4m3fn)[: tokens * hidden].view(tokens, hidden)
        return fp8, self.scales[rank][: tokens * hidden // 128].view(tokens, hidden // 128)

    def choices(self, routing: str, tokens: int) -> list[Any]:
        """Expert ids of every rank, on the CPU."""
        return [
            chosen(routing, tokens, self.ranks, np.random.default_rng([SEED, rank, tokens]))
            for rank in range(self.ranks)
        ]

    def layouts(self, routing: str, tokens: int) -> list[tuple[Any, ...]]:
        """Choices, weights and the layout of them on every rank."""
        found = []
        for rank, ids in enumerate(self.choices(routing, tokens)):
            with self.on(rank):
                put = self.torch.from_numpy(ids).to(self.gpu[rank], self.torch.int64)
                weights = self.torch.rand(ids.shape, device=self.gpu[rank])
                per_rank, _, per_expert, in_rank, _ = self.buffers[rank].get_dispatch_layout(
                    put, EXPERTS, None, False, False
                )
                found.append((put, weights, per_rank, per_expert, in_rank))
        self.wait()
        return found

    def fresh(self, operation: str, point: Point, chunk: int) -> Callable[[int], Any]:
        """A dispatch that carries the choices and weights of its tokens too, without a wait of the CPU."""
        sms, tokens, routing, hidden = point
        config = self.cpp.Config(sms, chunk, SLOTS, 6, 128)
        layouts = self.layouts(routing, tokens)
        rows = [self.rows(rank, operation, tokens, hidden) for rank in range(self.ranks)]

        def work(rank: int) -> Any:
            ids, weights, per_rank, per_expert, in_rank = layouts[rank]
            return self.buffers[rank].intranode_dispatch(
                *rows[rank], ids, weights, per_rank, in_rank, per_expert, 0, None, None, 1,
                tokens * self.ranks, config, None, False, False,
            )  # fmt: skip

        return work

    def handle(self, routing: str, tokens: int, sms: int) -> Any:
        """What a dispatch leaves for later calls on every rank; the last is its received rows."""
        key = routing, tokens, sms
        if key not in self._handles:
            work, results = self.fresh("dispatch bf16", (sms, tokens, routing, 1024), 8), []
            for rank in range(self.ranks):
                with self.on(rank):
                    results.append(work(rank))
            self.wait()
            ids = self.choices(routing, tokens)
            per_rank = EXPERTS // self.ranks
            handles = []
            for rank, result in enumerate(results):
                _, _, _, _, _, rank_prefix, prefix, received_prefix, source, head, _ = result
                n = int(sum(((i // per_rank == rank) & (i >= 0)).any(axis=1).sum() for i in ids))
                in_rank = [
                    ((ids[rank] // per_rank == r) & (ids[rank] >= 0)).any(axis=1) for r in range(self.ranks)
                ]
                with self.on(rank):
                    sent = self.torch.from_numpy(np.stack(in_rank, axis=1)).to(self.gpu[rank])
                handles.append((rank_prefix, prefix, received_prefix, source[:n].clone(), sent, head, n))
            self.wait()
            self._handles[key] = handles
        return self._handles[key]

    def work(self, operation: str, point: Point, chunk: int) -> Callable[[int], Any]:
        """The call to time, in cached mode."""
        sms, tokens, routing, hidden = point
        handles, config = self.handle(routing, tokens, sms), self.cpp.Config(sms, chunk, SLOTS, 6, 128)
        rows = [self.rows(rank, operation, tokens, hidden) for rank in range(self.ranks)]

        def combine(rank: int) -> Any:
            rank_prefix, _, received_prefix, source, _, head, n = handles[rank]
            back = self.flat[rank][: n * hidden].view(n, hidden)
            return self.buffers[rank].intranode_combine(
                back, None, None, None, source, rank_prefix, received_prefix, head, config, None, False, False
            )

        def dispatch(rank: int) -> Any:
            rank_prefix, prefix, _, _, in_rank, _, n = handles[rank]
            return self.buffers[rank].intranode_dispatch(
                *rows[rank],
                None,
                None,
                None,
                in_rank,
                None,
                n,
                rank_prefix,
                prefix,
                1,
                0,
                config,
                None,
                False,
                False,
            )

        return combine if operation.startswith("combine") else dispatch

    def slowest_us(self, work: Callable[[int], Any], repeats: int = 15) -> tuple[float, float]:
        """Median and least over repeats of the slowest rank's time."""
        cuda, everyone = self.torch.cuda, range(self.ranks)

        def marks(timed: bool) -> list[Any]:
            made = []
            for rank in everyone:
                with self.on(rank):
                    made.append(cuda.Event(enable_timing=timed))
            return made

        for _ in range(2):
            for rank in everyone:
                with self.on(rank):
                    work(rank)
        self.wait()
        for rank in everyone:
            with self.on(rank):
                cuda._sleep(6_000_000 * self.ranks)
        timed = [(marks(True), marks(True)) for _ in range(repeats)]
        for first, last in timed:
            together = marks(False)
            for rank in everyone:
                with self.on(rank):
                    if rank == self.gpu.index(self.gpu[rank]):
                        self.flushed[self.gpu[rank]].zero_()
                    together[rank].record()
            for rank in everyone:
                for event in together:
                    self.streams[rank].wait_event(event)
            for rank in everyone:
                with self.on(rank):
                    first[rank].record()
                    work(rank)
                    last[rank].record()
        self.wait()
        found = [max(a.elapsed_time(b) for a, b in zip(*pair, strict=True)) for pair in timed]
        return statistics.median(found) * 1e3, min(found) * 1e3


def sweep(out: Path, seconds: float, ranks: int) -> None:
    """The sweep over DeepEP with `ranks` ranks in this process."""
    import torch

    one, began = DeepEp(ranks), time.monotonic()
    with out.open("w") as file:
        head = {"kernels": "deepep v1.2.1 (9af0e0d0)", "ranks": ranks, "torch": torch.__version__}
        file.write(json.dumps({**head, **machine()}) + "\n")
        for point in deepep_points() if ranks == 2 else shared_points():
            for operation in OPERATIONS:
                if time.monotonic() - began > seconds:
                    break
                if operation.endswith("fp8") and point[3] % 128:
                    continue
                for kind, row in deepep_rows(one, operation, point):
                    file.write(json.dumps({"kernels": kind, **row}) + "\n")
                    file.flush()
        file.write(json.dumps({"end": machine()["nvidia_smi"]}) + "\n")


def deepep_rows(one: DeepEp, operation: str, point: Point) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of one point: cached mode, and at some points also with choices."""
    sms, tokens, routing, hidden = point
    rows = sum(handle[-1] for handle in one.handle(routing, tokens, sms)) / one.ranks
    row: dict[str, Any] = {"operation": operation, "sms": sms, "tokens": tokens, "hidden": hidden}
    row |= {"row_bytes": row_bytes(operation, hidden), "routing": routing, "rows": rows, "ranks": one.ranks}
    times = {
        c: one.slowest_us(one.work(operation, point, c)) for c in CHUNKS[operation.split()[0], one.ranks]
    }
    best = min(times, key=lambda c: times[c][0])
    by_chunk = {str(c): round(t[0], 1) for c, t in times.items()}
    yield (
        "deepep",
        row | {"us": round(times[best][0], 2), "least_us": round(times[best][1], 2), "by_chunk": by_chunk},
    )
    if not operation.startswith("dispatch") or (tokens, hidden) not in ((4096, 2048), (4096, 7168)):
        return
    if routing in ("top-8", "top-1"):
        fresh = one.slowest_us(one.fresh(operation, point, best))
        yield (
            "deepep, with choices",
            row | {"us": round(fresh[0], 2), "least_us": round(fresh[1], 2), "chunk": best},
        )


def main() -> None:
    """Run the sweep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4, 8), help="ranks of DeepEP")
    parser.add_argument("--seconds", type=float, default=150.0, help="begin no point after this time")
    options = parser.parse_args()
    sweep(options.out, options.seconds, options.ranks)


if __name__ == "__main__":
    main()
