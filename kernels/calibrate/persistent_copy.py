"""A PTX push to a peer on n SMs until it is stopped; it loads the link as a communication kernel does."""

from __future__ import annotations

import time
from importlib.resources import as_file, files
from typing import Any

import numpy as np

from moesim.kernels.calibrate.protocol import TaskFailed
from moesim.kernels.loader import cupy

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
            _enable(cp, target)
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


def _enable(cp: Any, target: int) -> None:
    try:
        cp.cuda.runtime.deviceEnablePeerAccess(target)
    except cp.cuda.runtime.CUDARuntimeError as error:
        if "AlreadyEnabled" not in str(error):
            raise
