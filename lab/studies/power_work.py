"""Kernels, time marks and timed segments of power.py: one class or a mix, with and without idle gaps."""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
SET_BYTES = 300e6
"""Least bytes of the input sets of a kernel together; the L2 cache holds 60 MB."""
SPIN_MHZ = 1700.0
"""Clock by which a gap is turned into cycles; its true length is measured."""
LONG_SPIN, SHORT_SPIN = 400_000, 100_000
PIECES = 10
_ROWS = {"launches": 1, "tokens": 16384, "top_k": 8, "hidden": 2048, "experts": 128}
PIECES_OF: dict[str, dict[str, Any]] = {
    "permute reduce": {**_ROWS, "use": "permute/eager_reduce", "bytes": 5368709120.0},
    "permute expand": {**_ROWS, "use": "permute/eager_expand", "bytes": 3221225472.0},
    "permute expand gradient": {**_ROWS, "use": "permute/eager_expand_gradient", "bytes": 4831838208.0},
    "permute reduce gradient": {**_ROWS, "use": "permute/eager_reduce_gradient", "bytes": 4294967296.0},
    "norms of heads": {
        "use": "norm/eager_head_forward", "launches": 1, "bytes": 301989888.0, "rows": 589824, "width": 128,
    },
    "rope": {
        "use": "rope/eager_halves", "launches": 5, "bytes": 1342177280.0, "tokens": 16384, "heads": 32, "width": 128,
    },
    "adamw": {"use": "optimizer/adamw", "launches": 1, "bytes": 15032385536.0, "elements": 536870912},
    "packing": {"use": "copy/pack", "launches": 1, "bytes": 1866989568.0, "elements": 311164928, "wide": 1},
}  # fmt: skip
"""Operators of Qwen3-30B's step, with their bytes as the simulator counts them."""


