"""Kernels given as PTX text, with or without clock marks, and their buffers: what link_pushes measures."""

from __future__ import annotations

import re
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from moesim.kernels.calibrate.links import EXPERTS, HIDDEN, TOP_K
from moesim.kernels.catalog import KERNELS, SHARED_MEMORY_LIMIT_BYTES
from moesim.kernels.expert_parallel import (
    CombineRing,
    DispatchTuning,
    ExpertParallel,
    Shape,
)
from tests.kernels.kernel_references import bf16_rows, routing
from moesim.kernels.launch import GpuGroup, address
from moesim.kernels.launch import cupy

STAMP_WORDS = 16
"""64-bit words that a CTA's marks take, behind the first 64 bytes of the status block."""
MARKS = {
    "dispatch": {
        "start": ("    setp.ne.u32         %p, %warp, 0;\n    @%p bra             SENDER;\n", 0, "before"),
        "loaded": ("LOADER_END:\n", 0, "after"),
        "sent": ("DRAIN:\n", 32, "after"),
        "written": ("    fence.proxy.async.global;\n\n", 32, "after"),
        "joined": ("    barrier.cta.sync    0;\n    setp.ge.u32         %p, %thread, %ranks;", 0, "before"),
        "released": ("    setp.ne.u32         %p, %cta, 0;\n    @%p bra             DONE;\n\n", 0, "before"),
        "end": ("    ret;\n}", 0, "before"),
        "end_of_lane_1": ("    ret;\n}", 1, "before"),
    },
    "combine": {
        "start": ("    mov.u32             %item, %cta;\n", 0, "before"),
        "ready": ("READY:\n", 0, "after"),
        "loaded": ("    ret;\n}", 0, "before"),
        "reduced": ("    ret;\n}", 32, "before"),
    },
}
"""Marks by kernel: where (text), by which thread of the CTA, on which side of the text."""


@lru_cache(maxsize=64)
def _function(source: str, device: int) -> Any:
    """The only entry of a PTX text, on one device, with the largest shared memory."""
    name = re.findall(r"^\.visible \.entry (\w+)\(", source, re.MULTILINE)[0]
    folder = Path(tempfile.mkdtemp(prefix="moesim-study-"))
    (folder / f"{name}.ptx").write_text(source)
    with cupy().cuda.Device(device):
        function = cupy().RawModule(path=str(folder / f"{name}.ptx")).get_function(name)
        function.max_dynamic_shared_size_bytes = SHARED_MEMORY_LIMIT_BYTES
    return function


def launch(
    group: GpuGroup, rank: int, source: str, grid: int, block: int, arguments: tuple[Any, ...], shared: int
) -> None:
    """Queue a kernel of a PTX text on a rank's stream."""
    function = _function(source, group.devices[rank])
    with cupy().cuda.Device(group.devices[rank]), group.streams[rank]:
        function((grid,), (block,), arguments, shared_mem=shared)


def packed(text: str, values: tuple[int, ...]) -> tuple[Any, ...]:
    """Values as the types of "u64 a b; u32 c" in this order."""
    kinds = [kind for part in text.split(";") for kind, *names in [part.split()] for _ in names]
    types = {"u32": np.uint32, "u64": np.uint64}
    return tuple(types[kind](value) for kind, value in zip(kinds, values, strict=True))


def stamped(name: str, source: str) -> str:
    """The kernel's text with a clock mark at every place of MARKS[name] that it has, and the SM's number."""
    for slot, (mark, (text, thread, side)) in enumerate(MARKS[name].items()):
        if text not in source:
            raise ValueError(f"{name}: the place of mark {mark!r} is gone")
        code = _mark(8 * slot, thread, "mov.u64 %zv, %globaltimer;")
        if mark == "start":
            code += _mark(8 * (STAMP_WORDS - 1), thread, "mov.u32 %zc, %smid; cvt.u64.u32 %zv, %zc;")
        source = source.replace(text, code + text if side == "before" else text + code, 1)
    return source


def _mark(offset: int, thread: int, value: str) -> str:
    return (
        "{ .reg .pred %zp; .reg .b32 %zc; .reg .b64 %zv, %za;\n"
        f"    setp.eq.u32 %zp, %thread, {thread}; mov.u32 %zc, %ctaid.x; mad.wide.u32 %za, %zc, "
        f"{8 * STAMP_WORDS}, %status; {value}\n    @%zp st.global.u64 [%za + {64 + offset}], %zv; }}\n"
    )


