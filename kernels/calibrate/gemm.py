"""Measures GEMMs by shape and format, and the clock and power that a GPU sustains under them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from moesim.kernels.calibrate.protocol import Facts, Grid, Parameter, Sample

SHAPES = (
    (4096, 7168, 16384),
    (4096, 24576, 1536),
    (4096, 4096, 7168),
    (4096, 7168, 2048),
    (4096, 2112, 7168),
    (4096, 32768, 512),
    (4096, 36864, 7168),
    (8192, 8192, 8192),
    (1024, 4096, 7168),
    (1024, 7168, 2048),
    (128, 4096, 7168),
    (64, 7168, 16384),
)
GROUPED = ((32768, 4096, 7168, 8), (32768, 7168, 2048, 8))
"""Grouped GEMMs as (m over all groups, n, k, groups)."""
SUSTAINED_S = 2.0


def _grid(facts: Facts, quick: bool) -> Sequence[Mapping[str, Parameter]]:
    def task(dtype: str, shape: tuple[int, ...], kind: str = "product") -> dict[str, Parameter]:
        m, n, k, *groups = shape
        return {"kind": kind, "dtype": dtype, "m": m, "n": n, "k": k, "groups": groups[0] if groups else 1}

    shapes = SHAPES[:5] if quick else SHAPES
    tasks = [task(dtype, shape) for shape in shapes for dtype in ("bf16", "fp8")]
    tasks += [task("fp8", shape) for shape in (GROUPED[:1] if quick else GROUPED)]
    return [*tasks, task("bf16", (8192, 8192, 8192), "sustained")]


def _on_gpu(session: Any, p: Mapping[str, Any]) -> Sample:
    from moesim.kernels.calibrate.torch_graphs import Graphs, gemm

    shape = (p["dtype"], p["m"], p["n"], p["k"], p["groups"])
    graphs = session.keep(("gemm", *shape), lambda: Graphs(session.devices[0], lambda: gemm(*shape)))
    if p["kind"] == "sustained":
        return _sustained(session, graphs)
    times = tuple(graphs.seconds() for _ in range(session.repeats))
    return Sample(times, {"flop": graphs.work.flop})


def _sustained(session: Any, graphs: Any) -> Sample:
    """Run GEMMs without a pause; read clock and power in the second half, when both have settled."""
    from moesim.kernels.loader import cupy
    from moesim.kernels.machine import read_state

    bus = cupy().cuda.runtime.deviceGetPCIBusId(session.devices[0])
    times, clocks, powers = [], [], []
    begin = time.monotonic()
    while (passed := time.monotonic() - begin) < SUSTAINED_S:
        times.append(graphs.seconds(at_least_s=0.1))
        graphs.replay()  # the state is read while the GPU is busy
        state = read_state(bus)
        if passed > SUSTAINED_S / 2:
            clocks += [state.sm_clock_hz] if state.sm_clock_hz else []
            powers += [state.power_w] if state.power_w else []
    graphs.stream.synchronize()
    values = {"flop": graphs.work.flop}
    values |= {"sustained_clock_hz": statistics.median(clocks)} if clocks else {}
    values |= {"sustained_power_w": statistics.median(powers)} if powers else {}
    return Sample(tuple(times[len(times) // 2 :]), values)


MEASUREMENT = Grid(
    name="gemm",
    title="matrix products",
    grid=_grid,
    on_gpu=_on_gpu,
    task_s=1.0,
    setup_s=6.0,
    libraries=("cupy", "torch"),
)