class Marks:
    """Time marks on the device: CUDA events, or the host's clock where there is no GPU (dry runs)."""

    def __init__(self, device: str) -> None:
        """Remember the device and take the first mark at a known host time."""
        self.device = device
        self.cuda = device == "cuda"
        self.sync()
        self.first, self.first_s = self.take(), time.monotonic()
        self.sync()

    def take(self) -> Any:
        """A mark behind all work launched so far."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first: Any, second: Any) -> float:
        """Seconds from one mark to another; both must have been reached."""
        return first.elapsed_time(second) * 1e-3 if self.cuda else second - first

    def at(self, mark: Any) -> float:
        """Host time (CLOCK_MONOTONIC, s) of a mark."""
        return self.first_s + self.between(self.first, mark)

    def wait(self, mark: Any) -> None:
        """Wait until the device has reached a mark."""
        if self.cuda:
            mark.synchronize()

    def sync(self) -> None:
        """Wait for all work."""
        if self.cuda:
            torch.cuda.synchronize()

    def spin(self, cycles: int) -> None:
        """Keep one thread of the device busy and all other SMs idle for a number of cycles."""
        if self.cuda:
            torch.cuda._sleep(cycles)
        else:
            time.sleep(cycles / SPIN_MHZ * 1e-6)


@dataclass
class Load:
    """A repeatable kernel with its class, FLOPs and bytes; `run(i)` runs input set i."""

    name: str
    cls: str
    run: Callable[[int], Any]
    sets: int
    flop: float = 0.0
    bytes: float = 0.0
    seconds: float = field(default=0.0)
    """Duration of a call, measured before the segments; only plans the number of calls."""


class Maker:
    """Builds loads on a device, with sizes divided for dry runs."""

    def __init__(self, device: str, shrink: int) -> None:
        """Remember where, and by what to divide every side."""
        self.device, self.shrink = device, shrink

    def normal(self, *shape: int, spread: float = 1.0) -> torch.Tensor:
        """Random normal BF16 numbers of this spread; a spread of zero gives zeros."""
        if spread == 0:
            return torch.zeros(shape, device=self.device, dtype=BF16)
        return torch.randn(shape, device=self.device, dtype=BF16) * spread

    def gemm(self, m: int, n: int, k: int, spread: float = 1.0, name: str = "") -> Load:
        """BF16 GEMM y[m, n] = x[m, k] W[n, k]^T."""
        m, n, k = (max(16, side // self.shrink) for side in (m, n, k))
        sets = max(2, math.ceil(SET_BYTES / self.shrink**2 / (2 * (m * k + n * k + m * n))))
        data = [
            (self.normal(m, k, spread=spread), self.normal(n, k, spread=spread).t(),
             torch.empty(m, n, device=self.device, dtype=BF16))
            for _ in range(sets)
        ]  # fmt: skip
        size = 2.0 * (m * k + n * k + m * n)
        return Load(
            name or f"bf16 {m}x{n}x{k}", "gemm_bf16",
            lambda i: torch.mm(data[i % sets][0], data[i % sets][1], out=data[i % sets][2]),
            sets, 2.0 * m * n * k, size,
        )  # fmt: skip

    def gemm_fp8(self, m: int, n: int, k: int) -> Load:
        """FP8 GEMM with one scale a tensor through torch._scaled_mm."""
        m, n, k = (max(16, side // self.shrink) for side in (m, n, k))
        sets = max(2, math.ceil(SET_BYTES / self.shrink**2 / (m * k + n * k + 2 * m * n)))
        one = torch.ones((), device=self.device)
        data = [(self.normal(m, k).to(FP8), self.normal(n, k).to(FP8).t()) for _ in range(sets)]

        def run(i: int) -> Any:
            a, b = data[i % sets]
            return torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=BF16, use_fast_accum=True)

        run(0)
        return Load(
            f"fp8 {m}x{n}x{k}", "gemm_fp8", run, sets, 2.0 * m * n * k, 1.0 * (m * k + n * k + 2 * m * n)
        )

    def attention(self, batch: int, heads: int, length: int, width: int = 128) -> tuple[Load, Load]:
        """Causal attention, forward and backward, by cuDNN where it runs, else by PyTorch's choice."""
        length = max(32, length // self.shrink)
        heads = max(1, heads // self.shrink)
        data: list[tuple[torch.Tensor, ...]] = []
        backend = _cudnn() if self.device == "cuda" else contextlib.nullcontext
        for _ in range(2):
            q, k, v = (self.normal(batch, heads, length, width).requires_grad_() for _ in range(3))
            with backend():
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            data.append((q, k, v, out, self.normal(batch, heads, length, width)))

        def forward(i: int) -> Any:
            with torch.no_grad(), backend():
                return F.scaled_dot_product_attention(*data[i % 2][:3], is_causal=True)

        def backward(i: int) -> Any:
            q, k, v, out, g = data[i % 2]
            return torch.autograd.grad(out, (q, k, v), g, retain_graph=True)

        flop = 2.0 * batch * heads * length * length * width
        return (
            Load(f"attention forward {heads} {length}", "attention_forward", forward, 2, flop),
            Load(f"attention backward {heads} {length}", "attention_backward", backward, 2, 2.5 * flop),
        )

    def memory(self, elements: int) -> list[Load]:
        """Kernels bound by memory: an addition, a cast, a copy and RMS norms of rows of 6,144 elements."""
        n = max(6144, elements // self.shrink**2 // 6144 * 6144)
        a, b = self.normal(n), self.normal(n)
        c, wide = torch.empty_like(a), torch.empty(n, device=self.device)
        rows, gain = a.view(-1, 6144), self.normal(6144)
        return [
            Load("add", "memory", lambda i: torch.add(a, b, out=c), 1, 0.0, 6.0 * n),
            Load("cast", "memory", lambda i: wide.copy_(a), 1, 0.0, 6.0 * n),
            Load("copy", "memory", lambda i: c.copy_(b), 1, 0.0, 4.0 * n),
            Load("rms_norm", "memory", lambda i: F.rms_norm(rows, (6144,), gain), 1, 0.0, 4.0 * n),
        ]

    def pieces(self) -> list[Load]:
        """Eager operators below the bandwidth of a copy, and near it, as a calibration times them."""
        from moesim.kernels.calibrate.operators import _piece

        found = []
        for size, row in PIECES_OF.items():
            piece = _piece(row)
            assert piece is not None
            call = piece(row, str(row["use"]).endswith(("backward", "_gradient")))
            found.append(Load(size, "pieces", lambda i, call=call: call(), 1, 0.0, float(row["bytes"])))  # type: ignore[misc]
        return found

    def few_blocks(self, blocks: int, words: int) -> Load:
        """A copy by few thread blocks, as kernels of collectives run while nothing computes."""
        from lab.studies.between_pieces import copy_words as copy

        source = torch.randint(0, 2**31 - 1, (words,), device=self.device, dtype=torch.int32)
        target = torch.empty_like(source)

        def run(i: int) -> None:
            copy[(blocks,)](source, target, words, BLOCK=4096, num_warps=16)

        run(0)
        return Load(f"copy on {blocks} blocks", "few_blocks", run, 1, 0.0, 8.0 * words)


def _cudnn() -> Callable[[], Any]:
    """The context that chooses cuDNN's attention; an empty one where that does not run."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    x = torch.randn(1, 1, 256, 128, device="cuda", dtype=BF16, requires_grad=True)
    try:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            F.scaled_dot_product_attention(x, x, x, is_causal=True).sum().backward()
        torch.cuda.synchronize()
    except Exception as error:
        print(f"cuDNN's attention does not run: {error!r}"[:200])
        return contextlib.nullcontext
    return lambda: sdpa_kernel([SDPBackend.CUDNN_ATTENTION])


def tune(marks: Marks, loads: list[Load]) -> None:
    """Set the seconds of a call of each load from a few calls in a row."""
    for load in loads:
        for i in range(3):
            load.run(i)
        first = marks.take()
        for i in range(6):
            load.run(i)
        last = marks.take()
        marks.sync()
        load.seconds = max(1e-6, marks.between(first, last) / 6)


@dataclass
class Cycle:
    """The marks of one recorded cycle: a piece is (load's class, first mark, last mark, FLOPs, bytes)."""

    pieces: list[tuple[str, Any, Any, float, float]]
    spins: tuple[Any, Any, Any] | None
    end: Any


def segment(
    marks: Marks,
    parts: list[tuple[Load, int]],
    seconds: float,
    *,
    gap_s: float = 0.0,
    host_gap: bool = False,
    settle_s: float = 2.0,
    window_s: float = 1.0,
) -> dict[str, Any]:
    """Run cycles of `parts` (a load and its calls) with a gap behind each; rates of a class and of pieces.

    A gap is a kernel that spins on one thread, or the host's pause if `host_gap`. Rates count the time inside
    the pieces alone; `busy_share` is their time over all time, after `settle_s`.
    """
    cycle_s = sum(load.seconds * calls for load, calls in parts) + gap_s
    every = max(1, round(0.04 / cycle_s)) if cycle_s < 0.04 else 1
    chunk = max(1, round(0.25 / cycle_s))
    cycles: list[Cycle] = []
    ends: list[Any] = []
    began, number, call, probed = time.monotonic(), 0, 0, 0.0
    start = marks.take()
    while time.monotonic() - began < seconds:
        for _ in range(chunk):
            if time.monotonic() - began > seconds:
                break
            recorded = number % every == 0
            probe = recorded and time.monotonic() - probed > 0.4
            cycle, call = _cycle(marks, parts, call, recorded, probe)
            if probe:
                probed = time.monotonic()
            if host_gap and gap_s:
                marks.sync()
                time.sleep(gap_s)
            elif gap_s:
                marks.spin(int(gap_s * SPIN_MHZ * 1e6))
            if cycle is not None:
                cycle.end = marks.take()
                cycles.append(cycle)
            number += 1
        ends.append(marks.take())
        if len(ends) > 2:
            marks.wait(ends[-3])
    last = marks.take()
    marks.sync()
    return {"from_s": marks.at(start), "to_s": marks.at(last), "cycles": number} | _summary(
        marks, cycles, settle_s, window_s
    )


def _cycle(
    marks: Marks, parts: list[tuple[Load, int]], call: int, recorded: bool, probe: bool
) -> tuple[Cycle | None, int]:
    """Launch one cycle; its marks if it is recorded, and the number of calls so far."""
    pieces = []
    for load, calls in parts:
        cuts = {round(calls * j / PIECES) for j in range(1, PIECES + 1)} if len(parts) == 1 else {calls}
        first, done = marks.take() if recorded else None, 0
        for i in range(1, calls + 1):
            load.run(call)
            call += 1
            if recorded and i in cuts:
                last = marks.take()
                count = i - done
                pieces.append((load.cls, first, last, load.flop * count, load.bytes * count))
                first, done = last, i
    if not recorded:
        return None, call
    spins = None
    if probe:
        marks_of = [marks.take()]
        for cycles in (LONG_SPIN, SHORT_SPIN):
            marks.spin(cycles)
            marks_of.append(marks.take())
        spins = (marks_of[0], marks_of[1], marks_of[2])
    return Cycle(pieces, spins, marks.take()), call


def _summary(marks: Marks, cycles: list[Cycle], settle_s: float, window_s: float) -> dict[str, Any]:
    """Rates by class: of all recorded cycles after settling, and of every window; rates of the pieces."""
    if not cycles:
        return {}
    origin = marks.at(cycles[0].pieces[0][1])
    kept = [c for c in cycles if marks.at(c.pieces[0][1]) - origin >= settle_s] or cycles
    windows: dict[int, list[Cycle]] = {}
    for cycle in cycles:
        windows.setdefault(int((marks.at(cycle.pieces[0][1]) - origin) / window_s), []).append(cycle)
    count = len(kept[0].pieces)
    pieces = []
    for j in range(count if count <= PIECES else 0):
        took = [marks.between(c.pieces[j][1], c.pieces[j][2]) for c in kept]
        pieces.append([statistics.median(took), kept[0].pieces[j][3], kept[0].pieces[j][4]])
    return {
        "recorded": len(kept),
        "classes": _rates(marks, kept),
        "windows": [[number * window_s, _rates(marks, group)] for number, group in sorted(windows.items())],
        "pieces_s_flop_bytes": pieces,
        "clock_mhz": _clock(marks, kept),
        "busy_share": _busy(marks, kept),
    }


def _rates(marks: Marks, cycles: list[Cycle]) -> dict[str, dict[str, float]]:
    """Seconds, FLOP/s and bytes/s inside the pieces of each class."""
    sums: dict[str, list[float]] = {}
    for cycle in cycles:
        for cls, first, last, flop, size in cycle.pieces:
            total = sums.setdefault(cls, [0.0, 0.0, 0.0])
            total[0] += marks.between(first, last)
            total[1] += flop
            total[2] += size
    return {
        cls: {"seconds": s, "flop_per_s": flop / s, "bytes_per_s": size / s}
        for cls, (s, flop, size) in sums.items()
        if s > 0
    }


def _clock(marks: Marks, cycles: list[Cycle]) -> list[float]:
    """SM clocks (MHz) from the difference of two spinning kernels right behind the work."""
    found = []
    for cycle in cycles:
        if cycle.spins is not None:
            a, b, c = cycle.spins
            difference = marks.between(a, b) - marks.between(b, c)
            if difference > 0:
                found.append(round((LONG_SPIN - SHORT_SPIN) / difference * 1e-6, 1))
    return found


def _busy(marks: Marks, cycles: list[Cycle]) -> float:
    """Share of the time of the recorded cycles, gaps included, that their pieces take."""
    whole = sum(marks.between(c.pieces[0][1], c.end) for c in cycles)
    whole -= sum(marks.between(c.spins[0], c.spins[2]) for c in cycles if c.spins is not None)
    inside = sum(marks.between(p[1], p[2]) for c in cycles for p in c.pieces)
    return inside / whole if whole > 0 else 0.0


def burst(marks: Marks, load: Load, idle_s: float, calls: int) -> list[float]:
    """Seconds of single calls in a row after an idle time."""
    marks.sync()
    time.sleep(idle_s)
    taken = [marks.take()]
    for i in range(calls):
        load.run(i)
        taken.append(marks.take())
    marks.sync()
    return [marks.between(a, b) for a, b in itertools.pairwise(taken)]
