"""The CUDA C++ counterparts: no inline PTX, the stated entry, no spills, and on a GPU the bytes of the PTX kernels."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from lab.benchmarks import cuda_cpp
from moesim.kernels.copy import make_pairs
from moesim.kernels.expert_parallel import ExpertParallel, Shape
from moesim.kernels.launch import GpuGroup, GpuUnavailableError, cupy
from tests.kernels.kernel_references import bf16_rows, routing

NAMES = sorted(cuda_cpp.ENTRIES)


@pytest.mark.parametrize("name", NAMES)
def test_the_counterparts_hold_no_ptx_and_define_their_entry(name: str) -> None:
    text = cuda_cpp.source(name)
    assert not re.search(r"\basm\b", text), "a counterpart with inline PTX would not measure what PTX buys"
    assert re.findall(r"^(\w+_cuda_v1)\(", text, re.MULTILINE) == [cuda_cpp.ENTRIES[name]]


@pytest.mark.parametrize("name", NAMES)
def test_the_counterparts_compile_without_spills(name: str, tmp_path: Path) -> None:
    if (nvcc := shutil.which("nvcc")) is None:
        pytest.skip("no nvcc on PATH")
    file = tmp_path / f"{name}.cu"
    file.write_text(cuda_cpp.source(name))
    command = [nvcc, "-arch=sm_90", "-cubin", "-Xptxas", "-v", str(file), "-o", str(tmp_path / "out.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in done.stderr, done.stderr


def one_gpu(ranks: int) -> GpuGroup:
    """All ranks on GPU 0."""
    try:
        cupy()
    except GpuUnavailableError as error:
        pytest.skip(str(error))
    return GpuGroup([0] * ranks, 10.0)


@pytest.mark.parametrize(("ranks", "hidden", "fp8"), [(8, 7168, True), (8, 7168, False), (4, 2048, True)])
def test_dispatch_and_combine_move_the_same_bytes(ranks: int, hidden: int, fp8: bool) -> None:
    group, rng = one_gpu(ranks), np.random.default_rng(3)
    shape = Shape(tokens=129, hidden=hidden, k=8, experts=64, fp8=fp8)
    ep = ExpertParallel(group, shape)
    group.write(ep.topk_idx, [routing("balanced", 129, 8, 64, ranks, rng) for _ in range(ranks)])
    group.write(ep.x, [rng.integers(0, 256, (129, shape.row_bytes), dtype=np.uint8) for _ in range(ranks)])
    group.write(ep.results, [bf16_rows(ep.capacity, hidden, rng) for _ in range(ranks)])
    group.write(ep.weights, [rng.standard_normal((129, ranks)).astype(np.float32) for _ in range(ranks)])
    found = []
    for dispatch, combine in (
        (lambda: ep.dispatch(3), lambda weighted: ep.combine(3, weighted)),
        (lambda: cuda_cpp.dispatch_cuda(ep, 3), lambda weighted: cuda_cpp.combine_cuda(ep, 3, weighted)),
    ):
        for arrays in (ep.recv_x, ep.recv_side, ep.out):
            group.fill(arrays, 0xEE)
        ep.layout()
        ep.notify()
        dispatch()
        group.synchronize()
        got = [a.get() for arrays in (ep.recv_x, ep.recv_side) for a in arrays]
        for weighted in (False, True):
            combine(weighted)
            group.synchronize()
            got += [out.get() for out in ep.out]
        found.append(got)
    for ours, theirs in zip(*found, strict=True):
        assert (ours == theirs).mean() > 0.999


def test_copies_move_the_same_bytes() -> None:
    group, rng = one_gpu(1), np.random.default_rng(1)
    source = rng.integers(0, 256, 1 << 20, dtype=np.uint8)
    target = group.symmetric((1 << 20,), "u1", 0xEE)[0]
    cuda_cpp.copy_cuda(group, 0, make_pairs(group, 0, [(group.put(0, source), target)]), 5)
    group.synchronize()
    assert (target.get() == source).all()
