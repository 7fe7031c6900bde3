"""Interfaces of measurements: each lists its tasks, does one on a GPU, and yields rows of plain numbers."""

from __future__ import annotations

import ctypes.util
import importlib.util
import json
import math
import os
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct, field

from moesim.hwmodels.errors import InputError, MoesimError
from moesim.kernels.launch import DeviceTimeoutError, GpuGroup, cupy
from moesim.kernels.machine import MeasuredMachine, read_state
from moesim.kernels.timing import StartGate, time_group

Parameter = int | float | str

TIMED_GEMM = "timed gemm"
"""Collectives beside which the GEMMs are timed, in the place of the collective beside GEMMs."""
FORMER_KEYS = {"told": "left_free", "told_alone_ratio": "aware_alone_ratio"}
"""Names of parameters and values in rows of earlier releases, with their present names."""


class Facts(Struct, frozen=True):
    """The resources that a plan can use: GPUs that all reach each other, and importable libraries."""

    gpus: int
    libraries: frozenset[str]
    sms: int = 132
    operators: tuple[Mapping[str, Parameter], ...] = ()
    """Operators of the model that the user named; see `operators.py`."""


class TimingTask(Struct, frozen=True):
    """One thing to time, named by its parameters; `key` is the same in every run."""

    measurement: str
    parameters: Mapping[str, Parameter]

    @property
    def key(self) -> str:
        """The task's identity in the journal."""
        return json.dumps([self.measurement, dict(sorted(self.parameters.items()))], separators=(",", ":"))

    @property
    def text(self) -> str:
        """The task in words, for the progress display."""
        return f"{self.measurement} " + " ".join(f"{k}={v}" for k, v in self.parameters.items())


class Sample(Struct, frozen=True):
    """Timings of one task in seconds, and other measured `values` (SI units in the keys)."""

    times_s: tuple[float, ...]
    values: Mapping[str, float] = field(default_factory=dict)


class TaskFailed(Exception):  # noqa: N818 - a result, not a fault of the program
    """A task that this machine cannot do; a row records the reason and the run continues."""


class TimedRow(Struct, frozen=True):
    """A finished task with the median and quartiles of its times, or the reason why there are none."""

    measurement: str
    parameters: Mapping[str, Parameter]
    seconds: float = math.nan
    low_s: float = math.nan
    high_s: float = math.nan
    repeats: int = 0
    values: Mapping[str, float] = field(default_factory=dict)
    failed: str = ""

    @property
    def ok(self) -> bool:
        """Whether the row holds a time."""
        return not self.failed

    @property
    def task(self) -> TimingTask:
        """The task that the row answers."""
        return TimingTask(self.measurement, self.parameters)

    def to_json(self) -> str:
        """One line of the journal."""
        data: dict[str, Any] = {"measurement": self.measurement, "parameters": dict(self.parameters)}
        if self.failed:
            data["failed"] = self.failed
        else:
            data |= {"seconds": self.seconds, "low_s": self.low_s, "high_s": self.high_s}
            data |= {"repeats": self.repeats, "values": dict(self.values)}
        return json.dumps(data, allow_nan=False)

    @classmethod
    def from_json(cls, data: Any, where: str) -> TimedRow:
        """The row of one parsed line; raises InputError for anything else."""
        try:
            for key in ("parameters", "values"):  # rows of earlier releases have former names
                if isinstance(data.get(key), dict):
                    data[key] = {FORMER_KEYS.get(name, name): value for name, value in data[key].items()}
            row = cls(**data)
            numbers = [*row.values.values()] + ([] if row.failed else [row.seconds, row.low_s, row.high_s])
            if not row.measurement or not all(
                isinstance(n, int | float) and math.isfinite(n) for n in numbers
            ):
                raise ValueError
            if not isinstance(row.parameters, dict) or (row.ok and not row.seconds > 0):
                raise ValueError
        except (TypeError, ValueError, AttributeError):
            raise InputError(
                f"{where}: not a row of a calibration; remove the file to measure from the beginning"
            ) from None
        return row


class Context(Protocol):
    """The place where measurements run: the GPUs, or a stand-in that returns synthetic samples."""

    @property
    def facts(self) -> Facts:
        """The GPUs and libraries that can be used."""

    @property
    def quick(self) -> bool:
        """Whether to measure fewer points and repeats."""

    def wanted(self, task: TimingTask) -> bool:
        """Whether this task is still to be done: not in the journal, and with time left."""

    def sample(self, measurement: Grid, task: TimingTask) -> Sample:
        """Do one task; raises TaskFailed where this machine cannot."""


