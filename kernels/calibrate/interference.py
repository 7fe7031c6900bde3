"""Measures the slow-down of compute overlapped with communication, and of the communication itself.

A persistent PTX copy (copy.ptx, n CTAs, each alone on its SM) pushes from GPU 0 to GPU 1 while an operator
runs on GPU 0. Windows with and without the copy alternate, and the GPU rests before each, so that neither
drift nor the power limit favours one. An overlapped window counts only if the copy ran before it and did not
reach its time limit. An SM-aware operator can leave more SMs free than the copy takes, because kernels in
clusters of two may not fit the remaining SMs exactly, and a tuned library would leave a margin.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from moesim.kernels.calibrate.protocol import Facts, Grid, Parameter, Sample, TaskFailed

SMS = (20, 8, 32, 16, 24, 12, 4, 48)
QUICK_SMS = (8, 20)
MARGINS = (0, 2, 4)
"""SMs that an SM-aware operator leaves free beyond those of the copy."""
OPERATORS = ("fp8_wide", "fp8_deep", "fp8_grouped", "bf16", "attention", "memory")
SM_AWARE = ("fp8_wide", "fp8_deep", "fp8_grouped")
WINDOW_S = 12e-3
REST_S = 8e-3
MOST_WINDOWS = 9


def _grid(facts: Facts, quick: bool) -> Sequence[Mapping[str, Parameter]]:
    tasks: list[dict[str, Parameter]] = []
    for operator in ("fp8_wide", "bf16", "attention", "memory") if quick else OPERATORS:
        for n in QUICK_SMS if quick else SMS:
            tasks.append({"operator": operator, "sms": n, "left_free": 0})
            if operator in SM_AWARE:
                tasks += [{"operator": operator, "sms": n, "left_free": n + more} for more in MARGINS]
    return tasks


def _build(operator: str) -> Any:
    from moesim.kernels.calibrate import torch_graphs

    if operator == "attention":
        return torch_graphs.attention(128, 4096, 192, 128, backward=False)
    if operator == "memory":
        return torch_graphs.memory_copy(1 << 30)
    if operator == "bf16":
        return torch_graphs.gemm("bf16", 4096, 4096, 7168)
    m, n, k, groups = {
        "fp8_wide": (4096, 24576, 1536, 1),
        "fp8_deep": (4096, 4096, 7168, 1),
        "fp8_grouped": (32768, 4096, 7168, 8),
    }[operator]
    return torch_graphs.gemm("fp8", m, n, k, groups)


def _on_gpu(session: Any, p: Mapping[str, Any]) -> Sample:
    from moesim.kernels.calibrate.persistent_copy import CHUNK_BYTES, PersistentCopy
    from moesim.kernels.calibrate.torch_graphs import Graphs, torch

    operator, sms, left_free = str(p["operator"]), int(p["sms"]), int(p["left_free"])
    counts = QUICK_SMS if session.quick else SMS
    wanted = tuple(sorted({n + m for n in counts for m in MARGINS})) if operator in SM_AWARE else ()

    def build() -> tuple[Any, Any]:
        copy = PersistentCopy(session.devices[0], session.devices[1])
        return Graphs(session.devices[0], lambda: _build(operator), wanted), copy

    graphs, copy = session.keep(("interference", operator), build)
    counter = copy.counter(torch())
    copy_alone = copy.alone(sms)
    beside, ratios, carried, aware_alone = [], [], [], []
    for _ in range(min(session.repeats, MOST_WINDOWS)):
        time.sleep(REST_S)
        alone_s = graphs.seconds(0, WINDOW_S)
        if left_free:
            time.sleep(REST_S)
            aware_alone.append(graphs.seconds(left_free, WINDOW_S) / alone_s)
        time.sleep(REST_S)
        copy.start(sms)
        beside_s, chunks_per_s = graphs.window(left_free, WINDOW_S, counter)
        if copy.stop():
            beside.append(beside_s)
            ratios.append(beside_s / alone_s)
            carried.append(chunks_per_s * CHUNK_BYTES)
    if not ratios:
        raise TaskFailed("the copy beside it reached its time limit in every window")
    values = {
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "copy_bytes_per_s": statistics.median(carried),
        "copy_alone_bytes_per_s": copy_alone,
    }
    if aware_alone:
        values["aware_alone_ratio"] = statistics.median(aware_alone)
    return Sample(tuple(beside), values)


MEASUREMENT = Grid(
    name="interference",
    title="compute beside communication",
    grid=_grid,
    on_gpu=_on_gpu,
    task_s=0.9,
    setup_s=10.0,
    min_gpus=2,
    libraries=("cupy", "torch"),
)
