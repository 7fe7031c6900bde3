"""What a row costs in dispatch and combine of our kernels, by its width and the choices of a token.

    python -m lab.benchmarks.our_row_costs --out ours.jsonl --seconds 90

Times, rows and routings are those of row_costs.py. Received rows are checked at every set-up.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
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
from moesim.kernels.expert_parallel import ExpertParallel, Shape
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

        found = time_collective(
            self.group, work, repeats=REPEATS, gate=self.gate, before=lambda i: self.flush()
        )
        row = {"kernels": "ours", "operation": operation, "sms": sms, "tokens": tokens, "hidden": hidden}
        row |= {"row_bytes": row_bytes(operation, hidden), "routing": routing, "rows": rows}
        times = {"us": round(found.median_s * 1e6, 2), "least_us": round(found.least_s * 1e6, 2)}
        return row | {"ranks": self.group.ranks, **times}


def main() -> None:
    """Run the sweep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=90.0, help="begin no point after this time")
    options = parser.parse_args()
    ours, began = Ours(), time.monotonic()
    hashes = {name: KERNELS[name].digest() for name in ("dispatch", "combine", "notify")}
    with options.out.open("w") as file:
        head = {"kernels": "ours", "cupy": cupy().__version__, "kernels_sha256": hashes}
        file.write(json.dumps({**head, **machine()}) + "\n")
        for point in points():
            if time.monotonic() - began > options.seconds:
                break
            for operation in OPERATIONS:
                file.write(json.dumps(ours.row(operation, point)) + "\n")
                file.flush()
        file.write(json.dumps({"end": machine()["nvidia_smi"]}) + "\n")


if __name__ == "__main__":
    main()
