"""Compiled functions in memory: they need no Numba, and equal NumPy to the last bit."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesim.hwmodels.errors import InputError
from moesim.simulator.cost.formulas import payload_seconds
from moesim.simulator.cost.table import PhaseCost, TransferCost
from moesim.simulator.engine.compiled import loader
from moesim.simulator.engine.link_map import FoldedLinkMap
from moesim.simulator.engine.program import LONGEST_PHASE_S, NS, Formula, MemberVariation
from moesim.simulator.engine.task_durations import CompiledPhases, TaskDurations, use_for_phases
from moesim.simulator.schedules import build

if loader.numba_version() is None:
    pytest.skip("Numba is not installed", allow_module_level=True)


pytestmark = pytest.mark.usefixtures("compiled_code")


def phases() -> CompiledPhases:
    return CompiledPhases(loader.native())


def rows(fixed_s: float, row_s: float, load: Any, factor: Any) -> Any:
    """The durations as `task_durations` computes them with NumPy."""
    seconds = (fixed_s + row_s * (1.0 if load is None else load)) * (1.0 if factor is None else factor)
    return np.rint(seconds * NS)


SECONDS = st.floats(0.0, 1e-2) | st.floats(0.0, 10.0)


@given(SECONDS, SECONDS, st.booleans(), st.booleans(), st.integers(0, 2**32 - 1))
def test_durations_and_their_figures_are_those_of_numpy(
    fixed_s: float, row_s: float, loaded: bool, varied: bool, seed: int
) -> None:
    shape = 1 + seed % 7, 1 + seed % 13
    draw, cv = np.random.default_rng(seed), 0.4  # so wide that some noise would be below 0
    load = draw.exponential(size=shape) if loaded else None
    draws = draw.standard_normal(shape, dtype=np.float32) if varied else None
    clock = draw.uniform(0.8, 1.2, shape)
    places = [0 if a is None else a.__array_interface__["data"][0] for a in (load, draws, clock)]
    found = phases().phase_rows(Formula(fixed_s, row_s, places[0], places[1], places[2], cv), shape)
    noise = np.ones(shape) if draws is None else np.maximum(draws.astype(np.float64) * cv + 1.0, 0.0)
    expected = np.broadcast_to(rows(fixed_s, row_s, load, noise * clock), shape).astype(np.int64)
    for own, right in zip(found, (expected, expected.max(axis=1), expected.sum(axis=1)), strict=True):
        np.testing.assert_array_equal(own, right)


@given(SECONDS, SECONDS, st.booleans(), st.integers(0, 2**32 - 1))
def test_payloads_follow_from_the_loads(nic_s: float, scale_up_s: float, loaded: bool, seed: int) -> None:
    shape = 1 + seed % 7, 1 + seed % 13
    draw = np.random.default_rng(seed)
    node_load, load = (draw.exponential(size=(1, *shape)) for _ in range(2))
    variation = MemberVariation(np.ones((1, shape[1])), load, node_load, 0.0, seed=1)
    made = TaskDurations(build("gpipe", 1, shape[0]), 1, variation, FoldedLinkMap(1, 1.0, 1.0, False), 0)
    cost = TransferCost(1e-6, nic_s, scale_up_s, 1e6, 1e6)
    found = made.transfer(0, "dispatch F", 0 if loaded else None, cost)
    loads = (node_load[0], load[0]) if loaded else (np.ones(shape), np.ones(shape))
    seconds = payload_seconds((nic_s, loads[0]), (scale_up_s, loads[1]))
    assert found.given_ns is None
    np.testing.assert_array_equal(found.payload_ns, seconds.max(axis=1) * NS)
    np.testing.assert_array_equal(found.member_ns, np.rint(seconds * NS).astype(np.int64))
    each = [found.member_row_ns(microbatch) for microbatch in range(shape[0])]
    np.testing.assert_array_equal(found.member_ns, each)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 1.01 * LONGEST_PHASE_S])
@pytest.mark.parametrize("hop", [0, 1])
def test_a_payload_that_is_none_is_refused(wrong: float, hop: int) -> None:
    loads = np.ones((1, 2, 3)), np.ones((1, 2, 3))
    loads[hop][0, 1, 1] = wrong
    variation = MemberVariation(np.ones((1, 3)), loads[0], loads[1], 0.0, seed=1)
    made = TaskDurations(build("gpipe", 1, 2), 1, variation, FoldedLinkMap(1, 1.0, 1.0, False), 0)
    with pytest.raises((InputError, OverflowError)):
        made.transfer(0, "dispatch F", 0, TransferCost(1e-6, 1.0, 1.0, 1e6, 1e6))


def durations(clock: float) -> TaskDurations:
    """Durations of one stage with three members, the last of which is slow."""
    schedule = build("1f1b", 1, 2)
    variation = MemberVariation(
        np.array([[1.0, 1.0, clock]]), np.zeros((0, 2, 3)), np.zeros((0, 2, 3)), 0.01, seed=1
    )
    return TaskDurations(schedule, 1, variation, FoldedLinkMap(1, 1.0, 1.0, False), 0)


@pytest.mark.parametrize(("share", "clock"), [(1e-6, 1.0), (0.3, 1.0), (0.2, 1.5)])
def test_long_phases_are_worked_out_and_checked_at_once(share: float, clock: float) -> None:
    """A phase that noise might make longer than any real one has no formula; its durations are the same."""
    use_for_phases(loader.native())
    made = durations(clock)
    phase = made.rows((0, 0, "mlp F"), PhaseCost(share * LONGEST_PHASE_S), None)
    assert (phase.formula is not None) == (share < 1e-3)
    draws, clocks = made._noise((0, 0, "mlp F"))
    noise = np.maximum(np.asarray(draws).astype(np.float64) * 0.01 + 1.0, 0.0)
    expected = rows(share * LONGEST_PHASE_S, 0.0, None, noise * clocks)
    np.testing.assert_array_equal(phase.ns, expected.astype(np.int64))
    np.testing.assert_array_equal(phase.slowest_ns, expected.max(axis=1))


@pytest.mark.parametrize(
    ("seconds", "clock", "error"),
    [
        (1.2 * LONGEST_PHASE_S, 1.0, InputError),
        (float("inf"), 1.0, InputError),
        (float("nan"), 1.0, OverflowError),
        (1.0, float("nan"), OverflowError),
    ],
)
def test_a_duration_that_is_none_is_refused(seconds: float, clock: float, error: type[Exception]) -> None:
    use_for_phases(loader.native())
    with pytest.raises(error):
        durations(clock).rows((0, 0, "mlp F"), PhaseCost(seconds), None)


def test_a_process_that_finds_compiled_code_does_not_import_numba() -> None:
    if not loader.is_ready():
        pytest.skip("there is no folder for compiled code here")
    script = (
        "import sys; from moesim.simulator.engine.compiled import loader;"
        "loader.native(); assert 'numba' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_function_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "CFUNCTYPE", lambda *_: lambda _address: lambda *_arguments: 1)
    content = loader._content()
    if content is None:
        pytest.skip("there is no folder for compiled code here")
    with pytest.raises(RuntimeError, match=r"the compiled function .*start.* failed"):
        loader._loaded(content).start(0)
