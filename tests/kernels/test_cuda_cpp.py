"""The CUDA C++ counterparts without a GPU: no inline PTX, the stated entry, no spills."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from moesim.kernels import cuda_cpp

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
