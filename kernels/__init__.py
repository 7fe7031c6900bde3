"""Hand-written PTX kernels and the code that runs and times them; importing it needs no GPU."""

from __future__ import annotations

from moesim.kernels.catalog import KERNELS, Kernel
from moesim.kernels.launch import DeviceTimeoutError, GpuGroup, GpuUnavailableError

__all__ = ["KERNELS", "DeviceTimeoutError", "GpuGroup", "GpuUnavailableError", "Kernel"]
