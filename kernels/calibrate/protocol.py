"""Interfaces of measurements: each lists its tasks, does one on a GPU, and yields rows of plain numbers."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from moesim.hwmodels.errors import InputError

Parameter = int | float | str

FORMER_KEYS = {"told": "left_free", "told_alone_ratio": "aware_alone_ratio"}
"""Names of parameters and values in rows of earlier releases, with their present names."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The resources that a plan can use: GPUs that all reach each other, and importable libraries."""

    gpus: int
    libraries: frozenset[str]
    sms: int = 132


@dataclass(frozen=True, slots=True)
class TimingTask:
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


@dataclass(frozen=True, slots=True)
class Sample:
    """Timings of one task in seconds, and other measured `values` (SI units in the keys)."""

    times_s: tuple[float, ...]
    values: Mapping[str, float] = field(default_factory=dict)


class TaskFailed(Exception):  # noqa: N818 - a result, not a fault of the program
    """A task that this machine cannot do; a row records the reason and the run continues."""


@dataclass(frozen=True, slots=True)
class TimedRow:
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
            row = cls(**{key: _renamed(value) for key, value in data.items()})
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


def _renamed(value: Any) -> Any:
    """Parameters or values under their present names."""
    return {FORMER_KEYS.get(k, k): v for k, v in value.items()} if isinstance(value, dict) else value


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

    def sample(self, measurement: Measurement, task: TimingTask) -> Sample:
        """Do one task; raises TaskFailed where this machine cannot."""


class Measurement(Protocol):
    """One kind of measurement. Implementations are data (`Grid`), so that planning is cheap."""

    @property
    def name(self) -> str:
        """Its name on the command line and in the journal."""

    @property
    def title(self) -> str:
        """What it measures, in words."""

    def needs(self, facts: Facts) -> str:
        """What is missing to run it at all, or nothing."""

    def tasks(self, facts: Facts, quick: bool) -> list[TimingTask]:
        """Its tasks, the most important first."""

    def estimate_s(self, facts: Facts, quick: bool) -> float:
        """Estimated seconds of the measurement."""

    def run(self, context: Context) -> Iterator[TimedRow]:
        """Do every wanted task and yield its row when it is done."""


@dataclass(frozen=True, slots=True)
class Grid:
    """A measurement over a grid of parameters; `on_gpu` does one task with a `gpu_session.Session`.

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

    def needs(self, facts: Facts) -> str:
        """What is missing to run it at all, or nothing."""
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

    def run(self, context: Context) -> Iterator[TimedRow]:
        """Do every wanted task; a failed one becomes a row with its reason."""
        for task in self.tasks(context.facts, context.quick):
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
