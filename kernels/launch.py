"""Ranks of one process: streams, peer access, symmetric buffers, launches, and readable device errors."""

from __future__ import annotations

import atexit
import itertools
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from moesim.hwmodels.errors import InputError, MoesimError
from moesim.kernels.catalog import KERNELS, SHARED_MEMORY_LIMIT_BYTES, Kernel

# First CUDA version (as the driver reports it) that reads a PTX version (NVIDIA, PTX ISA, release notes).
CUDA_FOR_PTX = {(8, 0): 12000, (8, 1): 12010, (8, 2): 12020, (8, 3): 12030, (8, 4): 12040}


class GpuUnavailableError(InputError):
    """There is no usable GPU, CuPy or driver; the text says which is missing and what still works."""


@lru_cache(maxsize=1)
def cupy() -> Any:
    """The cupy module, after checking that a GPU answers.

    Raises GpuUnavailableError with a remedy where CuPy, the driver or a GPU is missing.
    """
    # CUDA reads this once at context creation; ranks of one process need queues that do not block each other.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    try:
        import cupy as module
    except ImportError as error:
        raise GpuUnavailableError(
            "measuring needs CuPy, which is not installed: pip install 'moesim[gpu-cu13]' (or gpu-cu12). "
            "Predicting needs no GPU: moesim simulate works with the profiles that come with moesim."
        ) from error
    try:
        count = module.cuda.runtime.getDeviceCount()
    except module.cuda.runtime.CUDARuntimeError as error:
        raise GpuUnavailableError(
            f"CuPy {module.__version__} finds no usable NVIDIA driver or GPU ({error}). Predicting needs no "
            "GPU: moesim simulate works with the profiles that come with moesim."
        ) from error
    if count == 0:
        raise GpuUnavailableError("the NVIDIA driver answers but shows no GPU (check CUDA_VISIBLE_DEVICES).")
    return module


def check_driver(version: tuple[int, int], driver_cuda: int) -> None:
    """Raise GpuUnavailableError if the driver (12040 for CUDA 12.4) is too old for the PTX `version`."""
    needed = CUDA_FOR_PTX.get(version, max(CUDA_FOR_PTX.values()))
    if driver_cuda < needed:
        raise GpuUnavailableError(
            f"the NVIDIA driver supports CUDA {driver_cuda // 1000}.{driver_cuda % 1000 // 10}, but PTX "
            f"{version[0]}.{version[1]} needs {needed // 1000}.{needed % 1000 // 10} or newer: update it."
        )


def check_capability(kernel: Kernel, capability: tuple[int, int], name: str) -> None:
    """Raise GpuUnavailableError if a GPU's compute capability is below the kernel's."""
    if capability < kernel.minimum_capability:
        raise GpuUnavailableError(
            f"kernel {kernel.name} needs compute capability {kernel.minimum_capability[0]}."
            f"{kernel.minimum_capability[1]} (Hopper), but {name} has {capability[0]}.{capability[1]}: "
            "measure on an H100, H200, H800, H20 or newer, or use a profile that comes with moesim."
        )


@lru_cache(maxsize=1)
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="moesim-ptx-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@lru_cache(maxsize=256)
def _module(path: str) -> Any:
    return cupy().RawModule(path=path)


@lru_cache(maxsize=1024)
def _prepared(path: str, entry: str, device: int) -> Any:
    """The function on one device, with its shared-memory limit raised; both are cached per device."""
    with cupy().cuda.Device(device):
        function = _module(path).get_function(entry)
        function.max_dynamic_shared_size_bytes = SHARED_MEMORY_LIMIT_BYTES - function.shared_size_bytes
    return function


