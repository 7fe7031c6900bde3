"""Measures copies between two GPUs by push, pull and bulk copy engine, over SMs, threads, size and peer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moesim.kernels.calibrate.protocol import Facts, Grid, Parameter, Sample

BIG_BYTES = 256 << 20
CTAS = (1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 64, 132)
QUICK_CTAS = (1, 4, 8, 16, 24)
SIZES = tuple(1 << k for k in (16, 18, 20, 22, 24, 26, 28, 30))


def _grid(facts: Facts, quick: bool) -> Sequence[Mapping[str, Parameter]]:
    def task(
        variant: str, ctas: int, size: int = BIG_BYTES, threads: int = 1024, peer: int = 1
    ) -> dict[str, Parameter]:
        return {"variant": variant, "ctas": ctas, "threads": threads, "size_bytes": size, "peer": peer}

    variants = ("push", "pull") if quick else ("push", "pull", "bulk")
    tasks = [
        task(v, n, threads=0 if v == "bulk" else 1024)
        for v in variants
        for n in (QUICK_CTAS if quick else CTAS)
    ]
    tasks += [task("push", 16, size) for size in (SIZES[::2] if quick else SIZES)]
    if not quick:
        tasks += [task(v, n, threads=t) for v in ("push", "pull") for n in (1, 8) for t in (256, 512)]
        tasks += [task(v, 16, peer=p) for v in ("push", "pull") for p in range(2, facts.gpus)]
    return tasks


def _on_gpu(session: Any, p: Mapping[str, Any]) -> Sample:
    from moesim.kernels.copy import copy_bulk, copy_ldst, make_pairs

    size, peer = p["size_bytes"], p["peer"]
    group = session.group(peer + 1)
    here, there = (peer, 0) if p["variant"] == "pull" else (0, peer)

    def build() -> list[Any]:
        return [
            make_pairs(group, 0, [(session.random(here, size), session.random(there, size))])
            for _ in range(session.sets(size))
        ]

    pairs = session.keep(("copy", p["variant"] == "pull", size, peer), build)

    def work(i: int) -> None:
        if p["variant"] == "bulk":
            copy_bulk(group, 0, pairs[i % len(pairs)], p["ctas"])
        else:
            copy_ldst(group, 0, pairs[i % len(pairs)], p["ctas"], p["threads"])

    return Sample(session.time(peer + 1, work, on=[0]), {"bytes": float(size)})


MEASUREMENT = Grid(
    name="copy",
    title="copies between two GPUs",
    grid=_grid,
    on_gpu=_on_gpu,
    task_s=0.35,
    setup_s=2.0,
    min_gpus=2,
)
