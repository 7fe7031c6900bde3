"""Small Kineto traces for tests of the trace reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def op(name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "cpu_op",
        "name": name,
        "pid": 1,
        "tid": 1,
        "ts": ts,
        "dur": dur,
        "args": args,
    }


def launched(
    name: str, call: float, ts: float, dur: float, number: int, stream: int = 7, **more: Any
) -> list[dict[str, Any]]:
    return [
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": call,
         "dur": 1, "args": {"correlation": number}},
        {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": ts, "dur": dur,
         "args": {"correlation": number, "stream": stream, "device": 0, **more}},
    ]  # fmt: skip


def step() -> list[dict[str, Any]]:
    """A product, its two gradients and an all-reduce beside the second; 10 us idle, of a late launch."""
    engine = "autograd::engine::evaluate_function: MmBackward0"
    backward = {"Sequence number": 5}
    return [
        {**op("ProfilerStep#3", 0, 200), "cat": "user_annotation"},
        op("aten::mm", 1, 10, **{"Sequence number": 5, "Input Dims": [[64, 16], [16, 32]]}),
        *launched("nvjet_tst_a", 2, 10, 20, 1),
        op(engine, 30, 60, **backward), op("MmBackward0", 31, 50, **backward),
        op("aten::mm", 32, 10, **{"Input Dims": [[64, 32], [32, 16]]}),
        *launched("nvjet_tst_b", 40, 40, 20, 2),
        op("aten::mm", 50, 10, **{"Input Dims": [[16, 64], [64, 32]]}),
        *launched("nvjet_tst_c", 51, 60, 20, 3),
        *launched(
            "ncclDevKernel_AllReduce_Sum_bf16", 70, 70, 20, 4, stream=9,
            **{"Collective name": "allreduce", "In msg nelems": 100, "dtype": "BFloat16",
               "Process Group Ranks": "[0, 1]"},
        ),
    ]  # fmt: skip


def write(path: Path, events: list[dict[str, Any]], rank: int = 0, world: int = 2) -> Path:
    info = {"rank": rank, "world_size": world}
    path.write_text(json.dumps({"distributedInfo": info, "traceEvents": events}, indent=1))
    return path
