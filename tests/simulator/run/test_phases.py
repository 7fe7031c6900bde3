from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesim.hwmodels.errors import InputError
from moesim.simulator.run.simulate_run import Level, StepTimes, levels, steps_for, work_seconds
from moesim.simulator.scenario.run_plan import Ramp

V3 = Ramp(sequences=3072, tokens=469e9)


def test_constant_batch_is_the_old_run() -> None:
    assert levels(14.8e12, 15360, 4096, None, 128) == [Level(15360, 235_240)]
    assert steps_for(1.0, 15360, 4096) == 1


def test_deepseek_v3_ramp() -> None:
    found = levels(14.8e12, 15360, 4096, V3, 128)
    assert [level.sequences for level in found] == [*range(3072, 15360, 128), 15360]
    ramped = sum(level.steps * level.sequences * 4096 for level in found[:-1])
    assert 469e9 <= ramped < 469e9 + 15360 * 4096
    # In the limit of small increments: tokens / (length (b1 - b0)) ln(b1 / b0) steps; each increment keeps
    # its smallest batch, which is half an increment of steps more.
    limit = 469e9 / (4096 * 12288) * math.log(5.0)
    half = 469e9 / 4096 / 96 * (1 / 3072 - 1 / 15360) / 2
    assert sum(level.steps for level in found[:-1]) == pytest.approx(limit + half, rel=0.001)
    assert sum(level.steps for level in found) == 242_940


@given(st.integers(1, 50), st.integers(1, 50), st.integers(1, 64), st.floats(1e3, 1e7), st.floats(1.0, 20.0))
def test_a_ramp_covers_its_tokens_in_whole_steps(
    first: int, more: int, by: int, ramp_tokens: float, times: float
) -> None:
    full = first + more * by
    tokens = ramp_tokens * times
    found = levels(tokens, full, 16, Ramp(sequences=first, tokens=ramp_tokens, increment=by), 1)
    trained = sum(level.steps * level.sequences * 16 for level in found)
    assert tokens <= trained < tokens + 16 * full
    assert [level.sequences for level in found] == sorted({level.sequences for level in found})


@pytest.mark.parametrize(
    ("ramp", "words"),
    [
        (Ramp(sequences=64, tokens=1e6), "must be below the full batch of 64"),
        (Ramp(sequences=10, tokens=1e6, increment=7), "not a whole number of increments of 7"),
    ],
)
def test_bad_ramps(ramp: Ramp, words: str) -> None:
    with pytest.raises(InputError, match=words):
        levels(1e9, 64, 16, ramp, 4)


def test_step_times_between_simulated_batches() -> None:
    times = StepTimes((40, 80, 120), (5.0, 10.0, 16.0))
    assert [times.at(s) for s in (40, 60, 80, 100, 120)] == [5.0, 7.5, 10.0, 13.0, 16.0]
    assert times.at(24) == 3.0  # the first line goes on
    assert times.error == pytest.approx(10.5 / 10.0 - 1.0)
    assert StepTimes((120,), (16.0,)).error == 0.0
    assert work_seconds([Level(40, 2), Level(120, 3)], times) == 58.0
