"""GEMMs, attention and a copy from PyTorch as repeatable CUDA graphs over inputs larger than L2."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from moesim.kernels.calibrate.gpu_session import BEYOND_L2_BYTES
from moesim.kernels.calibrate.protocol import TaskFailed

GRAPH_S = 6e-3


@dataclass(slots=True)
class TorchWork:
    """A call `run(i)` on input set i of `sets`, with its FLOPs and the bytes that it must move."""

    run: Callable[[int], Any]
    sets: int
    flop: float = 0.0
    moved_bytes: float = 0.0


def torch() -> Any:
    """The torch module with a working GPU; raises TaskFailed where there is none."""
    import importlib

    module = importlib.import_module("torch")
    if not module.cuda.is_available():
        raise TaskFailed("torch is installed without a CUDA that works here")
    return module


def gemm(dtype: str, m: int, n: int, k: int, groups: int = 1) -> TorchWork:
    """A GEMM of [m, k] and [k, n] in "bf16" (cuBLAS) or "fp8" (row-wise scales, optionally grouped)."""
    t = torch()
    size = 1 if dtype == "fp8" else 2
    sets = _sets(size * (m * k + groups * n * k) + 2 * m * n)
    if dtype == "bf16":
        data = [(_normal(m, k), _normal(n, k).t()) for _ in range(sets)]
        run: Callable[[int], Any] = lambda i: t.mm(*data[i])  # noqa: E731
    elif groups == 1:
        scaled = [
            (
                _normal(m, k).to(t.float8_e4m3fn),
                _normal(n, k).to(t.float8_e4m3fn).t(),
                t.rand(m, 1, device="cuda"),
                t.rand(1, n, device="cuda"),
            )
            for _ in range(sets)
        ]
        run = lambda i: t._scaled_mm(*scaled[i], out_dtype=t.bfloat16, use_fast_accum=True)  # noqa: E731
    else:
        grouped = [
            (
                _normal(m, k).to(t.float8_e4m3fn),
                _normal(groups * n, k).to(t.float8_e4m3fn).view(groups, n, k).transpose(-2, -1),
                t.rand(m, device="cuda"),
                t.rand(groups, n, device="cuda"),
            )
            for _ in range(sets)
        ]
        ends = t.arange(1, groups + 1, device="cuda", dtype=t.int32) * (m // groups)
        run = lambda i: t._scaled_grouped_mm(  # noqa: E731
            *grouped[i], offs=ends, out_dtype=t.bfloat16, use_fast_accum=True
        )
    return TorchWork(run, sets, flop=2.0 * m * n * k)


def attention(heads: int, length: int, dqk: int, dv: int, *, backward: bool) -> TorchWork:
    """Causal attention of one sequence; its FLOPs count the causal half, with five GEMMs in backward."""
    t = torch()
    functional = t.nn.functional
    data = []
    for _ in range(2):
        q, k, v = (_normal(1, heads, length, d).requires_grad_(backward) for d in (dqk, dqk, dv))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True) if backward else None
        data.append((q, k, v, out, _normal(1, heads, length, dv)))

    def forward(i: int) -> Any:
        return functional.scaled_dot_product_attention(*data[i][:3], is_causal=True)

    def gradients(i: int) -> Any:
        q, k, v, out, grad = data[i]
        return t.autograd.grad(out, (q, k, v), grad, retain_graph=True)

    pairs = heads * length * length / 2
    gemm_sides = 3 * dqk + 2 * dv if backward else dqk + dv
    return TorchWork(gradients if backward else forward, 2, flop=2.0 * pairs * gemm_sides)


def memory_copy(size_bytes: int) -> TorchWork:
    """A copy inside the memory of one GPU."""
    t = torch()
    data = [
        tuple(t.randint(0, 255, (size_bytes,), device="cuda", dtype=t.uint8) for _ in range(2))
        for _ in range(2)
    ]
    return TorchWork(lambda i: data[i][1].copy_(data[i][0]), 2, moved_bytes=2.0 * size_bytes)


class Graphs:
    """CUDA graphs of one operator, on all SMs and with some left free, replayed in timed windows."""

    def __init__(self, device: int, build: Callable[[], TorchWork], left_free: tuple[int, ...] = ()) -> None:
        """Warm up and capture one graph on all SMs and one for each number of SMs in `left_free`."""
        t = torch()
        t.cuda.set_device(device)
        self.stream = t.cuda.Stream(device)
        self._marks = [t.cuda.Event(enable_timing=True) for _ in range(2)]
        self._counts = t.zeros(2, dtype=t.int64).pin_memory()
        with t.cuda.stream(self.stream):
            self.work = build()
            for i in range(self.work.sets):
                self.work.run(i)
            once_s = self._timed(lambda: [self.work.run(i) for i in range(self.work.sets)]) / self.work.sets
        self.calls = max(self.work.sets, min(400, round(GRAPH_S / once_s)))
        self._graphs = {n: self._capture(n) for n in dict.fromkeys((0, *left_free))}

    def replay(self, left_free: int = 0) -> None:
        """Queue one graph."""
        with torch().cuda.stream(self.stream):
            self._graphs[left_free].replay()

    def seconds(self, left_free: int = 0, at_least_s: float = GRAPH_S) -> float:
        """Seconds of one call, timed over graphs of at least `at_least_s` after two untimed graphs."""
        return self.window(left_free, at_least_s, None)[0]

    def window(self, left_free: int, at_least_s: float, counter: Any) -> tuple[float, float]:
        """(seconds of one call, growth of a device word in 1/s); `counter` is an int64 tensor or None."""
        t, graph = torch(), self._graphs[left_free]
        self._counts.zero_()

        def read(place: int) -> None:
            if counter is not None:
                self._counts[place : place + 1].copy_(counter, non_blocking=True)

        with t.cuda.stream(self.stream):
            once_s = self._timed(graph.replay)
            replays = max(1, math.ceil(at_least_s / once_s))
            graph.replay()
            read(0)
            elapsed_s = self._timed(lambda: [graph.replay() for _ in range(replays)], lambda: read(1))
        grown = int(self._counts[1] - self._counts[0])
        return elapsed_s / (replays * self.calls), grown / elapsed_s

    def _timed(self, queue: Callable[[], object], after: Callable[[], object] = lambda: None) -> float:
        self._marks[0].record()
        queue()
        self._marks[1].record()
        after()
        self.stream.synchronize()
        return float(self._marks[0].elapsed_time(self._marks[1]) * 1e-3)

    def _capture(self, left_free: int) -> Any:
        t = torch()
        with _carve_out(t, left_free):
            with t.cuda.stream(self.stream):
                self.work.run(0)
            self.stream.synchronize()
            graph = t.cuda.CUDAGraph()
            with t.cuda.graph(graph, stream=self.stream):
                for i in range(self.calls):
                    self.work.run(i % self.work.sets)
        with t.cuda.stream(self.stream):
            graph.replay()
        self.stream.synchronize()
        return graph


@contextmanager
def _carve_out(t: Any, sms: int) -> Iterator[None]:
    """Make PyTorch's scaled GEMMs leave `sms` SMs free; raises TaskFailed where this PyTorch cannot."""
    tell = getattr(t._C, "_set_sm_carveout_experimental", None)
    if sms and tell is None:
        raise TaskFailed("this PyTorch cannot leave SMs free (2.6 and later can)")
    if tell is not None:
        tell(sms or None)
    try:
        yield
    finally:
        if tell is not None:
            tell(None)


def _normal(*shape: int) -> Any:
    t = torch()
    return t.randn(shape, device="cuda", dtype=t.bfloat16)


def _sets(size_bytes: float) -> int:
    return max(2, math.ceil(BEYOND_L2_BYTES / size_bytes))