def set_up(group: GpuGroup, fp8: bool) -> tuple[ExpertParallel, int]:
    """Make random rows, routing and results, dispatch once, and count the rows over the busiest link."""
    ep = ExpertParallel(group, Shape(4096, HIDDEN, TOP_K, EXPERTS, fp8))
    s, cp = ep.shape, cupy()
    for rank in range(group.ranks):
        rng = np.random.default_rng(7 + rank)
        block = bf16_rows(512, s.hidden, rng)
        with cp.cuda.Device(group.devices[rank]), group.streams[rank]:
            ep.topk_idx[rank].set(routing("balanced", s.tokens, s.k, s.experts, group.ranks, rng))
            ep.topk_w[rank].set(rng.random((s.tokens, s.k), dtype=np.float32))
            ep.weights[rank].set(rng.random((s.tokens, group.ranks), dtype=np.float32))
            ep.x[rank].set(rng.integers(0, 256, ep.x[rank].shape, dtype=np.uint8))
            for first in range(0, ep.capacity, 512):
                ep.results[rank][first : first + 512].set(block)
        group.streams[rank].synchronize()
    ep.layout()
    remote = np.array(ep.copies())
    np.fill_diagonal(remote, 0)
    ep.notify()
    ep.dispatch(8)
    group.synchronize()
    return ep, int(max(remote.sum(axis=0).max(), remote.sum(axis=1).max()))


class OwnRowsCopy:
    """Copies all rows of each rank to the front of its receive buffer on a stream beside the rank's own.

    Not the places where dispatch puts them: the same bytes, in one piece, by the copy engine.
    """

    def __init__(self, group: GpuGroup, ep: ExpertParallel) -> None:
        """Make a stream and two events a rank."""
        self.group, self.ep, self.parts = group, ep, []
        for device in group.devices:
            with cupy().cuda.Device(device):
                events = [cupy().cuda.Event(disable_timing=True) for _ in range(2)]
                self.parts.append((cupy().cuda.Stream(non_blocking=True), *events))

    def start(self) -> None:
        """Queue the copies behind what the ranks' streams have now."""
        pairs = ((self.ep.x, self.ep.recv_x), (self.ep.side, self.ep.recv_side))
        for rank, (stream, begin, end) in enumerate(self.parts):
            with cupy().cuda.Device(self.group.devices[rank]):
                begin.record(self.group.streams[rank])
                stream.wait_event(begin)
                for source, target in pairs:
                    target[rank].data.copy_from_device_async(source[rank].data, source[rank].nbytes, stream)
                end.record(stream)

    def join(self) -> None:
        """Let the ranks' streams wait for the copies."""
        for rank, (_, _, end) in enumerate(self.parts):
            with cupy().cuda.Device(self.group.devices[rank]):
                self.group.streams[rank].wait_event(end)


def dispatch_by(
    group: GpuGroup,
    ep: ExpertParallel,
    source: str,
    sms: int,
    tuning: DispatchTuning,
    status: list[Any],
    own: bool = True,
) -> None:
    """Queue a dispatch given as text, with today's parameters or those of dispatch_sys_v3, on every rank."""
    s, old = ep.shape, "dispatch_sys_v3" in source
    expected = ep.next_arrivals(sms)
    shared = KERNELS["dispatch"].shared_bytes(s.dispatch_sizes(tuning, group.ranks))
    if old:  # two addresses and two mbarriers a stage
        shared = tuning.stages * (s.row_bytes + s.side_bytes + 32)
    for rank in range(group.ranks):
        where = [ep.lists, ep.rank_counts] if old else [ep.slots]
        arrays = [ep.x, ep.side, *where, ep.bases, ep.dispatch_table, ep.claims]
        values = (
            *(address(a[rank]) for a in arrays), s.tokens, group.ranks, rank, s.row_bytes, s.side_bytes,
            *(() if old else (int(own), tuning.group)), tuning.stages, tuning.depth, expected,
            group.timeout_ns, address(status[rank]),
        )  # fmt: skip
        text = f"u64 {'a ' * len(arrays)}; u32 {'a ' * (8 if old else 10)}; u64 t s"
        launch(group, rank, source, sms, 32 * (1 + tuning.warps), packed(text, values), shared)


def combine_by(
    group: GpuGroup, ep: ExpertParallel, source: str, sms: int, ring: CombineRing, status: list[Any]
) -> None:
    """Queue a weighted combine given as text; that of combine_sys_v1 has one ring and 480 threads."""
    old = "combine_sys_v1" in source
    epoch = ep.next_combine()
    for rank in range(group.ranks):
        arrays = (ep.combine_table, ep.slots, ep.bases, ep.weights, ep.out)
        values = (
            *(address(a[rank]) for a in arrays), ep.shape.tokens, group.ranks, rank, ring.part_bytes,
            ring.parts, ring.stages, epoch, group.timeout_ns, address(status[rank]),
        )  # fmt: skip
        block = 480 if old else 256 * ring.teams
        arguments = packed("u64 a b c d e; u32 a b c d e f g; u64 t s", values)
        launch(group, rank, source, sms, block, arguments, ring.shared_bytes)
