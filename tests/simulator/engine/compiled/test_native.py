"""Compiled functions in memory: they need no Numba, and equal NumPy to the last bit."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesim.simulator.cost.formulas import payload_seconds
from moesim.simulator.engine.compiled import loader
from moesim.simulator.engine.program import LONGEST_PHASE_S, NS
from moesim.simulator.engine.task_durations import CompiledPhases

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
    draw = np.random.default_rng(seed)
    load = draw.exponential(size=shape) if loaded else None
    factor = np.abs(draw.normal(1.0, 0.2, shape)) if varied else None
    figures = phases().phase_rows(fixed_s, row_s, load, factor, shape)
    expected = np.broadcast_to(rows(fixed_s, row_s, load, factor), shape).astype(np.int64)
    assert figures is not None
    sums = expected.sum(axis=1)
    wanted = expected, expected.max(axis=1), sums, sums / shape[1]
    for found, right in zip(figures, wanted, strict=True):
        np.testing.assert_array_equal(found, right)


@given(SECONDS, SECONDS, st.booleans(), st.integers(0, 2**32 - 1))
def test_payloads_are_those_of_numpy(nic_s: float, scale_up_s: float, loaded: bool, seed: int) -> None:
    shape = 1 + seed % 7, 1 + seed % 13
    draw = np.random.default_rng(seed)
    loads = (draw.exponential(size=shape), draw.exponential(size=shape)) if loaded else None
    node_load, load = loads or (np.ones(shape), np.ones(shape))
    seconds = payload_seconds((nic_s, node_load), (scale_up_s, load))
    figures = phases().payloads(nic_s, scale_up_s, loads, shape)
    assert figures is not None
    np.testing.assert_array_equal(figures[0], seconds.max(axis=1) * NS)
    np.testing.assert_array_equal(figures[1], np.rint(seconds * NS).astype(np.int64))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 1.01 * LONGEST_PHASE_S])
@pytest.mark.parametrize("hop", [0, 1])
def test_a_payload_that_is_none_is_left_to_the_checks(wrong: float, hop: int) -> None:
    loads = np.ones((2, 3)), np.ones((2, 3))
    loads[hop][1, 1] = wrong
    assert phases().payloads(1.0, 1.0, loads, (2, 3)) is None
    loads[hop][1, 1] = 1.0
    assert phases().payloads(1.0, 1.0, loads, (2, 3)) is not None


def test_a_phase_whose_sum_is_too_long_is_left_to_the_checks() -> None:
    assert phases().phase_rows(0.4 * LONGEST_PHASE_S, 0.0, None, None, (2, 3)) is None
    assert phases().phase_rows(0.3 * LONGEST_PHASE_S, 0.0, None, None, (2, 3)) is not None


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 1.01 * LONGEST_PHASE_S])
def test_a_duration_that_is_none_is_left_to_the_checks(wrong: float) -> None:
    factor = np.ones((2, 3))
    factor[1, 1] = wrong
    assert phases().phase_rows(1.0, 0.0, None, factor, (2, 3)) is None
    factor[1, 1] = 1.0
    assert phases().phase_rows(1.0, 0.0, None, factor, (2, 3)) is not None


@given(st.floats(0.0, 2.0), st.integers(0, 2**32 - 1))
def test_noise_on_clocks_is_that_of_numpy(cv: float, seed: int) -> None:
    draw = np.random.default_rng(seed)
    draws = draw.standard_normal((3, 5), dtype=np.float32)
    clock = draw.uniform(0.9, 1.2, (3, 5))
    expected = np.maximum(draws.astype(np.float64) * cv + 1.0, 0.0) * clock
    np.testing.assert_array_equal(phases().noisy_clock(cv, draws, clock), expected)


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
