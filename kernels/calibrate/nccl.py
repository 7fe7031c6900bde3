"""Measures NCCL collectives inside a node by size and ranks, alone and overlapped with GEMMs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moesim.kernels.calibrate.protocol import Facts, Grid, Parameter, Sample

OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
SIZES = tuple(1 << k for k in (28, 26, 24, 22, 20, 16))
"""Message sizes in bytes that one rank contributes."""
COMPUTE_S = 0.04
"""Seconds of GEMMs queued on every GPU before a collective that overlaps them."""


@dataclass(slots=True)
class _Ring:
    """A communicator with its buffers, and graphs of GEMMs where these overlap the collectives."""

    comm: Any
    send: list[int] = field(default_factory=list)
    receive: list[int] = field(default_factory=list)
    arrays: list[Any] = field(default_factory=list)
    graphs: list[Any] = field(default_factory=list)

    def close(self) -> None:
        """Destroy the communicator before its buffers are freed."""
        self.comm.close()


def _grid(facts: Facts, quick: bool) -> Sequence[Mapping[str, Parameter]]:
    def task(operation: str, size: int, ranks: int, beside: str = "none") -> dict[str, Parameter]:
        return {"operation": operation, "size_bytes": size, "ranks": ranks, "beside": beside}

    most = facts.gpus
    operations = OPERATIONS[:2] if quick else OPERATIONS
    tasks = [task(o, size, most) for o in operations for size in (SIZES[::2] if quick else SIZES)]
    if "torch" in facts.libraries and not quick:
        tasks += [task(o, size, most, "gemm") for o in OPERATIONS[:2] for size in SIZES[:2]]
    fewer = [n for n in (2, 4) if n < most]
    if not quick:
        tasks += [task("all_gather", size, n) for n in fewer for size in SIZES[:4:2]]
    return tasks


def _on_gpu(session: Any, p: Mapping[str, Any]) -> Sample:
    ranks, size = p["ranks"], p["size_bytes"]
    group = session.group(ranks)
    ring = session.keep(("nccl", ranks, p["beside"]), lambda: _set_up(session, ranks, p["beside"]))
    streams = [stream.ptr for stream in group.streams]

    def work(_: int) -> None:
        ring.comm.run(p["operation"], ring.send, ring.receive, size, streams)

    values = {"bytes": float(size)}
    if not ring.graphs:
        return Sample(session.time(ranks, work, before=lambda i: group.barrier()), values)
    return Sample(_beside(session, group, work, ring.graphs), values)


def _beside(session: Any, group: Any, work: Any, graphs: list[Any]) -> tuple[float, ...]:
    """Seconds of each collective while every GPU runs GEMMs that began before it."""
    from moesim.kernels.loader import cupy

    cp, times = cupy(), []
    for repeat in range(session.repeats + 1):
        for graph in graphs:
            for _ in range(max(1, round(COMPUTE_S / 6e-3))):
                graph.replay()
        group.barrier()
        marks = []
        for when in range(2):
            if when:
                work(repeat)
            for device, stream in zip(group.devices, group.streams, strict=True):
                with cp.cuda.Device(device):
                    event = cp.cuda.Event()
                    event.record(stream)
                    marks.append(event)
        group.synchronize()
        for graph in graphs:
            graph.stream.synchronize()
        n = len(group.devices)
        times.append(max(cp.cuda.get_elapsed_time(marks[r], marks[n + r]) * 1e-3 for r in range(n)))
    return tuple(times[1:])


def _set_up(session: Any, ranks: int, beside: str) -> _Ring:
    from moesim.kernels.calibrate.nccl_library import Communicator
    from moesim.kernels.loader import cupy

    cp = cupy()
    ring = _Ring(Communicator(session.devices[:ranks]))
    for device in session.devices[:ranks]:
        with cp.cuda.Device(device):
            words = cp.random.randint(0x3000, 0x4000, size=SIZES[0] // 2, dtype=cp.uint16)
            out = cp.empty(SIZES[0] * ranks, dtype=cp.uint8)
            cp.cuda.Device().synchronize()
        ring.arrays += [words, out]
        ring.send.append(int(words.data.ptr))
        ring.receive.append(int(out.data.ptr))
    if beside == "gemm":
        from moesim.kernels.calibrate.torch_graphs import Graphs, gemm

        devices = session.devices[:ranks]
        ring.graphs = [Graphs(d, lambda: gemm("bf16", 4096, 4096, 7168)) for d in devices]
    return ring


def settings() -> str:
    """The set NCCL environment variables that change its behaviour, as text for an entry's conditions."""
    names = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE", "NCCL_MAX_CTAS", "NCCL_MIN_CTAS")
    return ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)


MEASUREMENT = Grid(
    name="nccl",
    title="NCCL collectives",
    grid=_grid,
    on_gpu=_on_gpu,
    task_s=0.4,
    setup_s=10.0,
    min_gpus=2,
    libraries=("cupy", "nccl"),
)
