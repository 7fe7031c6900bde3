"""Measures the slow-down of compute overlapped with communication, and of the communication itself.

A persistent PTX copy (copy.ptx, n CTAs, each alone on its SM) pushes from GPU 0 to GPU 1 while an operator
runs on GPU 0. Windows with and without the copy alternate, and the GPU rests before each, so that neither
drift nor the power limit favours one. An overlapped window counts only if the copy ran before it and did not
reach its time limit. An SM-aware operator can leave more SMs free than the copy takes, because kernels in
clusters of two may not fit the remaining SMs exactly, and a tuned library would leave a margin.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from importlib.resources import as_file, files
from typing import Any

import numpy as np

from moesim.kernels.calibrate.protocol import Facts, Grid, Parameter, Sample, TaskFailed
from moesim.kernels.launch import cupy

CHUNK_BYTES = 1 << 20
SIZE_BYTES = 1 << 29
LIMIT_S = 2.0
_STOP, _ISSUED, _LATE, _PLACES = 0, 1, 2, 8  # words of the control block, see copy.ptx


class PersistentCopy:
    """The persistent copy from one GPU's memory to another's; at most one runs at a time."""

    def __init__(self, source: int, target: int) -> None:
        """Load the kernel, enable peer access and fill the source with random words."""
        cp = cupy()
        with as_file(files("moesim.kernels").joinpath("ptx", "copy.ptx")) as path, cp.cuda.Device(source):
            self._kernel = cp.RawModule(path=str(path)).get_function("copy_sys_v1")
        self._device = cp.cuda.Device(source)
        with self._device:
            try:
                cp.cuda.runtime.deviceEnablePeerAccess(target)
            except cp.cuda.runtime.CUDARuntimeError as error:
                if "AlreadyEnabled" not in str(error):
                    raise
            self._source = cp.random.randint(0, 2**31 - 1, size=SIZE_BYTES // 4, dtype=cp.int32)
            self._control = cp.zeros(_PLACES + 256, dtype=cp.int64)
            self._stream, self._aside = (cp.cuda.Stream(non_blocking=True) for _ in range(2))
            self._host = _pinned(cp, self._control.size)
            self._word = _pinned(cp, 1)
            self._word[0] = 1
            self._device.synchronize()
        with cp.cuda.Device(target):
            self._target = cp.zeros(SIZE_BYTES // 4, dtype=cp.int32)
            cp.cuda.Device(target).synchronize()

    def start(self, sms: int) -> None:
        """Launch `sms` CTAs, an even number: clusters of two take both SMs of a TPC, as in libraries.

        Raises TaskFailed unless each CTA has begun on an SM of its own.
        """
        with self._device:
            self._control.data.memset_async(0, self._control.nbytes, self._aside)
            self._aside.synchronize()
            arguments = (
                np.uint64(self._source.data.ptr),
                np.uint64(self._target.data.ptr),
                np.uint64(self._control.data.ptr),
                np.uint32(SIZE_BYTES // CHUNK_BYTES),
                np.uint64(int(LIMIT_S * 1e9)),
            )
            with self._stream:
                self._kernel((sms,), (1024,), arguments)
        until = time.monotonic() + 1.0
        while self._read()[_ISSUED] < 2 * sms:
            if time.monotonic() > until:
                self.stop()
                raise TaskFailed(f"a copy on {sms} SMs did not begin within a second")
        places = self._host[_PLACES : _PLACES + sms].tolist()
        if len(set(places)) != sms or 0 in places:
            self.stop()
            raise TaskFailed(f"the {sms} CTAs of the copy do not each have an SM of their own")

    def stop(self) -> bool:
        """End the copy; False if it had already reached its time limit, so that the window does not count."""
        with self._device:
            self._control[_STOP : _STOP + 1].data.copy_from_host_async(self._word.ctypes.data, 8, self._aside)
            self._aside.synchronize()
            self._stream.synchronize()
        return int(self._read()[_LATE]) == 0

    def alone(self, sms: int, seconds: float = 0.03) -> float:
        """Bytes per second of the copy alone, by the host's clock."""
        self.start(sms)
        first, begin = int(self._read()[_ISSUED]), time.perf_counter()
        time.sleep(seconds)
        last, end = int(self._read()[_ISSUED]), time.perf_counter()
        self.stop()
        return (last - first) * CHUNK_BYTES / (end - begin)

    def counter(self, torch: Any) -> Any:
        """The word that counts issued chunks, as a torch tensor on the same memory."""
        return torch.as_tensor(self._control, device=f"cuda:{self._device.id}")[_ISSUED : _ISSUED + 1]

    def _read(self) -> Any:
        """Read the control words while the kernel runs."""
        with self._device:
            self._control.data.copy_to_host_async(self._host.ctypes.data, self._control.nbytes, self._aside)
            self._aside.synchronize()
        return self._host


