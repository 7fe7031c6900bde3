"""Gives measurements their GPUs: groups of ranks, random buffers larger than L2, one set-up at a time."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from moesim.hwmodels.errors import InputError, MoesimError
from moesim.kernels.calibrate.protocol import Facts, Measurement, Sample, TaskFailed, TimingTask
from moesim.kernels.launch import DeviceTimeoutError, GpuGroup
from moesim.kernels.loader import cupy
from moesim.kernels.machine import MeasuredMachine, read_state
from moesim.kernels.timing import StartGate, time_group

BEYOND_L2_BYTES = 300_000_000
"""Least total size of rotated buffers, five times the L2 cache of a Hopper GPU."""

_MAX_SETS = 64


class Session:
    """The GPUs of one process, with the set-ups that measurements share; `devices[0]` does one-GPU tasks."""

    def __init__(self, devices: Sequence[int], quick: bool) -> None:
        """Record the devices; no GPU is touched before a measurement needs it."""
        self.devices, self.quick = tuple(devices), quick
        self._groups: dict[int, tuple[GpuGroup, StartGate]] = {}
        self._kept: tuple[object, Any] | None = None

    @property
    def repeats(self) -> int:
        """Timed repeats of a task."""
        return 7 if self.quick else 15

    def group(self, ranks: int) -> GpuGroup:
        """The first `ranks` GPUs as a group."""
        return self._group(ranks)[0]

    def keep(self, key: object, build: Callable[[], Any]) -> Any:
        """The set-up of a key, built once; the set-up of another key is released first."""
        if self._kept is None or self._kept[0] != key:
            if self._kept is not None and hasattr(self._kept[1], "close"):
                self._kept[1].close()
            self._kept = None
            for device in self.devices:
                with cupy().cuda.Device(device):
                    cupy().get_default_memory_pool().free_all_blocks()
            if "torch" in sys.modules:  # its cache would keep the memory from CuPy
                sys.modules["torch"].cuda.empty_cache()
            self._kept = key, build()
        return self._kept[1]

    def random(self, rank: int, size_bytes: int) -> Any:
        """Random bytes on a rank's GPU, because kernels can run faster on zeros than on data."""
        cp = cupy()
        with cp.cuda.Device(self.devices[rank]):
            array = cp.random.randint(0, 2**31 - 1, size=-(-size_bytes // 4), dtype=cp.int32)
            cp.cuda.Device().synchronize()
            return array.view(cp.uint8)[:size_bytes]

    def sets(self, size_bytes: int) -> int:
        """How many buffers of this size to rotate so that together they exceed the L2 cache."""
        return max(2, min(_MAX_SETS, math.ceil(BEYOND_L2_BYTES / size_bytes)))

    def time(
        self,
        ranks: int,
        work: Callable[[int], None],
        *,
        on: Sequence[int] | None = None,
        before: Callable[[int], None] | None = None,
        each: int = 1,
    ) -> tuple[float, ...]:
        """Seconds per operation of each repeat on the slowest rank; `work` queues `each` operations."""
        group, gate = self._group(ranks)
        rows = time_group(group, work, repeats=self.repeats, warm_up=3, ranks=on, gate=gate, before=before)
        return tuple(max(row) / each for row in rows)

    def _group(self, ranks: int) -> tuple[GpuGroup, StartGate]:
        if ranks not in self._groups:
            group = GpuGroup(self.devices[:ranks])
            self._groups[ranks] = group, StartGate(group)
        return self._groups[ranks]


class GpuContext:
    """Runs tasks on the GPUs of this machine; a failed wait fails that task only and makes new groups."""

    def __init__(
        self,
        machine: MeasuredMachine,
        devices: Sequence[int],
        *,
        quick: bool,
        wanted: Callable[[TimingTask], bool],
    ) -> None:
        """`machine` holds the chosen GPUs, `devices` their CUDA numbers, in the same order."""
        self.machine, self.quick = machine, quick
        self._devices, self._wanted = tuple(devices), wanted
        self._session = Session(devices, quick)
        self.facts = Facts(usable_gpus(machine), libraries(), machine.gpus[0].sms or 132)

    def wanted(self, task: TimingTask) -> bool:
        """Whether this task is still to be done."""
        return self._wanted(task)

    def sample(self, measurement: Measurement, task: TimingTask) -> Sample:
        """Do one task and note the clock and power just after it."""
        try:
            sample: Sample = measurement.on_gpu(self._session, task.parameters)  # type: ignore[attr-defined]
        except TaskFailed:
            raise
        except DeviceTimeoutError as error:
            self._session = Session(self._devices, self.quick)
            raise TaskFailed(str(error)) from None
        except MoesimError as error:
            raise TaskFailed(str(error)) from None
        except Exception as error:  # a library's own error: out of memory, an unsupported format
            raise TaskFailed(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}") from None
        values = dict(sample.values)
        state = read_state(self.machine.gpus[0].bus_id)
        values |= {"sm_clock_hz": state.sm_clock_hz} if state.sm_clock_hz else {}
        values |= {"power_w": state.power_w} if state.power_w else {}
        return Sample(sample.times_s, values)


def libraries() -> frozenset[str]:
    """Names of the optional libraries that can be imported; nothing is imported here."""
    found = {name for name in ("cupy", "torch") if importlib.util.find_spec(name) is not None}
    if "cupy" in found:
        from moesim.kernels.calibrate.nccl_library import find_library

        found |= {"nccl"} if find_library() else set()
    return frozenset(found)


def usable_gpus(machine: MeasuredMachine) -> int:
    """The largest number of chosen GPUs, from the first on and at most 8, that all reach each other."""
    count = 1
    while count < min(8, len(machine.gpus)) and machine.reachable(count + 1):
        count += 1
    return count


def cuda_devices(machine: MeasuredMachine) -> list[int]:
    """CUDA's numbers of the machine's GPUs; the driver counts by PCI bus, CUDA counts visible GPUs.

    Raises InputError for a GPU that CUDA does not see.
    """
    cp = cupy()
    numbers: dict[str, int] = {}
    for device in range(cp.cuda.runtime.getDeviceCount()):
        numbers[_bus(cp.cuda.runtime.deviceGetPCIBusId(device))] = device
    try:
        return [numbers[_bus(gpu.bus_id)] for gpu in machine.gpus]
    except KeyError:
        raise InputError(
            "CUDA does not see every chosen GPU (CUDA_VISIBLE_DEVICES hides some): choose among the visible "
            "ones with --gpus, or unset CUDA_VISIBLE_DEVICES"
        ) from None


def _bus(text: str) -> str:
    """Bus, device and function of a PCI id; the domain is written with 4 or 8 digits."""
    return text.lower().split(":", 1)[1]
