"""Launches .ptx and .cubin kernels and the persistent copy to a peer, and times windows of CUDA graphs."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # no false waits between streams

import cupy
import numpy as np
import torch

from lab.studies.operators import TimedOperator

COPY_PTX = Path(__file__).parents[2] / "kernels" / "ptx" / "copy.ptx"
CHUNK_BYTES = 1 << 20


def cv(values: list[float]) -> float:
    """Standard deviation over mean; 0 for fewer than two values or a zero mean."""
    mean = statistics.fmean(values)
    return statistics.stdev(values) / mean if len(values) > 1 and mean else 0.0


class Kernels:
    """The kernels of a .cubin or .ptx file, launched on the current torch stream."""

    def __init__(self, path: str) -> None:
        """Record the path; each GPU loads the file at the first launch."""
        self.module = cupy.RawModule(path=path)

    def __call__(self, name: str, grid: tuple[int, ...], block: tuple[int, ...], *arguments: Any) -> None:
        """Launch a kernel; tensors become pointers, ints 64-bit, and numpy scalars keep their width."""
        plain = tuple(
            np.uint64(a.data_ptr()) if isinstance(a, torch.Tensor) else np.int64(a) if type(a) is int else a
            for a in arguments
        )
        stream = torch.cuda.current_stream()
        with cupy.cuda.Device(stream.device_index), cupy.cuda.ExternalStream(stream.cuda_stream):
            self.module.get_function(name)(grid, block, plain)


class Copy:
    """The persistent push copy from one GPU to another."""

    def __init__(self, source: int, target: int, size_bytes: int = 1 << 30) -> None:
        """Allocate a random source, a poisoned target, and the streams for launches and control words."""
        self.chunks = size_bytes // CHUNK_BYTES
        self.kernels = {"pairs": Kernels(str(COPY_PTX)), "singles": Kernels(without_clusters(COPY_PTX))}
        self.places: dict[str, list[int]] = {}
        """The SMs that the last launch of each placement and size occupied."""
        with cupy.cuda.Device(source):
            try:
                cupy.cuda.runtime.deviceEnablePeerAccess(target)
            except cupy.cuda.runtime.CUDARuntimeError as error:
                if "AlreadyEnabled" not in str(error):
                    raise
        self.src = torch.randint(-(2**62), 2**62, (size_bytes // 8,), device=f"cuda:{source}")
        self.dst = torch.full((size_bytes // 8,), -1, device=f"cuda:{target}")
        self.control = torch.zeros(8 + 256, dtype=torch.int64, device=f"cuda:{source}")
        self.host = torch.zeros(8 + 256, dtype=torch.int64).pin_memory()
        self.stop_word = torch.ones(1, dtype=torch.int64).pin_memory()
        self.stream, self.aside = torch.cuda.Stream(source), torch.cuda.Stream(source)
        for device in (source, target):
            torch.cuda.synchronize(device)

    def read(self) -> torch.Tensor:
        """Read the control words while the kernel runs."""
        with torch.cuda.stream(self.aside):
            self.host.copy_(self.control, non_blocking=True)
        self.aside.synchronize()
        return self.host

    def start(self, sms: int, placement: str = "pairs", limit_s: float = 2.0) -> None:
        """Launch on `sms` CTAs and wait until each has taken its SM and begun.

        `placement` is "pairs" (clusters of two CTAs) or "singles" (no clusters).
        """
        with torch.cuda.stream(self.aside):
            self.control.zero_()
        self.aside.synchronize()
        with torch.cuda.stream(self.stream):
            self.kernels[placement](
                "copy_sys_v1",
                (sms,),
                (1024,),
                self.src,
                self.dst,
                self.control,
                np.uint32(self.chunks),
                np.uint64(limit_s * 1e9),
            )
        until = time.monotonic() + 1.0
        while self.read()[1] < 2 * sms:
            if time.monotonic() > until:
                raise RuntimeError(f"copy on {sms} SMs did not start: {self.host[:3].tolist()}")
        places = [word - 1 for word in self.host[8 : 8 + sms].tolist()]
        if len(set(places)) != sms or -1 in places:
            raise RuntimeError(f"copy CTAs share SMs or are missing: {places}")
        self.places[f"{placement} {sms}"] = sorted(places)

    def stop(self) -> bool:
        """End the kernel; False if a CTA had reached its time limit (the window does not count)."""
        with torch.cuda.stream(self.aside):
            self.control[:1].copy_(self.stop_word, non_blocking=True)
        self.aside.synchronize()
        self.stream.synchronize()
        return int(self.read()[2]) == 0

    def verify(self, placement: str) -> float:
        """Fraction of a poisoned target that holds the source's words after each CTA made a whole pass."""
        self.dst.fill_(-1)
        torch.cuda.synchronize(self.dst.device)
        self.start(20, placement)
        while self.read()[1] < 4 * self.chunks:
            pass
        self.stop()
        return float((self.dst.to(self.src.device) == self.src).float().mean())


