"""Plain CUDA C++ counterparts of copy, dispatch and combine (NVRTC), to measure the gain from PTX."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from moesim.hwmodels.errors import InputError
from moesim.kernels.copy import Pairs
from moesim.kernels.expert_parallel import ExpertParallel
from moesim.kernels.launch import GpuGroup, GpuUnavailableError, address, cupy

ENTRIES = {"copy": "copy_cuda_v1", "dispatch": "dispatch_cuda_v1", "combine": "combine_cuda_v1"}
CYCLES_PER_NS = 2  # converts time limits; Hopper clocks stay below 2 GHz, so no limit gets shorter


def source(name: str) -> str:
    """The CUDA C++ text."""
    return (Path(__file__).parent / "cuda" / f"{name}.cu").read_text(encoding="utf-8")


@lru_cache(maxsize=16)
def _module(name: str) -> Any:
    return cupy().RawModule(code=source(name), options=("--std=c++17",))


@lru_cache(maxsize=256)
def _function(name: str, device: int) -> Any:
    cp = cupy()
    try:
        with cp.cuda.Device(device):
            return _module(name).get_function(ENTRIES[name])
    except (cp.cuda.compiler.CompileException, RuntimeError) as error:
        raise GpuUnavailableError(
            f"NVRTC could not compile {name}.cu ({str(error).splitlines()[0]}): install cupy-cuda13x[ctk] "
            "(or cupy-cuda12x[ctk]), or measure the PTX kernels alone."
        ) from error


def _launch(group: GpuGroup, rank: int, name: str, grid: int, block: int, arguments: tuple[Any, ...]) -> None:
    if grid < 1 or block < 32 or block > 1024 or block % 32:
        raise InputError(f"{name} (CUDA C++): {grid} CTAs of {block} threads is not a legal launch")
    function = _function(name, group.devices[rank])
    with cupy().cuda.Device(group.devices[rank]), group.streams[rank]:
        function((grid,), (block,), arguments)


def _pointers(*arrays: Any) -> tuple[Any, ...]:
    return tuple(np.uint64(address(array, 4)) for array in arrays)


def copy_cuda(group: GpuGroup, rank: int, pairs: Pairs, ctas: int, threads: int = 1024) -> None:
    """Queue a copy on `ctas` SMs."""
    arguments = (*_pointers(pairs.table), np.uint32(pairs.count), np.uint64(pairs.n_bytes))
    _launch(group, rank, "copy", ctas, threads, arguments)


def dispatch_cuda(ep: ExpertParallel, sms: int, threads: int = 1024) -> None:
    """Queue the dispatch on every rank, on `sms` SMs each; notify must have run, as for the PTX kernel."""
    expected, group, s = ep.next_arrivals(sms), ep.group, ep.shape
    for rank in range(group.ranks):
        pointers = _pointers(
            ep.x[rank], ep.side[rank], ep.lists[rank], ep.rank_counts[rank], ep.bases[rank],
            ep.dispatch_table[rank],
        )  # fmt: skip
        sizes = (s.tokens, group.ranks, rank, s.row_bytes, s.side_bytes, expected)
        limit = np.uint64(group.timeout_ns * CYCLES_PER_NS)
        arguments = (*pointers, *(np.uint32(v) for v in sizes), limit, *_pointers(group.status[rank]))
        _launch(group, rank, "dispatch", sms, threads, arguments)


def combine_cuda(ep: ExpertParallel, sms: int, weighted: bool = True, threads: int = 448) -> None:
    """Queue the combine on every rank, on `sms` SMs each."""
    epoch, group, s = ep.next_combine(), ep.group, ep.shape
    for rank in range(group.ranks):
        weights = _pointers(ep.weights[rank]) if weighted else (np.uint64(0),)
        pointers = (
            *_pointers(ep.combine_table[rank], ep.slots[rank], ep.bases[rank]),
            *weights, *_pointers(ep.out[rank]),
        )  # fmt: skip
        sizes = (s.tokens, group.ranks, rank, 2 * s.hidden, epoch)
        limit = np.uint64(group.timeout_ns * CYCLES_PER_NS)
        arguments = (*pointers, *(np.uint32(v) for v in sizes), limit, *_pointers(group.status[rank]))
        _launch(group, rank, "combine", sms, threads, arguments)
