"""Launches copies between two GPUs, and the quantisation of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from moesim.hwmodels.errors import InputError
from moesim.kernels.catalog import KERNELS
from moesim.kernels.launch import GpuGroup, address, check_multiple


class BulkShape(Struct, frozen=True):
    """How copy_bulk uses an SM: warps with a ring each, its stages of chunk_bytes, stores in flight.

    The default was best towards one peer on 8 SMs of an H200 (push 98 %, pull 99 % of the best rate).
    Consecutive chunks come from 2^spread_log2 distant blocks, where these divide a buffer.
    """

    warps: int = 4
    stages: int = 12
    depth: int = 4
    chunk_bytes: int = 4096
    spread_log2: int = 0

    def __post_init__(self) -> None:
        """Check the values against the kernel's header."""
        check_multiple("copy_bulk", "chunk_bytes", self.chunk_bytes, 128)
        if self.depth not in (1, 2, 4, 8) or self.stages <= self.depth:
            raise InputError(
                f"copy_bulk: depth={self.depth} must be 1, 2, 4 or 8 and below stages={self.stages}"
            )
        if not 0 <= self.spread_log2 <= 16:
            raise InputError(f"copy_bulk: spread_log2={self.spread_log2} must be 0 to 16")
        if not 1 <= self.warps <= 8:
            raise InputError(f"copy_bulk: warps={self.warps} must be 1 to 8")

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        sizes = {"warps": self.warps, "stages": self.stages, "chunk_bytes": self.chunk_bytes}
        return KERNELS["copy_bulk"].shared_bytes(sizes)


class Pairs(Struct, frozen=True):
    """Sources and targets of one copy launch on one rank, and their address table on its GPU."""

    table: Any
    count: int
    n_bytes: int
    arrays: tuple[Any, ...]


def make_pairs(group: GpuGroup, rank: int, pairs: Sequence[tuple[Any, Any]]) -> Pairs:
    """Check that sizes are equal and addresses aligned, and put the table on the rank's GPU."""
    sizes = {a.nbytes for pair in pairs for a in pair}
    if len(sizes) != 1:
        raise InputError(f"copy: all sources and targets must have one size, got {sorted(sizes)} bytes")
    n_bytes = sizes.pop()
    check_multiple("copy", "n_bytes", n_bytes, 16)
    rows = np.array([[address(a) for a in pair] for pair in pairs], dtype=np.uint64)
    return Pairs(group.put(rank, rows), len(pairs), n_bytes, tuple(a for pair in pairs for a in pair))


def copy_ldst(group: GpuGroup, rank: int, pairs: Pairs, ctas: int, threads: int = 1024) -> None:
    """Queue a copy by 16-byte loads and stores on `ctas` SMs."""
    group.launch(rank, "copy_ldst", ctas, threads, (address(pairs.table), pairs.count, pairs.n_bytes))


def copy_bulk(group: GpuGroup, rank: int, pairs: Pairs, ctas: int, shape: BulkShape | None = None) -> None:
    """Queue a copy by the bulk copy engine on `ctas` SMs."""
    use = shape or BulkShape()
    chunks = -(-pairs.n_bytes // use.chunk_bytes)
    if chunks * pairs.count >= 2**32:
        raise InputError(
            f"copy_bulk: {chunks * pairs.count} chunks; below 2^32 are supported: use larger chunks"
        )
    spread = min(use.spread_log2, (chunks & -chunks).bit_length() - 1)  # blocks must divide the chunks
    arguments = (
        address(pairs.table), pairs.count, pairs.n_bytes, use.chunk_bytes, use.stages, use.depth, spread,
    )  # fmt: skip
    group.launch(rank, "copy_bulk", ctas, 32 * use.warps, arguments, use.shared_bytes)


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