def without_clusters(ptx: Path) -> str:
    """Path of a copy of a PTX file without its cluster directives."""
    lines = ptx.read_text().splitlines(keepends=True)
    kept = [line for line in lines if not line.startswith((".explicitcluster", ".reqnctapercluster"))]
    path = Path(tempfile.mkdtemp()) / ptx.name
    path.write_text("".join(kept))
    return str(path)


class Bench:
    """Graphs of one operator on one GPU, and timed windows of them."""

    def __init__(
        self,
        operator: TimedOperator,
        left_free: tuple[int, ...],
        stream: torch.cuda.Stream,
        graph_ms: float = 6.0,
    ) -> None:
        """Warm up, and capture one graph on all SMs and one for each number of SMs `left_free`."""
        self.operator, self.stream = operator, stream
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.mark = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self.count = torch.zeros(2, dtype=torch.int64).pin_memory()
        with torch.cuda.stream(stream):
            for i in range(operator.sets):
                operator.run(i)
            self.mark[0].record()
            for i in range(operator.sets):
                operator.run(i)
            self.mark[1].record()
        stream.synchronize()
        once_ms = self.mark[0].elapsed_time(self.mark[1]) / operator.sets
        self.calls = max(operator.sets, min(400, round(graph_ms / once_ms)))
        for n in (0, *left_free):
            torch._C._set_sm_carveout_experimental(n or None)
            with torch.cuda.stream(stream):
                operator.run(0)
            stream.synchronize()
            self.graphs[n] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graphs[n], stream=stream):
                for i in range(self.calls):
                    operator.run(i % operator.sets)
            torch._C._set_sm_carveout_experimental(None)
            with torch.cuda.stream(stream):
                self.graphs[n].replay()
            stream.synchronize()

    def window(self, left_free: int, window_ms: float, copies: list[Copy]) -> tuple[float, float]:
        """(seconds per call, bytes/s that the first copy issued meanwhile, or 0 without a copy)."""
        graph, counter = self.graphs[left_free], copies[0].control[1:2] if copies else None
        self.count.zero_()
        with torch.cuda.stream(self.stream):
            self.mark[0].record()
            graph.replay()
            self.mark[1].record()
            self.stream.synchronize()
            replays = max(1, -int(-window_ms // self.mark[0].elapsed_time(self.mark[1])))
            graph.replay()
            if counter is not None:
                self.count[:1].copy_(counter, non_blocking=True)
            self.mark[0].record()
            for _ in range(replays):
                graph.replay()
            self.mark[1].record()
            if counter is not None:
                self.count[1:].copy_(counter, non_blocking=True)
        self.stream.synchronize()
        calls, elapsed_s = replays * self.calls, self.mark[0].elapsed_time(self.mark[1]) * 1e-3
        return elapsed_s / calls, int(self.count[1] - self.count[0]) * CHUNK_BYTES / elapsed_s
