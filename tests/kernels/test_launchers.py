"""Launchers refuse bad sizes in words, without a GPU."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import asdict, replace

from moesim.hwmodels.errors import InputError
from moesim.kernels import launch
from moesim.kernels.catalog import KERNELS, SHARED_MEMORY_LIMIT_BYTES
from moesim.kernels.copy import BulkShape
from moesim.kernels.expert_parallel import (
    CombineRing,
    CombineTuning,
    DispatchTuning,
    HopTuning,
    Shape,
    combine_tuning,
    dispatch_tuning,
)
from moesim.kernels.launch import DeviceTimeoutError

V3 = Shape(tokens=4096, hidden=7168, k=8, experts=256, fp8=True)


def test_importing_kernels_does_not_import_cupy() -> None:
    code = (
        "import sys; sys.modules['cupy'] = None\n"
        "import moesim.kernels.launch, moesim.kernels.expert_parallel\n"
        "import moesim.kernels.calibrate\n"
        "assert not {'torch', 'pynvml'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_cupy_is_one_clear_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    launch.cupy.cache_clear()
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(launch.GpuUnavailableError, match=r"pip install.*gpu-cu13.*needs no GPU"):
        launch.cupy()
    launch.cupy.cache_clear()


def test_an_old_driver_and_an_old_gpu_are_named() -> None:
    with pytest.raises(launch.GpuUnavailableError, match=r"CUDA 11\.8.*PTX 8\.0 needs 12\.0"):
        launch.check_driver((8, 0), 11080)
    launch.check_driver((8, 0), 12000)
    with pytest.raises(launch.GpuUnavailableError, match=r"needs compute capability 9\.0.*A100 has 8\.0"):
        launch.check_capability(KERNELS["dispatch"], (8, 0), "A100")
    with pytest.raises(InputError, match=r"unknown kernel 'nope'; known: barrier"):
        launch.load("nope", 0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: launch.check_launch("dispatch", 0, 64, 0), "at least 1"),
        (lambda: launch.check_launch("dispatch", 8, 48, 0), "multiples of 32 from 64 to 256"),
        (lambda: launch.check_launch("dispatch", 8, 64, 240_000), "232448.*fewer stages"),
        (lambda: launch.pack("copy_ldst", (1, 2)), "takes 3 arguments, got 2"),
        (lambda: launch.pack("copy_ldst", (1, 2**32, 3)), "n_pairs=4294967296 does not fit u32"),
    ],
)
def test_a_launch_outside_the_catalog_is_refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        call()


def test_misaligned_and_strided_arrays_are_refused() -> None:
    def array(contiguous: bool, pointer: int) -> SimpleNamespace:
        return SimpleNamespace(
            flags=SimpleNamespace(c_contiguous=contiguous), data=SimpleNamespace(ptr=pointer), shape=(2, 3)
        )

    assert launch.address(array(True, 4096)) == 4096
    with pytest.raises(InputError, match="not aligned to 16"):
        launch.address(array(True, 4098))
    with pytest.raises(InputError, match="not contiguous"):
        launch.address(array(False, 4096))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden": 7000}, "hidden=7000 must be a positive multiple of 512; nearest: 6656"),
        ({"hidden": 1000, "fp8": False}, "multiple of 128"),
        ({"experts": 12}, "experts=12 must be a positive multiple of 8 ranks"),
        ({"k": 33}, "k=33 must be 1 to 32"),
        ({"tokens": 0}, "tokens=0"),
    ],
)
def test_shapes_that_the_kernels_cannot_serve_are_refused(change: dict[str, int], words: str) -> None:
    fields = {"tokens": 4096, "hidden": 7168, "k": 8, "experts": 256, "fp8": True} | change
    with pytest.raises(InputError, match=words):
        Shape(**fields).check(8)  # type: ignore[arg-type]


@pytest.mark.parametrize("hidden", [512, 2560, 7168, 16384])
@pytest.mark.parametrize("ranks", [1, 8, 16])
def test_derived_sizes_fit_the_kernels(hidden: int, ranks: int) -> None:
    for fp8 in (True, False):
        shape = Shape(tokens=5, hidden=hidden, k=8, experts=256, fp8=fp8)
        assert shape.side_bytes % 128 == 0 and shape.side_bytes >= shape.scale_bytes + 8 * 8 + 4
        sizes = shape.dispatch_sizes(shape.dispatch_tuning(ranks), ranks)
        assert KERNELS["dispatch"].shared_bytes(sizes) <= SHARED_MEMORY_LIMIT_BYTES
    for teams in (1, 2, 3):
        ring = shape.combine_ring(ranks, teams)
        assert ring.parts * ring.part_bytes == 2 * hidden and ring.part_bytes % 16 == 0
        assert ring.part_bytes <= 14336 and ring.stages >= ranks
        assert ring.shared_bytes <= SHARED_MEMORY_LIMIT_BYTES


def test_v3_sizes_are_the_ones_written_in_the_headers() -> None:
    assert (V3.row_bytes, V3.scale_bytes, V3.side_bytes) == (7168, 224, 384)
    assert V3.combine_ring(8) == CombineRing(2, 1, 14336, 8)
    assert V3.dispatch_tuning(8) == DispatchTuning(2, 8, 2, 2)
    assert replace(V3, fp8=False).dispatch_tuning(8) == DispatchTuning(2, 8, 2, 1)
    assert dispatch_tuning(V3, 4) == HopTuning(6, 1, 12)
    assert combine_tuning(V3, 4, 2) == CombineTuning(14336, 7168, 8, 8, 8)


@pytest.mark.parametrize("hidden", [512, 2560, 7168, 16384])
@pytest.mark.parametrize(("node_size", "nodes"), [(1, 1), (1, 2), (2, 2), (4, 2), (8, 4), (16, 2), (1, 32)])
def test_rings_of_the_two_hops_fit_the_kernels(hidden: int, node_size: int, nodes: int) -> None:
    for fp8 in (True, False):
        shape = Shape(tokens=5, hidden=hidden, k=8, experts=256, fp8=fp8)
        use = dispatch_tuning(shape, node_size)
        assert use.chunk * node_size <= 32 and use.chunk <= 8
        sizes = {"chunk": use.chunk, "stages": use.stages}
        sizes |= {"row_bytes": shape.row_bytes, "side_bytes": shape.side_bytes}
        assert KERNELS["dispatch_2hop"].shared_bytes(sizes) <= SHARED_MEMORY_LIMIT_BYTES
    rings = combine_tuning(shape, node_size, nodes)
    for part, limit in ((rings.relay_part, 14336), (rings.owner_part, 7168)):
        assert 2 * hidden % part == 0 and part % 16 == 0 and part <= limit
    assert rings.relay_stages >= node_size and rings.owner_stages >= nodes
    assert rings.chunk * max(node_size, nodes) <= 32
    assert KERNELS["combine_2hop"].shared_bytes(asdict(rings)) <= SHARED_MEMORY_LIMIT_BYTES


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DispatchTuning(4, 5, 4, 1), "depth=4 must be 1, 2, 4 or 8 and stages=5 at least 6"),
        (lambda: DispatchTuning(4, 18, 3, 1), "depth=3"),
        (lambda: DispatchTuning(8, 40, 1, 1), "warps=8"),
        (lambda: DispatchTuning(2, 8, 1, 5), "group=5"),
        (lambda: HopTuning(9, 1, 20), "chunk=9"),
        (lambda: HopTuning(4, 5, 40), "forwarders=5"),
        (lambda: HopTuning(4, 2, 7), "stages=7 at least 8"),
        (lambda: BulkShape(depth=3), "depth=3"),
        (lambda: BulkShape(stages=2, depth=2), "below stages=2"),
        (lambda: BulkShape(chunk_bytes=100), "chunk_bytes=100 must be a positive multiple of 128"),
        (lambda: BulkShape(warps=9), "warps=9"),
        (lambda: V3.dispatch_sizes(DispatchTuning(2, 8, 2, 4), 20), "at most 3 with 2 sending warps"),
        (lambda: dispatch_tuning(replace(V3, hidden=65536, fp8=False), 2), "do not fit an SM"),
        (lambda: replace(V3, hidden=131072, fp8=False).dispatch_tuning(8), "leaves room for 0 rows"),
    ],
)
def test_tunings_outside_the_kernels_are_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        make()


def test_a_timeout_says_kernel_rank_peer_expected_and_found() -> None:
    error = DeviceTimeoutError([0x400, 3, 5, 160, 140, 0, 0, 0])
    assert str(error).startswith(
        "kernel dispatch on rank 3: wait for all CTAs of rank 5 failed: expected arrivals 160, found 140"
    )
    assert (error.kernel, error.rank, error.peer, error.expected, error.found) == ("dispatch", 3, 5, 160, 140)
    assert "too small" in str(DeviceTimeoutError([0x301, 0, 7, 4096, 5000]))
    hop = str(DeviceTimeoutError([0x801, 1, 5, 9, 8, 0, 0, 0]))
    assert hop.startswith(
        "kernel dispatch_2hop on rank 1: wait for a chunk of rank 5 failed: expected epoch 9"
    )


def test_every_status_code_of_a_kernel_has_words() -> None:
    for kernel in KERNELS.values():
        for code in re.findall(r"cas\.b32 %old, \[%status\], 0, (0x\w+);", kernel.source()):
            assert DeviceTimeoutError([int(code, 16), 0, 1, 2, 3]).kernel == kernel.name


def test_moved_bytes_of_the_home_case() -> None:
    # 4,096 tokens to 5.26 of 8 ranks on average: 160 MB of FP8 rows, scales and side records leave the SMs.
    read, written = KERNELS["dispatch"].moved_bytes(
        {"tokens": 4096, "ranks": 8, "row_bytes": 7168, "side_bytes": 384, "copies": 21_545}
    )
    assert written == 21_545 * 7552 and read == 4096 * (7552 + 32)
    # Over two nodes of two, nearly all tokens to both: a row once over a rail, then to 14,791 receive rows.
    rows = {"sent": 4082, "kept": 4082, "copies": 14_791, "tokens": 4096, "hidden": 7168}
    read, written = KERNELS["dispatch_2hop"].moved_bytes(rows | {"row_bytes": 7168, "side_bytes": 384})
    assert read == 3 * 4082 * 7552 and written == 4082 * 7680 + 14_791 * 7552
    read, written = KERNELS["combine_2hop"].moved_bytes(rows)
    assert read == (14_791 + 8164) * 14336 and written == (8164 + 4096) * 14336


def test_shared_fixtures_import_nothing_of_the_simulator() -> None:
    # GPU machines often have no SimPy: the kernels' tests must be collected there.
    tree = ast.parse((Path(__file__).parent.parent / "conftest.py").read_text("utf-8"))
    imported = {n.module or "" for n in tree.body if isinstance(n, ast.ImportFrom)}
    imported |= {alias.name for n in tree.body if isinstance(n, ast.Import) for alias in n.names}
    assert imported and not any(name.split(".")[0] in ("moesim", "simpy") for name in imported)
