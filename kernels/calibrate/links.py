"""Measures what moves between GPUs: barriers, copies, exchanges over one hop and two, collectives of NCCL."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct, field

from moesim.kernels.calibrate.protocol import (
    TIMED_GEMM,
    Facts,
    Grid,
    Parameter,
    Sample,
    TaskFailed,
    find_library,
)

IN_A_ROW = 20
"""Barriers timed together, because a single one is shorter than the resolution of CUDA events."""


def _barrier_grid(facts: Facts, quick: bool) -> Sequence[Mapping[str, Parameter]]:
    return [{"ranks": n} for n in sorted({facts.gpus, 2, 4, 8}, reverse=True) if n <= facts.gpus]


def _barrier_on_gpu(session: Any, p: Mapping[str, Any]) -> Sample:
    group = session.group(p["ranks"])

    def work(_: int) -> None:
        for _ in range(IN_A_ROW):
            group.barrier()

    return Sample(session.time(p["ranks"], work, each=IN_A_ROW))


BARRIER_MEASUREMENT = Grid(
    name="barrier",
    title="barriers between GPUs",
    grid=_barrier_grid,
    on_gpu=_barrier_on_gpu,
    task_s=0.3,
    min_gpus=2,
)


BIG_BYTES = 256 << 20
CTAS = (1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 64, 132)
QUICK_CTAS = (1, 4, 8, 16, 24)
COPY_SIZES = tuple(1 << k for k in (16, 18, 20, 22, 24, 26, 28, 30))


def _copy_grid(facts: Facts, quick: bool) -> Sequence[Mapping[str, Parameter]]:
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
    tasks += [task("push", 16, size) for size in (COPY_SIZES[::2] if quick else COPY_SIZES)]
    if not quick:
        tasks += [task(v, n, threads=t) for v in ("push", "pull") for n in (1, 8) for t in (256, 512)]
        tasks += [task(v, 16, peer=p) for v in ("push", "pull") for p in range(2, facts.gpus)]
    return tasks


def _copy_on_gpu(session: Any, p: Mapping[str, Any]) -> Sample:
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


COPY_MEASUREMENT = Grid(
    name="copy",
    title="copies between two GPUs",
    grid=_copy_grid,
    on_gpu=_copy_on_gpu,
    task_s=0.35,
    setup_s=2.0,
    min_gpus=2,
)


_INT8, _BF16 = 0, 9  # ncclDataType_t
_SUM = 0


class Communicator:
    """A communicator with one rank per device. Buffers are device addresses; sizes are in bytes."""

    def __init__(self, devices: Sequence[int]) -> None:
        """Start NCCL; raises TaskFailed where it does not start."""
        try:
            self._library = ctypes.CDLL(find_library(), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise TaskFailed(f"NCCL cannot be loaded: {error}") from None
        self.ranks = len(devices)
        self._comms = (ctypes.c_void_p * self.ranks)()
        self._call("ncclCommInitAll", self._comms, self.ranks, (ctypes.c_int * self.ranks)(*devices))

    @property
    def version(self) -> str:
        """The version of NCCL, such as "2.28.7"."""
        code = ctypes.c_int()
        self._call("ncclGetVersion", ctypes.byref(code))
        return f"{code.value // 10000}.{code.value % 10000 // 100}.{code.value % 100}"

    def run(
        self,
        operation: str,
        send: Sequence[int],
        receive: Sequence[int],
        size_bytes: int,
        streams: Sequence[int],
    ) -> None:
        """Queue one collective; one rank contributes `size_bytes` (for all_reduce its whole buffer)."""
        part = size_bytes // self.ranks // 2 * 2
        self._call("ncclGroupStart")
        for rank in range(self.ranks):
            a, b = ctypes.c_void_p(send[rank]), ctypes.c_void_p(receive[rank])
            tail = (self._comm(rank), ctypes.c_void_p(streams[rank]))
            if operation == "all_reduce":
                self._call("ncclAllReduce", a, b, ctypes.c_size_t(size_bytes // 2), _BF16, _SUM, *tail)
            elif operation == "all_gather":
                self._call("ncclAllGather", a, b, ctypes.c_size_t(size_bytes // 2), _BF16, *tail)
            elif operation == "reduce_scatter":
                self._call("ncclReduceScatter", a, b, ctypes.c_size_t(part // 2), _BF16, _SUM, *tail)
            else:
                for peer in range(self.ranks):
                    there = ctypes.c_void_p(send[rank] + peer * part)
                    back = ctypes.c_void_p(receive[rank] + peer * part)
                    self._call("ncclSend", there, ctypes.c_size_t(part), _INT8, peer, *tail)
                    self._call("ncclRecv", back, ctypes.c_size_t(part), _INT8, peer, *tail)
        self._call("ncclGroupEnd")

    def close(self) -> None:
        """Destroy the communicator."""
        for rank in range(self.ranks):
            self._call("ncclCommDestroy", self._comm(rank))

    def _comm(self, rank: int) -> Any:
        return ctypes.c_void_p(self._comms[rank])

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            say = self._library.ncclGetErrorString
            say.restype = ctypes.c_char_p
            raise TaskFailed(f"{name}: {say(code).decode()}")


HIDDEN, TOP_K, EXPERTS = 7168, 8, 256
TOKENS = 4096
"""Tokens per rank of the reference point, at which the profile's rate against SMs is taken."""
ALL_TO_ALL_SMS = (1, 2, 4, 6, 8, 12, 16, 20, 24, 32)
ALL_TO_ALL_QUICK_SMS = (2, 4, 8, 16, 20, 24)
OTHER_TOKENS = (128, 512, 1024, 2048, 8192)
ALL_TO_ALL_OPERATIONS = ("dispatch_fp8", "combine", "dispatch_bf16")


