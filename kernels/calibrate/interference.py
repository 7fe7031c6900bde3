"""Compute beside communication SMs, told of them and not, and what the communication still carries.

A persistent PTX copy (copy.ptx, n CTAs, each alone on its SM) pushes from GPU 0 to GPU 1 while an operator
runs on GPU 0. Windows alone and beside alternate, so that a drift of the clock favours neither; a beside
window counts only if the copy ran before it and did not reach its time limit.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from moesim.kernels.calibrate.protocol import Facts, Grid, Parameter, Sample, TaskFailed

SMS = (20, 8, 32, 16, 24, 12, 4, 48)
QUICK_SMS = (8, 20)
OPERATORS = ("fp8_wide", "fp8_deep", "bf16", "attention", "memory")
GROUP = {
    "fp8_wide": "gemm",
    "fp8_deep": "gemm",
    "bf16": "gemm",
    "attention": "attention",
    "memory": "memory_bound",
}
CAN_BE_TOLD = ("fp8_wide", "fp8_deep")
WINDOW_S = 12e-3


def _grid(facts: Facts, quick: bool) -> Sequence[Mapping[str, Parameter]]:
    tasks: list[dict[str, Parameter]] = []
    for operator in ("fp8_wide", "bf16", "attention", "memory") if quick else OPERATORS:
        for told in ("no", "yes") if operator in CAN_BE_TOLD else ("no",):
            tasks += [{"operator": operator, "sms": n, "told": told} for n in (QUICK_SMS if quick else SMS)]
    return tasks


def _build(operator: str) -> Any:
    from moesim.kernels.calibrate import torch_work

    if operator == "attention":
        return torch_work.attention(128, 4096, 192, 128, backward=False)
    if operator == "memory":
        return torch_work.memory_copy(1 << 30)
    dtype, shape = {
        "fp8_wide": ("fp8", (4096, 24576, 1536)),
        "fp8_deep": ("fp8", (4096, 4096, 7168)),
        "bf16": ("bf16", (4096, 4096, 7168)),
    }[operator]
    return torch_work.product(dtype, *shape)


def _on_gpu(session: Any, p: Mapping[str, Any]) -> Sample:
    from moesim.kernels.calibrate.persistent_copy import PersistentCopy
    from moesim.kernels.calibrate.torch_work import Graphs

    operator, sms = p["operator"], p["sms"]
    wanted = (QUICK_SMS if session.quick else SMS) if operator in CAN_BE_TOLD else ()

    def build() -> tuple[Any, Any]:
        copy = PersistentCopy(session.devices[0], session.devices[1])
        return Graphs(session.devices[0], lambda: _build(operator), wanted), copy

    graphs, copy = session.keep(("interference", operator), build)
    told = sms if p["told"] == "yes" else 0
    copy_alone = copy.alone(sms)
    beside, ratios, carried, told_alone = [], [], [], []
    for _ in range(session.repeats):
        alone_s = graphs.seconds(0, WINDOW_S)
        if told:
            told_alone.append(graphs.seconds(told, WINDOW_S) / alone_s)
        copy.start(sms)
        with copy.counting() as count:
            beside_s = graphs.seconds(told, WINDOW_S)
        if copy.stop():
            beside.append(beside_s)
            ratios.append(beside_s / alone_s)
            carried.append(count.bytes_per_s)
    if not ratios:
        raise TaskFailed("the copy beside it reached its time limit in every window")
    values = {
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "copy_bytes_per_s": statistics.median(carried),
        "copy_alone_bytes_per_s": copy_alone,
    }
    if told_alone:
        values["told_alone_ratio"] = statistics.median(told_alone)
    return Sample(tuple(beside), values)


MEASUREMENT = Grid(
    name="interference",
    title="compute beside communication",
    grid=_grid,
    on_gpu=_on_gpu,
    task_s=1.3,
    setup_s=8.0,
    min_gpus=2,
    libraries=("cupy", "torch"),
)