def _pinned(cp: Any, words: int) -> Any:
    return np.frombuffer(cp.cuda.alloc_pinned_memory(8 * words), dtype=np.int64, count=words)


SMS = (20, 8, 32, 16, 24, 12, 4, 48)
QUICK_SMS = (8, 20)
MARGINS = (0, 2, 4)
"""SMs that an SM-aware operator leaves free beyond those of the copy."""
OPERATORS = ("fp8_wide", "fp8_deep", "fp8_grouped", "bf16", "attention", "memory")
SM_AWARE = ("fp8_wide", "fp8_deep", "fp8_grouped")
WINDOW_S = 12e-3
REST_S = 8e-3
MOST_WINDOWS = 9


def _grid(facts: Facts, quick: bool) -> Sequence[Mapping[str, Parameter]]:
    tasks: list[dict[str, Parameter]] = []
    for operator in ("fp8_wide", "bf16", "attention", "memory") if quick else OPERATORS:
        for n in QUICK_SMS if quick else SMS:
            tasks.append({"operator": operator, "sms": n, "left_free": 0})
            if operator in SM_AWARE:
                tasks += [{"operator": operator, "sms": n, "left_free": n + more} for more in MARGINS]
    return tasks


def _build(operator: str) -> Any:
    from moesim.kernels.calibrate import compute

    match operator:
        case "attention":
            return compute.attention(128, 4096, 192, 128, backward=False)
        case "memory":
            return compute.memory_copy(1 << 30)
        case "bf16":
            return compute.gemm("bf16", 4096, 4096, 7168)
        case "fp8_wide":
            return compute.gemm("fp8", 4096, 24576, 1536)
        case "fp8_deep":
            return compute.gemm("fp8", 4096, 4096, 7168)
    return compute.gemm("fp8", 32768, 4096, 7168, 8)


def _on_gpu(session: Any, p: Mapping[str, Any]) -> Sample:
    from moesim.kernels.calibrate.compute import Graphs, torch

    operator, sms, left_free = str(p["operator"]), int(p["sms"]), int(p["left_free"])
    counts = QUICK_SMS if session.quick else SMS
    wanted = tuple(sorted({n + m for n in counts for m in MARGINS})) if operator in SM_AWARE else ()

    def build() -> tuple[Any, Any]:
        copy = PersistentCopy(session.devices[0], session.devices[1])
        return Graphs(session.devices[0], lambda: _build(operator), wanted), copy

    graphs, copy = session.keep(("interference", operator), build)
    counter = copy.counter(torch())
    copy_alone = copy.alone(sms)
    beside, ratios, carried, aware_alone = [], [], [], []
    for _ in range(min(session.repeats, MOST_WINDOWS)):
        time.sleep(REST_S)
        alone_s = graphs.seconds(0, WINDOW_S)
        if left_free:
            time.sleep(REST_S)
            aware_alone.append(graphs.seconds(left_free, WINDOW_S) / alone_s)
        time.sleep(REST_S)
        copy.start(sms)
        beside_s, chunks_per_s = graphs.window(left_free, WINDOW_S, counter)
        if copy.stop():
            beside.append(beside_s)
            ratios.append(beside_s / alone_s)
            carried.append(chunks_per_s * CHUNK_BYTES)
    if not ratios:
        raise TaskFailed("the copy beside it reached its time limit in every window")
    values = {
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "copy_bytes_per_s": statistics.median(carried),
        "copy_alone_bytes_per_s": copy_alone,
    }
    if aware_alone:
        values["aware_alone_ratio"] = statistics.median(aware_alone)
    return Sample(tuple(beside), values)


MEASUREMENT = Grid(
    name="interference",
    title="compute beside communication",
    grid=_grid,
    on_gpu=_on_gpu,
    task_s=0.9,
    setup_s=10.0,
    min_gpus=2,
    libraries=("cupy", "torch"),
)