@lru_cache(maxsize=256)
def _checked_path(name: str, device: int) -> str:
    """Path of a content-hashed PTX copy (CuPy caches modules by path), after the driver and GPU checks."""
    kernel, cp = KERNELS[name], cupy()
    stated = re.search(r"^\.version\s+(\d+)\.(\d+)", kernel.source(), re.MULTILINE)
    assert stated is not None, f"{kernel.file} states its PTX version"
    check_driver((int(stated[1]), int(stated[2])), cp.cuda.runtime.driverGetVersion())
    properties = cp.cuda.runtime.getDeviceProperties(device)
    check_capability(kernel, (properties["major"], properties["minor"]), properties["name"].decode())
    path = _folder() / f"{kernel.name}-{kernel.digest()[:16]}.ptx"
    if not path.exists():
        path.write_text(kernel.source(), encoding="utf-8")
    return str(path)


def load(name: str, device: int) -> Any:
    """The CuPy function of a kernel on a device: call as function(grid, block, arguments, shared_mem=bytes).

    Raises InputError for an unknown name, GpuUnavailableError where the GPU or driver cannot run it.
    """
    if name not in KERNELS:
        raise InputError(f"unknown kernel {name!r}; known: {', '.join(sorted(KERNELS))}")
    return _prepared(_checked_path(name, device), KERNELS[name].entry, device)


STATUS_WORDS = 8
_TYPES = {"u32": np.uint32, "u64": np.uint64}
_CODES = {
    0x100: ("signal", "wait for a flag", "reached"),
    0x200: ("barrier", "wait for rank {peer}", "epoch"),
    0x300: ("notify", "wait for the counts of rank {peer}", "epoch"),
    0x301: ("notify", "receive buffer of rank {peer} is too small", "rows"),
    0x400: ("dispatch", "wait for all CTAs of rank {peer}", "arrivals"),
    0x600: ("dispatch_ll", "wait for all CTAs of rank {peer}", "arrivals"),
    0x500: ("combine", "wait until rank {peer} is ready", "epoch"),
    0x700: ("combine_ll", "wait until rank {peer} is ready", "epoch"),
    0x800: ("dispatch_2hop", "wait for the count of rank {peer}", "epoch"),
    0x801: ("dispatch_2hop", "wait for a chunk of rank {peer}", "epoch"),
    0x802: ("dispatch_2hop", "wait for all CTAs of relay {peer}", "arrivals"),
    0x900: ("combine_2hop", "wait until rank {peer} is ready", "epoch"),
    0x901: ("combine_2hop", "wait for a chunk of relay {peer}", "epoch"),
}


class DeviceTimeoutError(MoesimError):
    """A wait on the device failed; the attributes kernel, rank, peer, expected and found say which."""

    def __init__(self, words: Sequence[int]) -> None:
        """Read the status block {code, rank, peer, expected, found, ...}."""
        code, self.rank, self.peer, self.expected, self.found = (int(w) for w in words[:5])
        self.kernel, what, unit = _CODES.get(code, (f"status code {code:#x}", "unknown wait", "value"))
        super().__init__(
            f"kernel {self.kernel} on rank {self.rank}: {what.format(peer=self.peer)} failed: "
            f"expected {unit} {self.expected}, found {self.found}. The group is unusable now: make a new one."
        )


def check_launch(name: str, grid: int, block: int, shared_bytes: int) -> None:
    """Raise InputError if a launch breaks the catalog's launch rule."""
    low, high = KERNELS[name].block
    if grid < 1:
        raise InputError(f"{name}: {grid} CTAs; at least 1 is needed")
    if not low <= block <= high or block % 32:
        raise InputError(f"{name}: block of {block} threads; allowed: multiples of 32 from {low} to {high}")
    if shared_bytes > SHARED_MEMORY_LIMIT_BYTES:
        raise InputError(
            f"{name}: {shared_bytes} bytes of shared memory a CTA; the limit is {SHARED_MEMORY_LIMIT_BYTES}: "
            "use fewer stages or smaller pieces"
        )


