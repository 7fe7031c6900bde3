"""Launches the kernels quantize and dequantize."""

from __future__ import annotations

from typing import Any

from moesim.hwmodels.errors import InputError
from moesim.kernels.launch import GpuGroup, address, check_multiple

TILE = 128


def _check(name: str, wide: Any, narrow: Any, scales: Any, scale_stride: int | None) -> tuple[int, int, int]:
    rows, columns = wide.shape
    check_multiple(name, "columns", columns, TILE)
    if wide.dtype.itemsize != 2 or narrow.dtype.itemsize != 1 or narrow.shape != wide.shape:
        raise InputError(
            f"{name}: needs 2-byte (bf16 bits) and 1-byte (e4m3 bits) arrays of one shape, got "
            f"{wide.dtype} {wide.shape} and {narrow.dtype} {narrow.shape}"
        )
    stride = scale_stride if scale_stride is not None else columns // TILE * 4
    if stride < columns // TILE * 4 or stride % 4:
        raise InputError(f"{name}: scale_stride={stride} must be a multiple of 4, >= {columns // TILE * 4}")
    if rows and scales.nbytes < (rows - 1) * stride + columns // TILE * 4:
        raise InputError(f"{name}: scales hold {scales.nbytes} bytes, fewer than {rows} rows of {stride}")
    if rows * columns >= 2**39:
        raise InputError(f"{name}: {rows} x {columns} values; the limit is 2^39")
    return rows, columns, stride


def quantize(
    group: GpuGroup, rank: int, x: Any, q: Any, scales: Any, ctas: int, scale_stride: int | None = None
) -> None:
    """Queue bf16 x [rows, columns] -> e4m3 q and f32 scales; scale rows are `scale_stride` bytes apart."""
    rows, columns, stride = _check("quantize", x, q, scales, scale_stride)
    arguments = (address(x), address(q), address(scales, 4), rows, columns, stride)
    group.launch(rank, "quantize", ctas, 1024, arguments)


def dequantize(
    group: GpuGroup, rank: int, q: Any, scales: Any, y: Any, ctas: int, scale_stride: int | None = None
) -> None:
    """Queue e4m3 q and f32 scales -> bf16 y [rows, columns]."""
    rows, columns, stride = _check("dequantize", y, q, scales, scale_stride)
    arguments = (address(q), address(scales, 4), address(y), rows, columns, stride)
    group.launch(rank, "dequantize", ctas, 1024, arguments)
