"""Measures the latency of a barrier between GPUs, by number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moesim.kernels.calibrate.protocol import Facts, Grid, Parameter, Sample

IN_A_ROW = 20
"""Barriers timed together, because a single one is shorter than the resolution of CUDA events."""


def _grid(facts: Facts, quick: bool) -> Sequence[Mapping[str, Parameter]]:
    return [{"ranks": n} for n in sorted({facts.gpus, 2, 4, 8}, reverse=True) if n <= facts.gpus]


def _on_gpu(session: Any, p: Mapping[str, Any]) -> Sample:
    group = session.group(p["ranks"])

    def work(_: int) -> None:
        for _ in range(IN_A_ROW):
            group.barrier()

    return Sample(session.time(p["ranks"], work, each=IN_A_ROW))


MEASUREMENT = Grid(
    name="barrier",
    title="barriers between GPUs",
    grid=_grid,
    on_gpu=_on_gpu,
    task_s=0.3,
    min_gpus=2,
)
