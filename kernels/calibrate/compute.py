"""Measures what one GPU computes: core attention, GEMMs, memory, quantisation; as CUDA graphs of PyTorch."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from msgspec import Struct

from moesim.kernels.calibrate.protocol import BEYOND_L2_BYTES, Facts, Grid, Parameter, Sample, TaskFailed

GRAPH_S = 6e-3


class TorchWork(Struct):
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
    sets = max(2, math.ceil(BEYOND_L2_BYTES / (size * (m * k + groups * n * k) + 2 * m * n)))
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


HEADS, DQK, DV = 128, 192, 128


def _attention_grid(facts: Facts, quick: bool) -> Sequence[Mapping[str, Parameter]]:
    lengths = (4096,) if quick else (4096, 2048, 8192)
    return [
        {"direction": d, "heads": HEADS, "length": n, "dqk": DQK, "dv": DV}
        for n in lengths
        for d in ("forward", "backward")
    ]


def _attention_on_gpu(session: Any, p: Mapping[str, Any]) -> Sample:

    shape = (p["heads"], p["length"], p["dqk"], p["dv"])
    backward = p["direction"] == "backward"
    graphs = session.keep(
        ("attention", *shape, backward),
        lambda: Graphs(session.devices[0], lambda: attention(*shape, backward=backward)),
    )
    times = tuple(graphs.seconds() for _ in range(session.repeats))
    return Sample(times, {"flop": graphs.work.flop})


ATTENTION_MEASUREMENT = Grid(
    name="attention",
    title="core attention",
    grid=_attention_grid,
    on_gpu=_attention_on_gpu,
    task_s=1.5,
    setup_s=2.0,
    libraries=("cupy", "torch"),
)


BIG_BYTES = 1 << 30
SIZES = tuple(1 << k for k in (22, 24, 26, 28, 30))


def _hbm_grid(facts: Facts, quick: bool) -> Sequence[Mapping[str, Parameter]]:
    every = 2 * facts.sms
    tasks: list[dict[str, Parameter]] = [
        {"size_bytes": size, "ctas": every} for size in (SIZES[::-2] if quick else SIZES[::-1])
    ]
    few = (20, 132) if quick else (1, 4, 8, 16, 20, 32, 64, facts.sms)
    return tasks + [{"size_bytes": BIG_BYTES, "ctas": n} for n in few]


def _hbm_on_gpu(session: Any, p: Mapping[str, Any]) -> Sample:
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


HBM_MEASUREMENT = Grid(
    name="hbm",
    title="memory bandwidth",
    grid=_hbm_grid,
    on_gpu=_hbm_on_gpu,
    task_s=0.35,
)


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


def _gemm_grid(facts: Facts, quick: bool) -> Sequence[Mapping[str, Parameter]]:
    def task(dtype: str, shape: tuple[int, ...], kind: str = "product") -> dict[str, Parameter]:
        m, n, k, *groups = shape
        return {"kind": kind, "dtype": dtype, "m": m, "n": n, "k": k, "groups": groups[0] if groups else 1}

    shapes = SHAPES[:5] if quick else SHAPES
    tasks = [task(dtype, shape) for shape in shapes for dtype in ("bf16", "fp8")]
    tasks += [task("fp8", shape) for shape in (GROUPED[:1] if quick else GROUPED)]
    return [*tasks, task("bf16", (8192, 8192, 8192), "sustained")]


def _gemm_on_gpu(session: Any, p: Mapping[str, Any]) -> Sample:

    shape = (p["dtype"], p["m"], p["n"], p["k"], p["groups"])
    graphs = session.keep(("gemm", *shape), lambda: Graphs(session.devices[0], lambda: gemm(*shape)))
    if p["kind"] == "sustained":
        return _sustained(session, graphs)
    times = tuple(graphs.seconds() for _ in range(session.repeats))
    return Sample(times, {"flop": graphs.work.flop})


def _sustained(session: Any, graphs: Any) -> Sample:
    """Run GEMMs without a pause; read clock and power in the second half, when both have settled."""
    from moesim.kernels.launch import cupy
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


GEMM_MEASUREMENT = Grid(
    name="gemm",
    title="matrix products",
    grid=_gemm_grid,
    on_gpu=_gemm_on_gpu,
    task_s=1.0,
    setup_s=6.0,
    libraries=("cupy", "torch"),
)


COLUMNS = 7168
ROWS = 32768
"""Rows of the input, which is 470 MB of BF16 and eight times the L2 cache."""


def _quantise_grid(facts: Facts, quick: bool) -> Sequence[Mapping[str, Parameter]]:
    ctas = (4, 20, 4 * facts.sms) if quick else (1, 2, 4, 8, 16, 20, 24, 32, 64, facts.sms, 4 * facts.sms)
    tasks: list[dict[str, Parameter]] = [
        {"operation": o, "ctas": n, "rows": ROWS} for o in ("quantise", "dequantise") for n in ctas
    ]
    if not quick:
        tasks += [{"operation": "quantise", "ctas": 4 * facts.sms, "rows": rows} for rows in (1024, 4096)]
    return tasks


def _quantise_on_gpu(session: Any, p: Mapping[str, Any]) -> Sample:
    from moesim.kernels.catalog import KERNELS
    from moesim.kernels.copy import dequantize, quantize
    from moesim.kernels.launch import cupy

    cp, group, rows = cupy(), session.group(1), p["rows"]

    def build() -> list[tuple[Any, Any, Any]]:
        made = []
        for _ in range(session.sets(3 * rows * COLUMNS)):
            with cp.cuda.Device(session.devices[0]):
                x = cp.random.randint(0x3000, 0x4000, size=(rows, COLUMNS), dtype=cp.uint16)
                q = cp.empty((rows, COLUMNS), dtype=cp.uint8)
                scales = cp.empty((rows, COLUMNS // 128), dtype=cp.float32)
                cp.cuda.Device().synchronize()
            quantize(group, 0, x, q, scales, 132)
            made.append((x, q, scales))
        group.synchronize()
        return made

    data = session.keep(("quantise", rows), build)

    def work(i: int) -> None:
        x, q, scales = data[i % len(data)]
        if p["operation"] == "quantise":
            quantize(group, 0, x, q, scales, p["ctas"])
        else:
            dequantize(group, 0, q, scales, x, p["ctas"])

    name = "quantize" if p["operation"] == "quantise" else "dequantize"
    moved = sum(KERNELS[name].moved_bytes({"rows": rows, "columns": COLUMNS}))
    return Sample(session.time(1, work), {"bytes": float(moved)})


QUANTISE_MEASUREMENT = Grid(
    name="quantise",
    title="casts between BF16 and FP8",
    grid=_quantise_grid,
    on_gpu=_quantise_on_gpu,
    task_s=0.2,
    setup_s=2.0,
)
