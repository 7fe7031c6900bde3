"""A synthetic machine with known laws, and calibrations of it without a GPU."""

from __future__ import annotations

import datetime
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from moesim.hwmodels.calibration import CalibrationProfile, load_profile
from moesim.kernels.calibrate import CalibrationProgress, Options, build_plan, calibrate
from moesim.kernels.calibrate.protocol import (
    Facts,
    Grid,
    Sample,
    TaskFailed,
    TimingTask,
)
from moesim.kernels.machine import Gpu, MeasuredMachine

ALL = frozenset({"cupy", "torch", "nccl"})
TODAY = datetime.date(2026, 11, 20)


def machine(gpus: int = 8, **changes: Any) -> MeasuredMachine:
    one = Gpu(0, "NVIDIA H200", "0000:00:00.0", 141 << 30, 0, 0.0, False, 0, 132, 1980e6, 700.0)
    peers = tuple(tuple(i != j for j in range(gpus)) for i in range(gpus))
    return MeasuredMachine(
        tuple(replace(one, index=i, **changes) for i in range(gpus)), "580.159.04", "13.0", peers
    )


def saturate(n: float, slope: float, limit: float) -> float:
    return float(((slope * n) ** -8 + limit**-8) ** (-1 / 8))


class Synthetic:
    """A machine whose times follow known laws with 1 % of noise."""

    def __init__(
        self,
        machine: MeasuredMachine,
        *,
        quick: bool,
        wanted: Callable[[TimingTask], bool],
        libraries: frozenset[str] = ALL,
    ) -> None:
        self.facts, self.quick, self._wanted = Facts(len(machine.gpus), libraries), quick, wanted
        self.done: list[TimingTask] = []
        self.stop_after = 10**9
        self.broken: set[str] = set()

    def wanted(self, task: TimingTask) -> bool:
        return self._wanted(task)

    def sample(self, measurement: Grid, task: TimingTask) -> Sample:
        if len(self.done) >= self.stop_after:
            raise KeyboardInterrupt
        self.done.append(task)
        if task.measurement in self.broken:
            raise TaskFailed("made to fail")
        seconds, values = TRUTH[task.measurement](task.parameters)
        rng = random.Random(task.key)
        return Sample(
            tuple(seconds * (1 + rng.gauss(0, 0.01)) for _ in range(9)), {**values, "power_w": 500.0}
        )


def _all_to_all(p: Any) -> tuple[float, dict[str, float]]:
    size = p["tokens"] * 5.295 * (7392 if "fp8" in p["operation"] else 14336)
    rate = saturate(p["sms"], 20e9, 350e9)
    return 40e-6 + size / rate, {"bytes": size, "crossing": 1 - 1 / p["ranks"]}


def _two_hop(p: Any) -> tuple[float, dict[str, float]]:
    size = p["tokens"] * 5.295 * (14336 if "combine" in p["operation"] else 7392)
    return 30e-6 + size / saturate(p["sms"], 15e9, 320e9), {"bytes": size, "rail_bytes": size / 4}


def _copy(p: Any) -> tuple[float, dict[str, float]]:
    return 10e-6 + p["size_bytes"] / saturate(p["ctas"], 45e9, 370e9), {"bytes": float(p["size_bytes"])}


def _nccl(p: Any) -> tuple[float, dict[str, float]]:
    total = p["size_bytes"] * (p["ranks"] if p["operation"] == "all_gather" else 1)
    factor = 2.0 if p["beside"] == "gemm" else 1.0
    values = {"bytes": float(p["size_bytes"])}
    if p["beside"] == "timed gemm":
        values |= {"lost": 0.2, "low": 0.15, "high": 0.3}
    return (30e-6 + total * (p["ranks"] - 1) / p["ranks"] / 340e9) * factor, values


def _gemm(p: Any) -> tuple[float, dict[str, float]]:
    flop = 2.0 * p["m"] * p["n"] * p["k"]
    values = {"flop": flop}
    if p["kind"] == "sustained":
        values |= {"sustained_clock_hz": 1725e6, "sustained_power_w": 690.0}
    return flop / (750e12 if p["dtype"] == "bf16" else 1200e12), values


