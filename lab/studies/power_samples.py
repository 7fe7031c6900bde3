"""Samples power, clocks, temperature and throttle reasons of a GPU in a process of its own (for power.py)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

COLUMNS = (
    "t_s", "power_w", "instant_w", "energy_mj", "sm_mhz", "memory_mhz", "gpu_c", "memory_c", "reasons",
)  # fmt: skip
"""t_s is CLOCK_MONOTONIC; a value that the driver does not give is -1; reasons is a bit set of NVML."""
AVERAGE_POWER, INSTANT_POWER, MEMORY_TEMPERATURE = 185, 186, 82
"""Numbers of NVML's fields of average power, instant power and memory temperature."""


class Sampler:
    """The process that writes one line of samples every `interval_s`."""

    def __init__(self, path: Path, interval_s: float) -> None:
        """Start sampling into a CSV file."""
        self.path = path
        command = [sys.executable, __file__, str(path), str(interval_s), str(os.getpid())]
        self.process = subprocess.Popen(command)

    def rows(self) -> list[list[float]]:
        """The samples so far, in the order of COLUMNS."""
        if not self.path.exists():
            return []
        lines = self.path.read_text().splitlines()
        rows = []
        for line in lines:
            try:
                values = [float(part) for part in line.split(",")]
            except ValueError:
                continue
            if len(values) == len(COLUMNS):
                rows.append(values)
        return rows

    def stop(self) -> None:
        """End the process."""
        self.process.terminate()
        self.process.wait(timeout=10)


def _field(nvml: Any, handle: Any, number: int) -> float:
    value = nvml.nvmlDeviceGetFieldValues(handle, [number])[0]
    return float(value.value.uiVal) if value.nvmlReturn == 0 else -1.0


def _of(read: Any) -> float:
    try:
        return float(read())
    except Exception:
        return -1.0


def sample(nvml: Any, handle: Any) -> list[float]:
    """One row of samples; a failed query gives -1."""
    instant = _of(lambda: _field(nvml, handle, INSTANT_POWER))
    return [
        time.monotonic(),
        _of(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3),
        instant / 1e3 if instant > 0 else -1.0,
        _of(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle)),
        _of(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        _of(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
        _of(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        _of(lambda: _field(nvml, handle, MEMORY_TEMPERATURE)),
        _of(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
    ]


def limits() -> dict[str, float]:
    """Power limit and highest clocks of the board as it was found; empty without NVML."""
    try:
        import pynvml as nvml

        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
    except Exception:
        return {}
    return {
        "power_limit_w": _of(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3),
        "default_power_limit_w": _of(lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle) / 1e3),
        "max_sm_mhz": _of(lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)),
        "max_memory_mhz": _of(lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM)),
    }


def main() -> None:
    """Write samples until the parent process has gone."""
    path, interval_s, parent = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    try:
        import pynvml as nvml

        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
    except Exception as error:
        print(f"no samples: {error!r}", flush=True)
        nvml, handle = None, None
    with path.open("w") as out:
        while os.getppid() == parent:
            began = time.monotonic()
            row = sample(nvml, handle) if nvml else [began] + [-1.0] * (len(COLUMNS) - 1)
            out.write(",".join(f"{value:.4f}".rstrip("0").rstrip(".") for value in row) + "\n")
            out.flush()
            time.sleep(max(0.0, began + interval_s - time.monotonic()))


if __name__ == "__main__":
    main()
