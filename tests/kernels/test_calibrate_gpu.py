"""Every measurement once on real GPUs; skipped with a reason elsewhere."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import replace

from moesim.hwmodels.calibration import load_profile
from moesim.hwmodels.errors import InputError
from moesim.kernels.calibrate import Options, calibrate
from moesim.kernels.calibrate.protocol import Grid, row_of
from moesim.kernels.calibrate.run import MEASUREMENTS
from moesim.kernels.machine import MeasuredMachine, read_machine, refusals

OPERATORS: tuple[dict[str, int | float | str], ...] = (
    {"use": "norm/eager_forward", "bytes": 1.34e8, "launches": 1, "rows": 16384, "width": 2048},
    {"use": "copy/flat", "bytes": 2.7e8, "launches": 1, "elements": 1 << 26, "piece": "copy_out"},
    {"use": "norm/backward", "bytes": 2e8, "launches": 3, "rows": 16384, "width": 2048, "compiled": 1},
)


@cache
def quiet_machine() -> MeasuredMachine:
    """The machine before the first measurement, or a skip with the reason why it cannot be measured."""
    try:
        machine = read_machine()
    except InputError as error:
        pytest.skip(str(error))
    if reasons := refusals(machine):
        pytest.skip("; ".join(reasons))
    return machine


@pytest.mark.gpu
@pytest.mark.parametrize("measurement", MEASUREMENTS, ids=lambda m: m.name)
def test_first_and_last_task_of_every_measurement_give_a_time(measurement: Grid) -> None:
    machine = quiet_machine()
    from moesim.kernels.calibrate.protocol import GpuContext, cuda_devices

    context = GpuContext(machine, cuda_devices(machine), quick=True, wanted=lambda _: True)
    facts = replace(context.facts, operators=OPERATORS)
    if reason := measurement.needs(facts):
        pytest.skip(reason)
    tasks = measurement.tasks(facts, quick=True)
    for task in (tasks[0], tasks[-1]):
        row = row_of(task, context.sample(measurement, task))
        assert row.ok and 1e-7 < row.seconds < 1.0
        assert (row.high_s - row.low_s) / row.seconds < 0.5
        if "bytes" in row.values:
            assert row.values["bytes"] / row.seconds < 10e12
        if "flop" in row.values:
            assert 1e12 < row.values["flop"] / row.seconds < 5e15


@pytest.mark.gpu
def test_a_quick_calibration_writes_a_profile_that_loads(tmp_path: Path) -> None:
    machine = quiet_machine()
    if machine.accelerator is None:
        pytest.skip(f"{machine.title} is not a shipped accelerator")
    options = Options(output=tmp_path / "quick.yaml", quick=True, only=("hbm", "quantise"))
    path = calibrate(options, machine=machine)  # this process holds memory of the GPU by now
    profile = load_profile(path)
    assert any("copy" in curve.used_for for curve in profile.curves)
    assert "driver" in profile.curve("copy.local.sm_rate").source