def _all_to_all_grid(facts: Facts, quick: bool) -> Sequence[Mapping[str, Parameter]]:
    def task(operation: str, tokens: int, sms: int) -> dict[str, Parameter]:
        return {"operation": operation, "tokens": tokens, "sms": sms, "ranks": facts.gpus}

    operations = ALL_TO_ALL_OPERATIONS[:2] if quick else ALL_TO_ALL_OPERATIONS
    tasks = [
        task(o, TOKENS, n) for o in operations for n in (ALL_TO_ALL_QUICK_SMS if quick else ALL_TO_ALL_SMS)
    ]
    others = (512, 1024) if quick else OTHER_TOKENS
    tasks += [task(o, t, n) for t in others for o in operations for n in ((8, 20) if quick else (4, 8, 20))]
    tasks += [task("push", TOKENS, n) for n in ((8, 20) if quick else ALL_TO_ALL_SMS[4:])]
    return tasks


def _all_to_all_on_gpu(session: Any, p: Mapping[str, Any]) -> Sample:
    if p["operation"] == "push":
        return _push(session, p)
    fp8 = p["operation"] == "dispatch_fp8"
    ep, received_bytes = session.keep(
        ("ep", p["tokens"], p["ranks"], fp8),
        lambda: _all_to_all_set_up(session, p["tokens"], p["ranks"], fp8),
    )
    if p["operation"] == "combine":
        times = session.time(p["ranks"], lambda i: ep.combine(p["sms"]), before=lambda i: ep.group.barrier())
    else:
        times = session.time(p["ranks"], lambda i: ep.dispatch(p["sms"]), before=lambda i: ep.notify())
    return Sample(times, {"bytes": received_bytes, "crossing": 1.0 - 1.0 / p["ranks"]})


