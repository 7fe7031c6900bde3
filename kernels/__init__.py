"""Measurement: hand-written PTX kernels and what runs them (needs a GPU to run, not to import)."""

from __future__ import annotations

from moesim.kernels.catalog import KERNELS, Kernel
from moesim.kernels.launch import DeviceTimeoutError, GpuGroup
from moesim.kernels.loader import GpuUnavailableError

__all__ = ["KERNELS", "DeviceTimeoutError", "GpuGroup", "GpuUnavailableError", "Kernel"]
