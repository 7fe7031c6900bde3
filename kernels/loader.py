"""Loads PTX kernels lazily through CuPy, with readable errors."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from moesim.hwmodels.errors import InputError
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


def ptx_version(source: str) -> tuple[int, int]:
    """The .version of a PTX text."""
    found = re.search(r"^\.version\s+(\d+)\.(\d+)", source, re.MULTILINE)
    if found is None:
        raise InputError("a PTX file without a .version line cannot be loaded")
    return int(found[1]), int(found[2])


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
    check_driver(ptx_version(kernel.source()), cp.cuda.runtime.driverGetVersion())
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
