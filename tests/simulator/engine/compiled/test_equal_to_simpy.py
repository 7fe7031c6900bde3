"""The compiled engine against SimPy: every record of 40 random steps (of 1,000 in `make proof`)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import random_steps
from msgspec.structs import replace
from random_steps import differences, random_step

from moesim.simulator.engine.compiled import state
from moesim.simulator.engine.compiled.engine import run_compiled
from moesim.simulator.engine.program import Program
from moesim.simulator.engine.records import ShortTimes
from moesim.simulator.engine.registry import engine_of


@pytest.mark.usefixtures("compiled_code")
@pytest.mark.parametrize("first", range(0, 40, 20))
def test_every_record_of_random_steps_is_equal(toy: Callable[..., Program], first: int) -> None:
    for seed in range(first, first + 20):
        programs = random_step(toy, seed)
        executions = run_compiled(programs)
        found = differences(executions, engine_of("simpy").execute(programs))
        assert not found, f"step {seed}: {found}"
        assert isinstance(executions[0].times.ends, ShortTimes)


@pytest.mark.usefixtures("compiled_code")
def test_actions_of_more_than_two_seconds_take_64_bits(
    toy: Callable[..., Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_steps, "COMPUTE_NS", ((10, 2**29, 2**31 - 1),) * 5)
    for seed in range(8):
        programs = random_step(toy, seed)
        executions = run_compiled(programs)
        found = differences(executions, engine_of("simpy").execute(programs))
        assert not found, f"step {seed}: {found}"
        assert isinstance(executions[0].times.ends, np.ndarray)


@pytest.mark.usefixtures("compiled_code")
def test_ends_of_tasks_that_take_too_much_memory_are_worked_out_again(
    toy: Callable[..., Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "MOST_BYTES", 0)
    for seed in range(20):
        programs = random_step(toy, seed)
        executions = run_compiled(programs)[::-1]  # in any order
        found = differences(executions, engine_of("simpy").execute(programs)[::-1])
        assert not found, f"step {seed}: {found}"


def test_the_comparison_sees_one_nanosecond(toy: Callable[..., Program]) -> None:
    programs = random_step(toy, 0)
    one, other = (engine_of("simpy").execute(programs) for _ in range(2))
    assert not differences(one, other)
    other[0].times.ends[-1, 0] += 1
    assert differences(one, other) == ["group 0: ends"]
    assert "group 0: end of the step" in differences([replace(one[0], end_ns=one[0].end_ns + 1)], other[:1])
