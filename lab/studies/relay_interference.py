"""Slow-down of the expert-parallel kernels overlapped with each kind of compute, over one hop and two.

    PYTHONPATH=src python -m lab.studies.relay_interference -o relay-interference.json

Every GPU runs the same operator over and over while dispatch and combine run on n SMs of each (FP8 rows
out, BF16 back; 4,096 tokens of 7,168, top-8 of 256 experts). Two hops go over two virtual nodes. An SM-aware
operator ("told" in its name) leaves n SMs free. A window counts only if compute still ran at its end.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from moesim.kernels.calibrate.protocol import Session
from moesim.kernels.calibrate.compute import (
    Graphs,
    attention,
    gemm,
    memory_copy,
    torch,
)
from moesim.kernels.calibrate.links import _two_hop_set_up as _set_up
from moesim.kernels.launch import GpuGroup
from moesim.kernels.launch import cupy
from moesim.kernels.machine import read_machine

SMS = (8, 20)
TOKENS = 4096
REPLAYS = 12
HIGHEST = -5
WINDOWS = 3
OPERATORS: dict[str, tuple[Callable[[], Any], bool]] = {
    "attention forward": (lambda: attention(128, 4096, 192, 128, backward=False), False),
    "attention backward": (lambda: attention(128, 4096, 192, 128, backward=True), False),
    "fp8 product, told": (lambda: gemm("fp8", 4096, 4096, 7168), True),
    "fp8 grouped product, told": (lambda: gemm("fp8", 32768, 4096, 7168, 8), True),
    "memory copy": (lambda: memory_copy(1 << 30), False),
}


def main() -> None:
    """Measure, print a table and write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--priority", action="store_true", help="communication on streams of high priority")
    options = parser.parse_args()
    machine = read_machine()
    devices = list(range(len(machine.gpus)))
    session = Session(devices, quick=False)
    ranks = len(devices)
    if options.priority:
        _prefer(session.group(ranks))
    hops, _, _ = _set_up(session, TOKENS, ranks, ranks // 2)
    group, one = hops.group, hops.ep
    kernels: dict[str, tuple[Callable[[int], None], Callable[[], None]]] = {
        "dispatch_2hop": (lambda n: hops.dispatch(n), hops.notify),
        "combine_2hop": (lambda n: hops.combine(n), group.barrier),
        "dispatch": (lambda n: one.dispatch(n), one.notify),
        "combine": (lambda n: one.combine(n), group.barrier),
    }
    rows: list[dict[str, Any]] = []

    def seconds(name: str, n: int, start: Callable[[], None] = lambda: None) -> float:
        work, before = kernels[name]

        def prepare(i: int) -> None:
            if i == 0:
                start()
            before()

        return statistics.median(session.time(ranks, lambda i: work(n), before=prepare))

    alone = {(name, n): [seconds(name, n)] for name in kernels for n in SMS}
    for operator, (build, sm_aware) in OPERATORS.items():
        graphs = [Graphs(device, build, SMS if sm_aware else ()) for device in devices]
        for n in SMS:
            left_free = n if sm_aware else 0
            for name in kernels:
                ratios = []
                for _ in range(WINDOWS):
                    base = seconds(name, n)
                    alone[name, n].append(base)
                    beside = seconds(name, n, partial(_replay, graphs, left_free))
                    if not any(graph.stream.query() for graph in graphs):
                        ratios.append(beside / base)
                    for device in devices:
                        torch().cuda.synchronize(device)
                if ratios:
                    rows.append(
                        {
                            "kernel": name, "sms": n, "operator": operator, "told": left_free,
                            "ratio": statistics.median(ratios), "low": min(ratios), "high": max(ratios),
                        }
                    )  # fmt: skip
                    print(f"{name:14} {n:3} SMs beside {operator:26} x{rows[-1]['ratio']:.3f}", flush=True)
        graphs.clear()
        torch().cuda.empty_cache()
    result = {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(sys.argv),
        "priority": options.priority,
        "gpus": [gpu.name for gpu in machine.gpus],
        "driver": machine.driver,
        "alone_us": {f"{name} {n}": 1e6 * statistics.median(times) for (name, n), times in alone.items()},
        "rows": rows,
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    for (name, n), times in alone.items():
        print(f"{name:14} {n:3} SMs alone {1e6 * statistics.median(times):8.1f} us")


def _prefer(group: GpuGroup) -> None:
    """Use streams whose waiting CTAs start before those of compute, as DeepEP and NCCL request."""
    for rank, device in enumerate(group.devices):
        with cupy().cuda.Device(device):
            group.streams[rank] = cupy().cuda.Stream(non_blocking=True, priority=HIGHEST)


def _replay(graphs: list[Graphs], left_free: int) -> None:
    for _ in range(REPLAYS):
        for graph in graphs:
            graph.replay(left_free)


if __name__ == "__main__":
    main()