class Grid(Struct, frozen=True):
    """A measurement over a grid of parameters; `on_gpu` does one task with a `Session`.

    `task_s` and `setup_s` are the seconds of a task and of the set-up on 8 H200, for the estimate.
    """

    name: str
    title: str
    grid: Callable[[Facts, bool], Sequence[Mapping[str, Parameter]]]
    on_gpu: Callable[[Any, Mapping[str, Parameter]], Sample]
    task_s: float
    setup_s: float = 1.0
    min_gpus: int = 1
    libraries: tuple[str, ...] = ("cupy",)
    of_model: bool = False
    """Whether it measures the operators of the model that the user named."""

    def needs(self, facts: Facts) -> str:
        """What is missing to run it at all, or nothing."""
        if self.of_model and not facts.operators:
            return "needs --model"
        if missing := [name for name in self.libraries if name not in facts.libraries]:
            return f"needs {' and '.join(missing)}"
        if facts.gpus < self.min_gpus:
            return f"needs {self.min_gpus} GPUs with peer access, {facts.gpus} usable"
        return ""

    def tasks(self, facts: Facts, quick: bool) -> list[TimingTask]:
        """Its tasks without duplicates, the most important first."""
        seen: dict[str, TimingTask] = {}
        for parameters in self.grid(facts, quick):
            task = TimingTask(self.name, parameters)
            seen.setdefault(task.key, task)
        return list(seen.values())

    def estimate_s(self, facts: Facts, quick: bool) -> float:
        """Estimated seconds of the measurement; quick runs repeat half as often."""
        if self.needs(facts):
            return 0.0
        return self.setup_s + self.task_s * len(self.tasks(facts, quick)) * (0.5 if quick else 1.0)

    def run(self, context: Context, facts: Facts) -> Iterator[TimedRow]:
        """Do every wanted task; a failed one becomes a row with its reason."""
        for task in self.tasks(facts, context.quick):
            if context.wanted(task):
                try:
                    yield row_of(task, context.sample(self, task))
                except TaskFailed as error:
                    yield TimedRow(task.measurement, task.parameters, failed=str(error) or "failed")


def row_of(task: TimingTask, sample: Sample) -> TimedRow:
    """Median and quartiles of a sample; a failed row where it holds no positive finite time."""
    times = sorted(sample.times_s)
    values = dict(sample.values)
    if not times or not all(math.isfinite(t) and t > 0 for t in times):
        return TimedRow(task.measurement, task.parameters, failed="no usable time was measured")
    if not all(math.isfinite(v) for v in values.values()):
        return TimedRow(task.measurement, task.parameters, failed="a counted value is not finite")
    low, _, high = statistics.quantiles(times, n=4) if len(times) > 2 else (times[0], 0.0, times[-1])
    return TimedRow(
        task.measurement,
        task.parameters,
        seconds=statistics.median(times),
        low_s=max(low, times[0]),
        high_s=min(high, times[-1]),
        repeats=len(times),
        values=values,
    )


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
        # The largest number of chosen GPUs, from the first on and at most 8, that all reach each other.
        gpus = 1
        while gpus < min(8, len(machine.gpus)) and machine.reachable(gpus + 1):
            gpus += 1
        libraries = {name for name in ("cupy", "torch") if importlib.util.find_spec(name) is not None}
        libraries |= {"triton"} if importlib.util.find_spec("triton") is not None else set()
        libraries |= {"C compiler"} if any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc"))) else set()
        if "cupy" in libraries and find_library():
            libraries.add("nccl")
        self.facts = Facts(gpus, frozenset(libraries), machine.gpus[0].sms or 132)

    def wanted(self, task: TimingTask) -> bool:
        """Whether this task is still to be done."""
        return self._wanted(task)

    def sample(self, measurement: Grid, task: TimingTask) -> Sample:
        """Do one task and note the clock and power just after it."""
        try:
            sample = measurement.on_gpu(self._session, task.parameters)
        except TaskFailed:
            raise
        except MoesimError as error:
            if isinstance(error, DeviceTimeoutError):
                self._session = Session(self._devices, self.quick)
            raise TaskFailed(str(error)) from None
        except Exception as error:  # a library's own error: out of memory, an unsupported format
            raise TaskFailed(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}") from None
        values = dict(sample.values)
        state = read_state(self.machine.gpus[0].bus_id)
        values |= {"sm_clock_hz": state.sm_clock_hz} if state.sm_clock_hz else {}
        values |= {"power_w": state.power_w} if state.power_w else {}
        return Sample(sample.times_s, values)


def find_library() -> str:
    """Path or name of libnccl.so.2, from the package nvidia-nccl or else the system; empty without one."""
    spec = importlib.util.find_spec("nvidia")
    for place in spec.submodule_search_locations or () if spec else ():
        path = Path(place) / "nccl" / "lib" / "libnccl.so.2"
        if path.is_file():
            return str(path)
    return ctypes.util.find_library("nccl") or ""


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
