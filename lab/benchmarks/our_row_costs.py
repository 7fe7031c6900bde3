"""What a row costs in dispatch and combine of our kernels, by its width and the choices of a token.

    python -m lab.benchmarks.our_row_costs --out ours.jsonl --seconds 90 [--sweep tokens|low-latency]

Times, rows and routings are those of row_costs.py. Received rows are checked at every set-up. `tokens` varies
the tokens of a rank, `low-latency` measures the kernels for few tokens.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lab.benchmarks import kernel_stages as stages
from lab.benchmarks.row_costs import (
    EXPERTS,
    FLUSHED_BYTES,
    LEFT_OUT,
    OPERATIONS,
    SEED,
    Point,
    chosen,
    machine,
    row_bytes,
)
from moesim.kernels.catalog import KERNELS
from moesim.kernels.expert_parallel import ExpertParallel, LowLatency, Shape
from moesim.kernels.launch import GpuGroup
from moesim.kernels.launch import cupy
from lab.benchmarks.collective_times import time_collective
from moesim.kernels.timing import StartGate

REPEATS = 15


def points() -> Iterator[Point]:
    """The points of a sweep over our kernels; those of one set-up follow each other."""
    for hidden in (7168, 2048, 4096, 1024, 5120, *LEFT_OUT):
        for routing in ("top-8", "top-1", "top-2", "share 0.25"):
            yield from ((n, 4096, routing, hidden) for n in (2, 4, 8, 16, 20, 24))


def token_points() -> Iterator[Point]:
    """Points over the tokens of a rank, the ends first."""
    for tokens in (1024, 16384, 512, 8192, 2048):
        for hidden in (2048, 7168, 4096):
            yield from ((n, tokens, r, hidden) for r in ("top-8", "top-1", "top-4") for n in (8, 20))
    for hidden in (2048, 5120):
        yield from ((n, 4096, r, hidden) for r in ("top-6", "top-4") for n in (8, 20))


class Ours:
    """The group, and the set-ups of one shape."""

    def __init__(self) -> None:
        """One rank a GPU of this process."""
        self.group = GpuGroup(range(cupy().cuda.runtime.getDeviceCount()))
        self.gate, self.flushed = StartGate(self.group), self.group.symmetric((FLUSHED_BYTES,), "u1")
        self._kept: dict[tuple[Any, ...], tuple[ExpertParallel, float]] = {}

    def set_up(self, tokens: int, routing: str, hidden: int, fp8: bool) -> tuple[ExpertParallel, float]:
        """Buffers after a checked dispatch, and the mean rows that a rank receives."""
        key = tokens, routing, hidden, fp8
        if key not in self._kept:
            self._kept = {k: v for k, v in self._kept.items() if k[:3] == key[:3]}
            cupy().get_default_memory_pool().free_all_blocks()
            ranks = self.group.ranks
            ids = [
                chosen(routing, tokens, ranks, np.random.default_rng([SEED, r, tokens])) for r in range(ranks)
            ]
            ep = ExpertParallel(self.group, Shape(tokens, hidden, ids[0].shape[1], EXPERTS, fp8))
            stages.fill_inputs(ep, "balanced", SEED)
            self.group.write(ep.topk_idx, [i.astype(np.int32) for i in ids])
            stages.check(ep, 8)
            self._kept[key] = ep, sum(map(sum, ep.copies())) / ranks
        return self._kept[key]

    def flush(self) -> None:
        """Queue a write over L2 on every rank, then a barrier."""
        for rank, array in enumerate(self.flushed):
            with cupy().cuda.Device(self.group.devices[rank]):
                array.data.memset_async(1, array.nbytes, self.group.streams[rank])
        self.group.barrier()

    def row(self, operation: str, point: Point) -> dict[str, Any]:
        """One measured row."""
        sms, tokens, routing, hidden = point
        ep, rows = self.set_up(tokens, routing, hidden, operation.endswith("fp8"))

        def work(i: int) -> None:
            if operation.startswith("combine"):
                ep.combine(sms)
            else:
                ep.notify()
                ep.dispatch(sms)

        row = {"kernels": "ours", "tokens": tokens, "routing": routing, "hidden": hidden, "rows": rows}
        return row | {"ranks": self.group.ranks} | self.timed(operation, sms, hidden, work)

    def timed(self, operation: str, sms: int, hidden: int, work: Callable[[int], None]) -> dict[str, Any]:
        """Median and least time of queued work, by operation and SMs."""
        found = time_collective(
            self.group, work, repeats=REPEATS, gate=self.gate, before=lambda i: self.flush()
        )
        row = {"operation": operation, "sms": sms, "row_bytes": row_bytes(operation, hidden)}
        return row | {"us": round(found.median_s * 1e6, 2), "least_us": round(found.least_s * 1e6, 2)}


def low_latency_rows(ours: Ours) -> Iterator[dict[str, Any]]:
    """Rows of the kernels for few tokens, in FP8 to the experts and BF16 back, checked by what arrived."""
    group = ours.group
    for tokens in (128, 512, 2048, 32):
        for hidden in (7168, 2048, 1024, 4096, 5120):
            for routing in ("top-8", "top-1", "top-2", "top-4"):
                rngs = [np.random.default_rng([SEED, rank, tokens]) for rank in range(group.ranks)]
                ids = [chosen(routing, tokens, group.ranks, rng).astype(np.int32) for rng in rngs]
                ll = LowLatency(group, Shape(tokens, hidden, ids[0].shape[1], EXPERTS, True))
                group.write(ll.topk_idx, ids)
                group.write(ll.x, [stages.bf16_rows(tokens, hidden, rng) for rng in rngs])
                back = stages.bf16_rows(512, hidden, rngs[0])
                group.write(ll.results, [np.resize(back, array.shape) for array in ll.results])
                ll.dispatch(64)
                group.synchronize()
                per_rank = EXPERTS // group.ranks
                counts = [
                    [int((i // per_rank == r).any(axis=1).sum()) for i in ids] for r in range(group.ranks)
                ]
                if [array.get()[ll.half].tolist() for array in ll.recv_counts] != counts:
                    raise SystemExit(f"low-latency dispatch wrong: {tokens} tokens of {hidden}, {routing}")
                row = {"kernels": "ours, low latency", "tokens": tokens, "hidden": hidden, "routing": routing}
                row |= {"rows": sum(map(sum, counts)) / group.ranks, "ranks": group.ranks}
                for operation, call in (("dispatch fp8", ll.dispatch), ("combine bf16", ll.combine)):
                    for sms in (32, 128):
                        yield row | ours.timed(operation, sms, hidden, lambda i, n=sms, f=call: f(n))


def rows_of(ours: Ours, sweep: str) -> Iterator[dict[str, Any]]:
    """All rows of a sweep."""
    if sweep == "low-latency":
        yield from low_latency_rows(ours)
        return
    for point in points() if sweep == "rows" else token_points():
        for operation in OPERATIONS:
            yield ours.row(operation, point)


def main() -> None:
    """Run the sweep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=90.0, help="begin no point after this time")
    parser.add_argument("--sweep", default="rows", choices=("rows", "tokens", "low-latency"))
    options = parser.parse_args()
    ours, began = Ours(), time.monotonic()
    hashes = {name: KERNELS[name].digest() for name in ("dispatch", "combine", "notify", "dispatch_ll", "combine_ll")}
    with options.out.open("w") as file:
        head = {"kernels": "ours", "cupy": cupy().__version__, "kernels_sha256": hashes}
        file.write(json.dumps({**head, **machine()}) + "\n")
        for row in rows_of(ours, options.sweep):
            file.write(json.dumps(row) + "\n")
            file.flush()
            if time.monotonic() - began > options.seconds:
                break
        file.write(json.dumps({"end": machine()["nvidia_smi"]}) + "\n")


if __name__ == "__main__":
    main()