def _attention(p: Any) -> tuple[float, dict[str, float]]:
    products = 320 if p["direction"] == "forward" else 3 * 192 + 2 * 128
    flop = p["heads"] * p["length"] ** 2 * products
    around = p["heads"] * p["length"] * (4 * 128 + 10 * 192) / 3.9e12 if p["direction"] == "backward" else 0.0
    return flop / 580e12 + around, {"flop": float(flop)}


def _moved(p: Any) -> tuple[float, dict[str, float]]:
    size = 2.0 * p["size_bytes"] if "size_bytes" in p else 3.03 * p["rows"] * 7168
    return 3e-6 + size / saturate(p["ctas"], 97e9, 3.9e12), {"bytes": size}


SLOPE = {"attention": 0.012, "memory": 0.006}


def _interference(p: Any) -> tuple[float, dict[str, float]]:
    """Told of exactly the copy's SMs an operator runs badly; two more help, four more cost a little."""
    margin = {0: 0.2, 2: 0.0, 4: 0.05}.get(p["left_free"] - p["sms"], 0.0)
    slope = SLOPE.get(p["operator"], 0.009 if p["left_free"] else 0.018)
    ratio = 1 + slope * p["sms"] + (margin if p["left_free"] else 0.0)
    carried = 350e9 / (1 + 4 / p["sms"])
    values = {"ratio": ratio, "ratio_low": ratio * 0.98, "ratio_high": ratio * 1.02}
    return 1e-3 * ratio, {**values, "copy_bytes_per_s": carried, "copy_alone_bytes_per_s": 350e9}


HOST_S = 10e-6
GAP_S = 1.93e-6
"""Gap between two launches in the profile hopper-launch."""
TRUTH: dict[str, Callable[[Any], tuple[float, dict[str, float]]]] = {
    "all_to_all": _all_to_all,
    "copy": _copy,
    "two_hop": _two_hop,
    "nccl": _nccl,
    "gemm": _gemm,
    "attention": _attention,
    "hbm": _moved,
    "quantise": _moved,
    "interference": _interference,
    "barrier": lambda p: (4e-6 + 0.3e-6 * p["ranks"], {}),
    "host": lambda p: (HOST_S, {} if p["call"] == "gate" else {"backward_s": 2 * HOST_S}),
    "compiled": lambda p: (p["bytes"] / 1e12 + p["launches"] * GAP_S, {}),
    "operators": lambda p: (
        (2.0 * p["m"] * p["n"] * p["k"] / 600e12, {"flop": 2.0 * p["m"] * p["n"] * p["k"]})
        if "m" in p
        else (p["bytes"] / 2e12 + p["launches"] * GAP_S, {})
    ),
}


def run(
    output: Path,
    gpus: int = 8,
    *,
    set_up: Callable[[Synthetic], None] | None = None,
    libraries: frozenset[str] = ALL,
    **options: Any,
) -> tuple[CalibrationProfile, list[Synthetic], list[CalibrationProgress]]:
    contexts: list[Synthetic] = []
    seen: list[CalibrationProgress] = []

    def make(found: MeasuredMachine, /, *, quick: bool, wanted: Callable[[TimingTask], bool]) -> Synthetic:
        contexts.append(Synthetic(found, quick=quick, wanted=wanted, libraries=libraries))
        if set_up:
            set_up(contexts[-1])
        return contexts[-1]

    path = calibrate(
        Options(output=output, **options), seen.append, machine=machine(gpus), context=make, today=TODAY
    )
    return load_fresh(path), contexts, seen


def interrupted(path: Path, after: int, **options: Any) -> Path:
    """The rows of a quick run that was stopped after so many tasks."""
    with pytest.raises(KeyboardInterrupt):
        run(path, set_up=lambda c: setattr(c, "stop_after", after), quick=True, **options)
    return path.with_name(f"{path.stem}.rows.jsonl")


QUICK_TASKS = len(build_plan(Facts(8, ALL), quick=True).tasks)


def load_fresh(path: Path) -> CalibrationProfile:
    """`load_profile` remembers files by path; a copy under another name is read anew."""
    copy = path.with_name(f"{path.stem}-{random.random()}{path.suffix}")
    copy.write_bytes(path.read_bytes())
    return load_profile(copy)
