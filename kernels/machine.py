"""Facts of this machine's GPUs from NVML (package nvidia-ml-py, optional): kind, load, peers, clocks.

Importing this module needs no package; every reader says in one sentence what is missing.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from msgspec import Struct

from moesim.hwmodels.errors import InputError

BUSY_UTILISATION = 0.05
BUSY_MEMORY_BYTES = 1 << 30
"""Memory in use above which a GPU counts as busy; a driver alone takes a few hundred MB."""

_READ, _WRITE = 0, 1  # nvmlGpuP2PCapsIndex_t
_CORES_PER_SM = 128  # Ampere GA102 and later; GA100 has 64

_ACCELERATORS = (
    ("H200", "h200-sxm"),
    ("H800", "h800-sxm"),
    ("H100", "h100-sxm"),
    ("H20", "h20"),
    ("A100", "a100-sxm"),
    ("B200", "b200-sxm"),
)


class Gpu(Struct, frozen=True):
    """One GPU; a field is None where the driver does not report it."""

    index: int
    name: str
    bus_id: str
    memory_bytes: int
    memory_used_bytes: int
    utilisation: float
    mig: bool
    other_processes: int
    sms: int | None = None
    sm_clock_max_hz: float | None = None
    power_limit_w: float | None = None

    @property
    def busy(self) -> str:
        """Why measurements on this GPU would not count; empty where they would."""
        reasons = []
        if self.utilisation > BUSY_UTILISATION:
            reasons.append(f"{self.utilisation:.0%} utilised")
        if self.other_processes:
            reasons.append(f"{self.other_processes} other process(es) on it")
        elif self.memory_used_bytes > BUSY_MEMORY_BYTES:
            reasons.append(f"{self.memory_used_bytes / 2**30:.1f} GiB of memory in use")
        return ", ".join(reasons)


class MeasuredMachine(Struct, frozen=True):
    """The GPUs of one machine; `peers[i][j]` is true where GPU i can access GPU j's memory directly."""

    gpus: tuple[Gpu, ...]
    driver: str
    cuda: str
    peers: tuple[tuple[bool, ...], ...]

    @property
    def title(self) -> str:
        """Number and name of the GPUs, such as "8x NVIDIA H200"."""
        names = sorted({gpu.name for gpu in self.gpus})
        return f"{len(self.gpus)}x {' and '.join(names)}"

    @property
    def accelerator(self) -> str | None:
        """Name of the shipped accelerator of these GPUs, or None."""
        found = {accelerator_name(gpu.name) for gpu in self.gpus}
        return found.pop() if len(found) == 1 else None

    def subset(self, indices: Sequence[int]) -> MeasuredMachine:
        """The machine with only some GPUs, in this order; raises InputError for an index out of range."""
        bad = [i for i in indices if not 0 <= i < len(self.gpus)]
        if bad or not indices or len(set(indices)) != len(indices):
            raise InputError(
                f"GPUs {list(indices)} cannot be chosen: this machine has the GPUs 0 to "
                f"{len(self.gpus) - 1}; name each at most once"
            )
        peers = tuple(tuple(self.peers[i][j] for j in indices) for i in indices)
        return MeasuredMachine(tuple(self.gpus[i] for i in indices), self.driver, self.cuda, peers)

    def reachable(self, count: int) -> bool:
        """Whether the first `count` GPUs all reach each other."""
        if count > len(self.gpus):
            return False
        return all(self.peers[i][j] for i in range(count) for j in range(count) if i != j)


class State(Struct, frozen=True):
    """A GPU's clock, power and temperature at one moment; None where the driver does not report it."""

    sm_clock_hz: float | None
    power_w: float | None
    temperature_c: float | None


def accelerator_name(gpu_name: str) -> str | None:
    """The shipped accelerator for the GPU name that a driver reports, or None.

    A PCIe or NVL board of the same family is not the SXM part; its clocks, power and links differ.
    """
    words = gpu_name.upper().replace("-", " ").split()
    if any(word in ("PCIE", "NVL", "GH200", "GB200") for word in words):
        return None
    return next((ours for theirs, ours in _ACCELERATORS if theirs in words), None)