def check_multiple(name: str, what: str, value: int, of: int) -> None:
    """Raise InputError unless `value` is a positive multiple of `of`."""
    if value <= 0 or value % of:
        near = max(of, value // of * of)
        raise InputError(f"{name}: {what}={value} must be a positive multiple of {of}; nearest: {near}")


def address(array: Any, alignment: int = 16) -> int:
    """Device address of a CuPy array; raises InputError where it is not C-contiguous or not aligned."""
    if not array.flags.c_contiguous:
        raise InputError(f"array of shape {array.shape} is not contiguous: pass cupy.ascontiguousarray(...)")
    if array.data.ptr % alignment:
        raise InputError(f"array of shape {array.shape} is not aligned to {alignment} bytes")
    return int(array.data.ptr)


def pack(name: str, arguments: Sequence[int]) -> tuple[Any, ...]:
    """Arguments in the catalog's types; raises InputError for a wrong number or values that do not fit."""
    parameters = KERNELS[name].parameters
    if len(arguments) != len(parameters):
        raise InputError(f"{name} takes {len(parameters)} arguments, got {len(arguments)}")
    packed = []
    for (parameter, kind), value in zip(parameters, arguments, strict=True):
        if not 0 <= value < 2 ** int(kind[1:]):
            raise InputError(f"{name}: {parameter}={value} does not fit {kind}")
        packed.append(_TYPES[kind](value))
    return tuple(packed)


class GpuGroup:
    """GPUs driven by this process, one rank each (or several ranks on one GPU, for tests).

    `devices[r]` is the CUDA device of rank r; `streams[r]` its stream; `status[r]` its status block. Raises
    GpuUnavailableError where a device is missing, InputError where two have no peer access.
    """

    def __init__(self, devices: Sequence[int], timeout_s: float = 5.0) -> None:
        """Enable peer access between all pairs and allocate flags and status blocks."""
        self.devices = tuple(devices)
        self.ranks = len(self.devices)
        if not 1 <= self.ranks <= 32:
            raise InputError(f"a group of {self.ranks} ranks; 1 to 32 are supported")
        self.timeout_ns = int(timeout_s * 1e9)
        cp = cupy()
        count = cp.cuda.runtime.getDeviceCount()
        if missing := [d for d in self.devices if not 0 <= d < count]:
            raise InputError(f"no GPU {missing[0]}: this machine shows {count} (0 to {count - 1})")
        _enable_peers(self.devices)
        self.streams = []
        for device in self.devices:
            with cp.cuda.Device(device):
                self.streams.append(cp.cuda.Stream(non_blocking=True))
        self.status = self.symmetric((STATUS_WORDS,), "u4")
        self._flags = self.symmetric((self.ranks,), "u4")
        self._flag_table = self.table([self._flags])
        self._epoch = 0

    def subset(self, ranks: Sequence[int]) -> GpuGroup:
        """A group of some ranks that shares their devices, streams and status blocks."""
        part = object.__new__(GpuGroup)
        part.devices = tuple(self.devices[r] for r in ranks)
        part.ranks, part.timeout_ns = len(part.devices), self.timeout_ns
        part.streams, part.status = [self.streams[r] for r in ranks], [self.status[r] for r in ranks]
        part._flags = part.symmetric((part.ranks,), "u4")
        part._flag_table, part._epoch = part.table([part._flags]), 0
        return part

    def symmetric(self, shape: tuple[int, ...], dtype: str, fill: int = 0) -> list[Any]:
        """Allocate one array per rank, filled with the byte `fill`."""
        cp, arrays = cupy(), []
        for device, stream in zip(self.devices, self.streams, strict=True):
            with cp.cuda.Device(device), stream:
                array = cp.empty(shape, dtype=dtype)
                array.data.memset_async(fill, array.nbytes, stream)
                arrays.append(array)
        for stream in self.streams:
            stream.synchronize()
        return arrays

    def put(self, rank: int, array: Any) -> Any:
        """Copy a host array to a rank's GPU."""
        cp = cupy()
        with cp.cuda.Device(self.devices[rank]), self.streams[rank]:
            out = cp.asarray(np.ascontiguousarray(array))
        self.streams[rank].synchronize()
        return out

    def to_ranks(self, arrays: Sequence[Any]) -> list[Any]:
        """Copy one host array to each rank's GPU."""
        return [self.put(rank, array) for rank, array in enumerate(arrays)]

    def fill(self, arrays: Sequence[Any], byte: int) -> None:
        """Set every byte of symmetric buffers (to poison outputs) and wait until it is done."""
        for device, stream, array in zip(self.devices, self.streams, arrays, strict=True):
            with cupy().cuda.Device(device):
                array.data.memset_async(byte, array.nbytes, stream)
            stream.synchronize()

    def write(self, arrays: Sequence[Any], values: Sequence[Any]) -> None:
        """Copy host values into symmetric buffers of the same shape and wait until it is done."""
        for rank, (array, value) in enumerate(zip(arrays, values, strict=True)):
            with cupy().cuda.Device(self.devices[rank]):
                array.set(np.ascontiguousarray(value), stream=self.streams[rank])
            self.streams[rank].synchronize()

    def table(self, kinds: Sequence[Sequence[Any]]) -> list[Any]:
        """Put the address table of symmetric buffers, [kinds][ranks] u64, on each rank's GPU."""
        rows = np.array([[address(a) for a in kind] for kind in kinds], dtype=np.uint64)
        return self.to_ranks([rows] * self.ranks)

    def launch(
        self, rank: int, name: str, grid: int, block: int, arguments: Sequence[int], shared_bytes: int = 0
    ) -> None:
        """Launch a kernel on a rank's stream, after checking the launch against the catalog."""
        check_launch(name, grid, block, shared_bytes)
        packed, device = pack(name, arguments), self.devices[rank]
        function = load(name, device)
        with cupy().cuda.Device(device), self.streams[rank]:
            function((grid,), (block,), packed, shared_mem=shared_bytes)

    def barrier(self) -> None:
        """Queue a barrier between all ranks on their streams."""
        self._epoch += 1
        for rank in range(self.ranks):
            table, status = address(self._flag_table[rank]), address(self.status[rank])
            self.launch(
                rank, "barrier", 1, 32, (table, rank, self.ranks, self._epoch, self.timeout_ns, status)
            )

    def post(self, rank: int, flag: int, value: int) -> None:
        """Queue a write of `value` to the u32 at device or pinned host address `flag`, in stream order."""
        status = address(self.status[rank])
        self.launch(rank, "signal", 1, 32, (flag, value, 0, self.timeout_ns, status, rank, rank))

    def wait(self, rank: int, flag: int, value: int, peer: int, timeout_s: float | None = None) -> None:
        """Queue a wait of the rank's stream until the u32 at address `flag` has reached `value`."""
        limit = self.timeout_ns if timeout_s is None else int(timeout_s * 1e9)
        self.launch(rank, "signal", 1, 32, (flag, value, 1, limit, address(self.status[rank]), rank, peer))

    def synchronize(self) -> None:
        """Wait for all streams; raise DeviceTimeoutError if a status block holds an error."""
        for stream in self.streams:
            stream.synchronize()
        for words in (status.get() for status in self.status):
            if words[0]:
                raise DeviceTimeoutError(words)


def _enable_peers(devices: Sequence[int]) -> None:
    """Enable peer access between all ordered pairs; InputError names the first pair without it."""
    cp = cupy()
    for a, b in itertools.permutations(sorted(set(devices)), 2):
        if not cp.cuda.runtime.deviceCanAccessPeer(a, b):
            raise InputError(
                f"GPU {a} has no peer access to GPU {b} (no NVLink or PCIe path, or MIG is on): choose "
                "GPUs of one NVLink domain, or measure one GPU alone."
            )
        with cp.cuda.Device(a):
            try:
                cp.cuda.runtime.deviceEnablePeerAccess(b)
            except cp.cuda.runtime.CUDARuntimeError as error:
                if "PeerAccessAlreadyEnabled" not in str(error):
                    raise