def _all_to_all_set_up(session: Any, tokens: int, ranks: int, fp8: bool) -> tuple[Any, float]:
    """(buffers after one dispatch of random data with random balanced routing, mean bytes received).

    Received bytes count every row once with its scales, rows from the own rank included.
    """
    from moesim.kernels.expert_parallel import ExpertParallel, Shape

    shape = Shape(tokens, HIDDEN, TOP_K, EXPERTS // ranks * ranks, fp8)
    ep = ExpertParallel(session.group(ranks), shape)
    _fill(session, ep, ep.topk_w, ep.weights)
    ep.layout()
    ep.notify()
    ep.dispatch(20)
    rows = sum(sum(row) for row in ep.copies()) / ranks
    return ep, rows * (shape.row_bytes + shape.scale_bytes)


def _fill(session: Any, ep: Any, *factors: Any) -> None:
    """Random balanced routing and `factors` (0 to 1), and rows that read as BF16 between 1e-9 and 2."""
    from moesim.kernels.launch import cupy

    cp, rng, s = cupy(), np.random.default_rng(20261120), ep.shape
    for rank in range(ep.group.ranks):
        chosen = rng.random((s.tokens, s.experts)).argpartition(-TOP_K, axis=1)[:, -TOP_K:]
        with cp.cuda.Device(session.devices[rank]):
            ep.topk_idx[rank].set(np.ascontiguousarray(chosen, dtype=np.int32))
            for arrays in factors:
                arrays[rank].set(rng.random(arrays[rank].shape, dtype=np.float32))
            for rows in (ep.x[rank], ep.results[rank]):
                words = rows.reshape(-1).view(cp.uint16)
                words[...] = cp.random.randint(0x3000, 0x4000, size=words.size, dtype=cp.uint16)
                cp.cuda.Device().synchronize()
    ep.group.synchronize()


def _push(session: Any, p: Mapping[str, Any]) -> Sample:
    """Time every rank copying to all its peers at once: the bytes of an FP8 dispatch without its logic."""
    from moesim.kernels.copy import copy_ldst, make_pairs

    ranks = p["ranks"]
    group = session.group(ranks)
    distinct = ranks * (1.0 - (1.0 - 1.0 / ranks) ** TOP_K)
    each = int(p["tokens"] * distinct / ranks * (HIDDEN + HIDDEN // 32)) // 16 * 16

    def build() -> list[Any]:
        targets = [[session.random(r, each) for _ in range(ranks)] for r in range(ranks)]
        return [
            make_pairs(
                group,
                rank,
                [(session.random(rank, each), targets[peer][rank]) for peer in range(ranks) if peer != rank],
            )
            for rank in range(ranks)
        ]

    pairs = session.keep(("push", p["tokens"], ranks), build)

    def work(i: int) -> None:
        for rank in range(ranks):
            copy_ldst(group, rank, pairs[rank], p["sms"])

    times = session.time(ranks, work, before=lambda i: group.barrier())
    return Sample(times, {"bytes": float(each * (ranks - 1)), "crossing": 1.0})


ALL_TO_ALL_MEASUREMENT = Grid(
    name="all_to_all",
    title="expert-parallel dispatch and combine",
    grid=_all_to_all_grid,
    on_gpu=_all_to_all_on_gpu,
    task_s=0.4,
    setup_s=15.0,
    min_gpus=2,
)


TWO_HOP_SMS = (2, 4, 8, 12, 16, 20, 24, 32)
TWO_HOP_QUICK_SMS = (4, 8, 16, 20, 24)
TWO_HOP_OPERATIONS = ("dispatch_2hop", "combine_2hop")


def _two_hop_grid(facts: Facts, quick: bool) -> Sequence[Mapping[str, Parameter]]:
    node_size = facts.gpus // 2 if facts.gpus % 2 == 0 else 1
    return [
        {"operation": o, "tokens": TOKENS, "sms": n, "ranks": facts.gpus, "node_size": node_size}
        for o in TWO_HOP_OPERATIONS
        for n in (TWO_HOP_QUICK_SMS if quick else TWO_HOP_SMS)
    ]


def _two_hop_on_gpu(session: Any, p: Mapping[str, Any]) -> Sample:
    hops, forwarded, received = session.keep(
        ("2hop", p["tokens"], p["ranks"]),
        lambda: _two_hop_set_up(session, p["tokens"], p["ranks"], p["node_size"]),
    )
    if p["operation"] == "combine_2hop":
        times = session.time(
            p["ranks"], lambda i: hops.combine(p["sms"]), before=lambda i: hops.group.barrier()
        )
        row = 2 * HIDDEN
    else:
        times = session.time(p["ranks"], lambda i: hops.dispatch(p["sms"]), before=lambda i: hops.notify())
        row = hops.shape.row_bytes + hops.shape.scale_bytes
    return Sample(times, {"bytes": forwarded * row, "rail_bytes": received * row})


def _two_hop_set_up(session: Any, tokens: int, ranks: int, node_size: int) -> tuple[Any, float, float]:
    """(buffers after one dispatch, mean rows that a relay forwards, mean rows that it takes from the rail).

    The rows are FP8 with random data and routing. A relay forwards rows to the GPUs of its node, itself
    included; the combine reduces as many.
    """
    from moesim.kernels.expert_parallel import Shape, TwoHop

    shape = Shape(tokens, HIDDEN, TOP_K, EXPERTS // ranks * ranks, fp8=True)
    hops = TwoHop(session.group(ranks), shape, node_size)
    _fill(session, hops.ep, hops.ep.weights)
    hops.layout()
    hops.notify()
    hops.dispatch(20)
    moved = hops.forwarded()
    return hops, float(np.mean([a for a, _ in moved])), float(np.mean([b for _, b in moved]))


TWO_HOP_MEASUREMENT = Grid(
    name="two_hop",
    title="dispatch and combine over virtual nodes",
    grid=_two_hop_grid,
    on_gpu=_two_hop_on_gpu,
    task_s=0.4,
    setup_s=8.0,
    min_gpus=2,
)


NCCL_OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
NCCL_SIZES = tuple(1 << k for k in (28, 26, 24, 22, 20, 16))
"""Message sizes in bytes that one rank contributes."""
COMPUTE_S = 0.04
"""Seconds of GEMMs queued on every GPU before a collective that overlaps them."""


class _Ring(Struct):
    """A communicator with its buffers, and graphs of GEMMs where these overlap the collectives."""

    comm: Any
    send: list[int] = field(default_factory=list)
    receive: list[int] = field(default_factory=list)
    arrays: list[Any] = field(default_factory=list)
    graphs: list[Any] = field(default_factory=list)

    def close(self) -> None:
        """Destroy the communicator before its buffers are freed."""
        self.comm.close()


def _nccl_grid(facts: Facts, quick: bool) -> Sequence[Mapping[str, Parameter]]:
    def task(operation: str, size: int, ranks: int, beside: str = "none") -> dict[str, Parameter]:
        return {"operation": operation, "size_bytes": size, "ranks": ranks, "beside": beside}

    most = facts.gpus
    operations = NCCL_OPERATIONS[:2] if quick else NCCL_OPERATIONS
    tasks = [task(o, size, most) for o in operations for size in (NCCL_SIZES[::2] if quick else NCCL_SIZES)]
    if "torch" in facts.libraries and not quick:
        tasks += [task(o, size, most, "gemm") for o in NCCL_OPERATIONS[:2] for size in NCCL_SIZES[:2]]
    if "torch" in facts.libraries:
        tasks += [task(o, NCCL_SIZES[0], most, TIMED_GEMM) for o in NCCL_OPERATIONS[:2]]
    fewer = [n for n in (2, 4) if n < most]
    if not quick:
        tasks += [task("all_gather", size, n) for n in fewer for size in NCCL_SIZES[:4:2]]
    return tasks


def _nccl_on_gpu(session: Any, p: Mapping[str, Any]) -> Sample:
    ranks, size = p["ranks"], p["size_bytes"]
    group = session.group(ranks)
    ring = session.keep(("nccl", ranks, p["beside"]), lambda: _nccl_set_up(session, ranks, p["beside"]))
    streams = [stream.ptr for stream in group.streams]

    def work(_: int) -> None:
        ring.comm.run(p["operation"], ring.send, ring.receive, size, streams)

    values = {"bytes": float(size)}
    if not ring.graphs:
        return Sample(session.time(ranks, work, before=lambda i: group.barrier()), values)
    if p["beside"] == TIMED_GEMM:
        return _lost(session, group, work, ring.graphs, values)
    return Sample(_beside(session, group, work, ring.graphs), values)


def _lost(session: Any, group: Any, work: Any, graphs: list[Any], values: dict[str, float]) -> Sample:
    """Seconds of GEMMs on the slowest GPU while collectives run, and the share of time that they lose.

    A window counts only if collectives ran from its begin past its end on every GPU.
    """
    from moesim.kernels.calibrate.compute import torch

    t = torch()
    pairs = zip(group.streams, group.devices, strict=True)
    streams = [t.cuda.ExternalStream(stream.ptr, device=device) for stream, device in pairs]

    def marks() -> list[Any]:
        return [t.cuda.Event(enable_timing=True) for _ in graphs]

    def window(collectives: int) -> list[float]:
        running, begin, end, finished = marks(), marks(), marks(), marks()
        group.barrier()
        for repeat in range(collectives):
            work(repeat)
            if repeat == 0:
                for mark, stream in zip(running, streams, strict=True):
                    mark.record(stream)
        for mark, stream in zip(finished, streams, strict=True):
            mark.record(stream)
        for i, graph in enumerate(graphs):
            if collectives:
                graph.stream.wait_event(running[i])
            begin[i].record(graph.stream)
            graph.replay()
            graph.replay()
            end[i].record(graph.stream)
        group.synchronize()
        for graph in graphs:
            graph.stream.synchronize()
        if collectives and any(a.elapsed_time(b) < 0.0 for a, b in zip(end, finished, strict=True)):
            return []
        return [a.elapsed_time(b) * 1e-3 for a, b in zip(begin, end, strict=True)]

    window(0), window(2)
    once_s = max(session.time(len(graphs), work, before=lambda i: group.barrier()))
    times, lost = [], []
    for _ in range(session.repeats):
        alone = window(0)
        beside = window(3 + round(3.0 * max(alone) / once_s))
        if beside:
            times.append(max(beside))
            lost.append(statistics.fmean(1.0 - a / b for a, b in zip(alone, beside, strict=True)))
    if not lost:
        raise TaskFailed("the collectives beside the GEMMs ended inside every window")
    return Sample(
        tuple(times), {**values, "lost": statistics.median(lost), "low": min(lost), "high": max(lost)}
    )


def _beside(session: Any, group: Any, work: Any, graphs: list[Any]) -> tuple[float, ...]:
    """Seconds of each collective while every GPU runs GEMMs that began before it."""
    from moesim.kernels.launch import cupy

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


def _nccl_set_up(session: Any, ranks: int, beside: str) -> _Ring:
    from moesim.kernels.launch import cupy

    cp = cupy()
    ring = _Ring(Communicator(session.devices[:ranks]))
    for device in session.devices[:ranks]:
        with cp.cuda.Device(device):
            words = cp.random.randint(0x3000, 0x4000, size=NCCL_SIZES[0] // 2, dtype=cp.uint16)
            out = cp.empty(NCCL_SIZES[0] * ranks, dtype=cp.uint8)
            cp.cuda.Device().synchronize()
        ring.arrays += [words, out]
        ring.send.append(int(words.data.ptr))
        ring.receive.append(int(out.data.ptr))
    if beside in ("gemm", TIMED_GEMM):
        from moesim.kernels.calibrate.compute import Graphs, gemm

        devices = session.devices[:ranks]
        ring.graphs = [Graphs(d, lambda: gemm("bf16", 4096, 4096, 7168)) for d in devices]
    return ring


def settings() -> str:
    """The set NCCL environment variables that change its behaviour, as text for an entry's conditions."""
    names = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE", "NCCL_MAX_CTAS", "NCCL_MIN_CTAS")
    return ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)


NCCL_MEASUREMENT = Grid(
    name="nccl",
    title="NCCL collectives",
    grid=_nccl_grid,
    on_gpu=_nccl_on_gpu,
    task_s=0.4,
    setup_s=10.0,
    min_gpus=2,
    libraries=("cupy", "nccl"),
)
