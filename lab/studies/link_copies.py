"""Plain copies between GPUs, and bulk stores or loads alone: what engine and link allow, for link_pushes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from lab.studies.link_kernels import launch, packed
from moesim.kernels.copy import copy_bulk, make_pairs
from moesim.kernels.launch import GpuGroup, address

COPY_SMS = (1, 2, 4, 6, 7, 8, 9, 10, 12, 16, 20, 24, 32)
ENGINE_SMS = (1, 2, 4, 8, 12, 16, 20)
ENGINE_PTX = Path(__file__).with_name("link_engine.ptx")
Timer = Callable[..., None]
"""LinkStudy.time: (what, SMs, bytes, work, before, further keys of the row)."""


def copies(group: GpuGroup, time: Timer, n_bytes: int = 64 << 20) -> None:
    """Plain bulk copies between two GPUs: local, push and pull, one way and both ways at once."""
    rng = np.random.default_rng(1)
    noise = rng.integers(0, 256, n_bytes, dtype=np.uint8)
    source, target = group.to_ranks([noise] * group.ranks), group.symmetric((n_bytes,), "u1", 0xEE)
    for way in ("local", "push", "pull"):
        pairs = []
        for rank in range(group.ranks):
            peer = (rank + 1) % group.ranks
            ends = (source[peer if way == "pull" else rank], target[peer if way == "push" else rank])
            pairs.append(make_pairs(group, rank, [ends]))
        for used in ([0], list(range(group.ranks))):
            for sms in COPY_SMS:

                def work(i: int, n: int = sms, on: list[int] = used, p: Any = pairs) -> None:
                    for rank in on:
                        copy_bulk(group, rank, p[rank], n)

                align = (lambda i: group.barrier()) if len(used) > 1 else None
                time(f"copy {way}", sms, n_bytes, work, align, both=len(used) > 1, ranks=used)


def engine(group: GpuGroup, time: Timer) -> None:
    """Stores without loads and loads without stores, to the own memory, the next rank's, and both by turns.

    Bulk copies by one warp and by two; stores of 16 bytes by the threads of 16 warps.
    """
    areas, everyone = group.symmetric((96 << 20,), "u1", 0x5A), list(range(group.ranks))
    places = {"local": (0, 0), "peer": (1, 1), "both": (0, 1)}
    shapes = {"store": ((7168, 1), (14336, 1), (7168, 2), (14336, 2)), "threads": ((14336, 16),)}
    for where, (first, second) in places.items():
        for way, verb in enumerate(("store", "load", "threads")):
            if verb == "load" and where == "both":
                continue
            for (chunk, warps), used, sms in product(
                shapes.get(verb, shapes["store"]), ([0], everyone), ENGINE_SMS
            ):
                n_bytes = (64 << 20) // (chunk * sms * warps) * chunk * sms * warps
                at = [[address(areas[(r + shift) % group.ranks]) for r in used] for shift in (first, second)]
                targets = list(zip(used, *at, strict=True))
                both = len(used) > 1
                time(
                    f"engine {verb} {where}", sms, n_bytes,
                    partial(_run_engine, group, targets, sms, warps, (n_bytes, chunk, way)),
                    (lambda i: group.barrier()) if both else None,
                    chunk=chunk, warps=warps, both=both, ranks=used,
                )  # fmt: skip


def _run_engine(
    group: GpuGroup,
    targets: Sequence[tuple[int, int, int]],
    sms: int,
    warps: int,
    sizes: tuple[int, int, int],
    i: int,
) -> None:
    """Queue the kernel of link_engine.ptx on each rank, over its areas; sizes are bytes, chunk and way."""
    shared = 0 if sizes[2] == 2 else warps * 4 * (sizes[1] + 8)
    for rank, area, other in targets:
        arguments = packed("u64 a b c; u32 d e", (area, other, *sizes))
        launch(group, rank, ENGINE_PTX.read_text(), sms, 32 * warps, arguments, shared)
