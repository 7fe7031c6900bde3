"""Groups of ranks on the GPUs of this machine, or a reason to skip, and how their results are compared."""

from __future__ import annotations

import os

import kernel_references as ref
import numpy as np
import pytest

from moesim.kernels.launch import DeviceTimeoutError, GpuGroup, GpuUnavailableError, cupy

POISON = 0xEE


def make_group(devices: list[int], timeout_s: float = 10.0) -> GpuGroup:
    """A rank on each of these devices, which may be the same one."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    try:
        runtime = cupy().cuda.runtime
    except GpuUnavailableError as error:
        pytest.skip(str(error))
    if runtime.getDeviceProperties(0)["major"] < 9:
        pytest.skip("needs compute capability 9.0 (Hopper)")
    if (count := runtime.getDeviceCount()) <= max(devices):
        pytest.skip(f"needs {max(devices) + 1} GPUs, this machine shows {count}")
    return GpuGroup(devices, timeout_s)


def check_sum(out: ref.U16, expected: ref.U16, bound: ref.F32, exact: bool, where: str) -> None:
    """Sums in a stated order without weights leave no freedom; with weights a rounding may fall elsewhere."""
    if exact:
        np.testing.assert_array_equal(out, expected, err_msg=where)
    error = np.abs(ref.bf16_to_f32(out) - ref.bf16_to_f32(expected))
    limit = np.abs(ref.bf16_to_f32(expected)) * 2.0**-7 + bound
    assert (error <= limit).all(), f"{where}: off by {np.max(error / np.maximum(limit, 1e-30))}"
    assert (out == expected).mean() > 0.999, where


def fails(words: str, kernel: str, peer: int, group: GpuGroup) -> None:
    """The queued work ends with this timeout of rank 0."""
    with pytest.raises(DeviceTimeoutError, match=words) as caught:
        group.synchronize()
    assert (caught.value.kernel, caught.value.rank, caught.value.peer) == (kernel, 0, peer)
