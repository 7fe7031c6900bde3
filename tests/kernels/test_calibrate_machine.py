from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from moesim.hwmodels.errors import InputError
from moesim.kernels.machine import MeasuredMachine, accelerator_name, read_machine, read_state, refusals


class NvmlError(Exception):
    pass


class FakeNvml:
    """Eight H200 as NVML describes them; attributes change single answers."""

    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, count: int = 8) -> None:
        self.count, self.mig, self.used, self.busy = count, 0, 600 << 20, 0
        self.pids: list[int] = []
        self.unreachable: set[tuple[int, int]] = set()
        self.init_error: Exception | None = None
        self.shut = 0

    def nvmlInit(self) -> None:  # noqa: N802
        if self.init_error:
            raise self.init_error

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.shut += 1

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Any] = {
            "nvmlDeviceGetCount": lambda: self.count,
            "nvmlDeviceGetHandleByIndex": lambda i: i,
            "nvmlDeviceGetHandleByPciBusId": lambda _: 0,
            "nvmlSystemGetDriverVersion": lambda: "580.159.04",
            "nvmlSystemGetCudaDriverVersion": lambda: 13000,
            "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(total=141 << 30, used=self.used),
            "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=self.busy),
            "nvmlDeviceGetName": lambda _: b"NVIDIA H200",
            "nvmlDeviceGetMaxClockInfo": lambda *_: 1980,
            "nvmlDeviceGetClockInfo": lambda *_: 1725,
            "nvmlDeviceGetPowerUsage": lambda _: 512_000,
            "nvmlDeviceGetEnforcedPowerLimit": lambda _: 700_000,
            "nvmlDeviceGetNumGpuCores": lambda _: 132 * 128,
            "nvmlDeviceGetComputeRunningProcesses": lambda _: [SimpleNamespace(pid=p) for p in self.pids],
            "nvmlDeviceGetMigMode": lambda _: [self.mig, self.mig],
            "nvmlDeviceGetPciInfo": lambda i: SimpleNamespace(busId=f"0000:{i:02X}:00.0"),
            "nvmlDeviceGetP2PStatus": lambda a, b, _: 4 if (a, b) in self.unreachable else 0,
        }
        if name in answers:
            return answers[name]

        def unsupported(*_: Any) -> Any:
            raise NvmlError("Not Supported")

        return unsupported


def test_what_nvml_says_becomes_a_machine() -> None:
    nvml = FakeNvml()
    machine = read_machine(nvml)
    assert machine.title == "8x NVIDIA H200" and machine.accelerator == "h200-sxm"
    assert (machine.driver, machine.cuda) == ("580.159.04", "13.0")
    assert machine.gpus[3].sms == 132 and machine.gpus[3].power_limit_w == 700.0
    assert machine.reachable(8) and not machine.reachable(9)
    assert not refusals(machine) and nvml.shut == 1
    state = read_state("0000:00:00.0", nvml)
    assert state.sm_clock_hz == 1725e6 and state.power_w == 512.0 and state.temperature_c is None
    other = replace(machine.gpus[1], name="NVIDIA A100")
    mixed = MeasuredMachine((machine.gpus[0], other), "1", "13.0", machine.peers)
    assert mixed.accelerator is None and any("differ" in text for text in refusals(mixed))


def test_a_missing_peer_is_seen() -> None:
    nvml = FakeNvml()
    nvml.unreachable = {(0, 5)}
    machine = read_machine(nvml)
    assert machine.reachable(5) and not machine.reachable(6)
    assert machine.subset([1, 2, 5]).reachable(3)


def test_busy_and_split_gpus_are_refused_with_the_way_out() -> None:
    nvml = FakeNvml(1)
    nvml.pids, nvml.busy = [123456789], 37
    (text,) = refusals(read_machine(nvml))
    assert "37% utilised" in text and "1 other process" in text and "--allow-busy" in text
    assert not refusals(read_machine(nvml), allow_busy=True)
    nvml.mig, nvml.pids, nvml.busy, nvml.used = 1, [], 0, 50 << 30  # memory that nobody visible holds
    assert "50.0 GiB" in read_machine(nvml).gpus[0].busy
    assert any("MIG" in text for text in refusals(read_machine(nvml), allow_busy=True))


def test_a_machine_without_driver_package_or_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(0)
    with pytest.raises(InputError, match="no GPU"):
        read_machine(nvml)
    nvml.init_error = NvmlError("NVML Shared Library Not Found")
    with pytest.raises(InputError, match="no working NVIDIA driver"):
        read_machine(nvml)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(InputError, match=r"moesim\[gpu-cu12\]"):
        read_machine()


@pytest.mark.parametrize("indices", [[8], [-1], [], [1, 1]])
def test_gpus_that_are_not_there_are_named(indices: list[int]) -> None:
    with pytest.raises(InputError, match="GPUs 0 to 7"):
        read_machine(FakeNvml()).subset(indices)


@pytest.mark.parametrize(
    ("name", "accelerator"),
    [
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_driver_names_of_the_shipped_accelerators(name: str, accelerator: str | None) -> None:
    assert accelerator_name(name) == accelerator


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ((False, "all", None, None, None, False), "moesim calibrate"),
        ((True, "0,2", None, None, None, False), "moesim calibrate --quick --gpus 0,2"),
        (
            (False, "all", ["copy", "hbm"], "qwen3-30b-a3b", "h200-sxm", True),
            "moesim calibrate --only copy --only hbm --model qwen3-30b-a3b --accelerator h200-sxm "
            "--allow-busy",
        ),
    ],
)
def test_a_profile_records_what_was_asked_for(
    options: tuple[bool, str, list[str] | None, str | None, str | None, bool], text: str
) -> None:
    from moesim.cli.calibrate import _command

    assert _command(*options) == text
