"""Measures memory bandwidth by copies inside one GPU, by size and by SMs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moesim.kernels.calibrate.protocol import Facts, Grid, Parameter, Sample

BIG_BYTES = 1 << 30
SIZES = tuple(1 << k for k in (22, 24, 26, 28, 30))


def _grid(facts: Facts, quick: bool) -> Sequence[Mapping[str, Parameter]]:
    every = 2 * facts.sms
    tasks: list[dict[str, Parameter]] = [
        {"size_bytes": size, "ctas": every} for size in (SIZES[::-2] if quick else SIZES[::-1])
    ]
    few = (20, 132) if quick else (1, 4, 8, 16, 20, 32, 64, facts.sms)
    return tasks + [{"size_bytes": BIG_BYTES, "ctas": n} for n in few]


def _on_gpu(session: Any, p: Mapping[str, Any]) -> Sample:
    from moesim.kernels.copy import copy_ldst, make_pairs

    group, size = session.group(1), p["size_bytes"]

    def build() -> list[Any]:
        return [
            make_pairs(group, 0, [(session.random(0, size), session.random(0, size))])
            for _ in range(session.sets(2 * size))
        ]

    pairs = session.keep(("hbm", size), build)
    times = session.time(1, lambda i: copy_ldst(group, 0, pairs[i % len(pairs)], p["ctas"]))
    return Sample(times, {"bytes": 2.0 * size})


MEASUREMENT = Grid(
    name="hbm",
    title="memory bandwidth",
    grid=_grid,
    on_gpu=_on_gpu,
    task_s=0.35,
)