def read_machine(nvml: Any = None) -> MeasuredMachine:
    """The GPUs that the driver lists; `nvml` replaces the module pynvml in tests.

    Raises InputError in one sentence without the package, without a driver or without a GPU.
    """
    with _opened(nvml) as api:
        count = api.nvmlDeviceGetCount()
        if count == 0:
            raise InputError("the NVIDIA driver lists no GPU on this machine; run on a machine with one")
        handles = [api.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
        peers = tuple(
            tuple(
                i != j
                and all(
                    _ask(partial(api.nvmlDeviceGetP2PStatus, a, b, what)) == 0 for what in (_READ, _WRITE)
                )
                for j, b in enumerate(handles)
            )
            for i, a in enumerate(handles)
        )
        version = api.nvmlSystemGetCudaDriverVersion()
        return MeasuredMachine(
            gpus=tuple(_read_gpu(api, handle, i) for i, handle in enumerate(handles)),
            driver=_text(api.nvmlSystemGetDriverVersion()),
            cuda=f"{version // 1000}.{version % 1000 // 10}",
            peers=peers,
        )


def read_state(bus_id: str, nvml: Any = None) -> State:
    """Clock, power and temperature now of the GPU at a PCI bus id; raises InputError as `read_machine`."""
    with _opened(nvml) as api:
        handle = api.nvmlDeviceGetHandleByPciBusId(bus_id.encode())
        clock = _ask(lambda: api.nvmlDeviceGetClockInfo(handle, api.NVML_CLOCK_SM))
        power = _ask(lambda: api.nvmlDeviceGetPowerUsage(handle))
        return State(
            sm_clock_hz=None if clock is None else clock * 1e6,
            power_w=None if power is None else power / 1e3,
            temperature_c=_ask(lambda: api.nvmlDeviceGetTemperature(handle, api.NVML_TEMPERATURE_GPU)),
        )


def refusals(machine: MeasuredMachine, *, allow_busy: bool = False) -> list[str]:
    """The reasons why this machine cannot be measured, each with its remedy; empty when it can."""
    found = []
    for gpu in machine.gpus:
        if gpu.mig:
            found.append(
                f"GPU {gpu.index} ({gpu.name}) is split by MIG, so its SMs and links are not all there; "
                "measure a GPU without MIG (--gpus)"
            )
        if gpu.busy and not allow_busy:
            found.append(
                f"GPU {gpu.index} ({gpu.name}) is busy ({gpu.busy}), which would spoil every figure; "
                "wait, choose other GPUs (--gpus), or pass --allow-busy to measure and mark the profile"
            )
    names = {gpu.name for gpu in machine.gpus}
    if len(names) > 1:
        found.append(f"the GPUs differ ({', '.join(sorted(names))}); choose equal ones with --gpus")
    return found


@contextmanager
def _opened(api: Any) -> Iterator[Any]:
    """NVML, initialised and shut down afterwards."""
    if api is None:
        try:
            api = importlib.import_module("pynvml")
        except ImportError:
            raise InputError(
                "GPU facts need the package nvidia-ml-py; install moesim[gpu-cu12] or moesim[gpu-cu13], "
                "by the CUDA version of the driver"
            ) from None
    try:
        api.nvmlInit()
    except Exception as error:  # NVMLError_LibraryNotFound, NVMLError_DriverNotLoaded and others
        raise InputError(
            f"no working NVIDIA driver on this machine ({_text(error)}); calibration needs an NVIDIA GPU "
            "(predictions do not: choose a shipped profile)"
        ) from None
    try:
        yield api
    finally:
        _ask(api.nvmlShutdown)


def _read_gpu(api: Any, handle: Any, index: int) -> Gpu:
    memory = api.nvmlDeviceGetMemoryInfo(handle)
    busy = _ask(lambda: api.nvmlDeviceGetUtilizationRates(handle).gpu) or 0
    name = _text(api.nvmlDeviceGetName(handle))
    clock = _ask(lambda: api.nvmlDeviceGetMaxClockInfo(handle, api.NVML_CLOCK_SM))
    limit = _ask(lambda: api.nvmlDeviceGetEnforcedPowerLimit(handle))
    cores = _ask(lambda: api.nvmlDeviceGetNumGpuCores(handle))
    others = _ask(lambda: [p.pid for p in api.nvmlDeviceGetComputeRunningProcesses(handle)]) or []
    mig = _ask(lambda: api.nvmlDeviceGetMigMode(handle)[0])
    return Gpu(
        index=index,
        name=name,
        bus_id=_text(api.nvmlDeviceGetPciInfo(handle).busId),
        memory_bytes=int(memory.total),
        memory_used_bytes=int(memory.used),
        utilisation=busy / 100.0,
        mig=mig == 1,
        other_processes=sum(pid != os.getpid() for pid in others),
        sms=None if cores is None else cores // (64 if "A100" in name else _CORES_PER_SM),
        sm_clock_max_hz=None if clock is None else clock * 1e6,
        power_limit_w=None if limit is None else limit / 1e3,
    )


def _ask(question: Callable[[], Any]) -> Any:
    """The answer, or None where this driver or board does not support the query (NVMLError)."""
    try:
        return question()
    except Exception:
        return None


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
