"""PTX without a GPU: it assembles, without spills, within register limits, as the catalog says."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

import moesim.kernels
from moesim.kernels.catalog import KERNELS, Kernel

PTX = Path(moesim.kernels.__file__).parent / "ptx"
HEADINGS = ("Purpose", "Parameters", "Launch", "Memory model", "Traffic", "Limits")
EVERY = [pytest.param(kernel, id=name) for name, kernel in KERNELS.items()]


def ptxas() -> str:
    found = shutil.which("ptxas")
    site = Path(sysconfig.get_paths()["purelib"])
    wheels = sorted(site.glob("nvidia/**/bin/ptxas"))
    if found is None and not wheels:
        pytest.skip("no ptxas: neither on PATH nor in the nvidia-cuda-nvcc wheel")
    return found or str(wheels[-1])


def parameters(source: str) -> list[tuple[str, str]]:
    head = source[source.index(".visible .entry") :]
    found = re.findall(r"\.param \.(\w+) (\w+)", head[: head.index(")\n")])
    return [(name, kind) for kind, name in found]


def assemble(source: Path, target: Path) -> str:
    command = [ptxas(), "-arch=sm_90", "-v", "--warn-on-spills", str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{source.name}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr


@pytest.mark.parametrize("path", sorted(PTX.glob("*.ptx")), ids=lambda path: path.stem)
def test_assembles_without_spills_within_the_register_limit(path: Path, tmp_path: Path) -> None:
    report = assemble(path, tmp_path / "out.cubin")
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report, report
    registers = re.search(r"Used (\d+) registers", report)
    if path.stem != "copy":  # which serves interference; every other kernel stands in the catalog
        assert registers is not None and int(registers[1]) <= KERNELS[path.stem].registers, report


@pytest.mark.parametrize("kernel", EVERY)
def test_the_catalog_states_entry_parameters_and_block_of_the_file(kernel: Kernel) -> None:
    source = kernel.source()
    assert re.findall(r"^\.visible \.entry (\w+)\(", source, re.MULTILINE) == [kernel.entry]
    assert tuple(parameters(source)) == kernel.parameters
    limit = re.search(r"^\.maxntid (\d+), 1, 1", source, re.MULTILINE)
    assert limit is not None and int(limit[1]) == kernel.block[1]
    # All CTAs of a kernel that waits must be resident together: registers must allow the largest block.
    assert kernel.block[1] * kernel.registers <= 65536


@pytest.mark.parametrize("path", sorted(PTX.glob("*.ptx")), ids=lambda path: path.stem)
def test_headers_say_what_a_reader_needs(path: Path) -> None:
    source = path.read_text()
    header = source[: source.index(".version")]
    missing = [heading for heading in HEADINGS if not re.search(rf"^// {heading}\b", header, re.MULTILINE)]
    assert not missing, f"{path.name} lacks {missing}"
    assert re.search(r"^\.version 8\.0$", source, re.MULTILINE)
    assert re.search(r"^\.target sm_90$", source, re.MULTILINE)


@pytest.mark.parametrize("kernel", EVERY)
def test_headers_name_every_parameter_and_status_code(kernel: Kernel) -> None:
    source = kernel.source()
    header = source[: source.index(".version")]
    unnamed = [name for name, _ in kernel.parameters if not re.search(rf"\b{name}\b", header)]
    assert not unnamed
    for code in re.findall(r"cas\.b32 %old, \[%status\], 0, (0x\w+);", source):
        assert code in header


@pytest.mark.parametrize("kernel", EVERY)
def test_waits_have_a_time_limit_and_barriers_may_diverge(kernel: Kernel) -> None:
    source = kernel.source()
    body = source[source.index(".visible") :]
    # bar.sync is the aligned form: undefined after a divergent role branch. barrier.cta.sync is not.
    assert not re.search(r"^\s*bar\.sync", source, re.MULTILINE)
    waits, clocks = body.count("ld.acquire.sys"), body.count("mov.u64             %start, %globaltimer")
    assert clocks >= (1 if waits else 0)
    assert waits == body.count("setp.lt.u64         %late, %now, %limit"), "a poll without a time limit"
