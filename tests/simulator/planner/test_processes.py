"""Results of worker processes as a stream, and what ends a search that runs in them."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from moesim.hwmodels.errors import InputError
from moesim.simulator.common.processes import without_cyclic_collection
from moesim.simulator.planner.processes import (
    LARGEST_PART,
    PARTS,
    engine_processes,
    outcomes,
)


class CancelledError(Exception):
    """What a callback raises to end a search."""


@pytest.mark.parametrize("count", [0, 1, PARTS, PARTS * LARGEST_PART + 3])
def test_every_result_comes_once_with_its_position(count: int) -> None:
    squares = [n * n for n in range(count)]
    assert [value for _, value in outcomes(None, lambda n: n * n, range(count))] == squares
    with ThreadPoolExecutor(2) as pool:
        found = sorted(outcomes(pool, lambda n: n * n, range(count)))
    assert found == list(enumerate(squares))


def test_processes_start_before_the_first_result_is_asked_for() -> None:
    began = Event()
    with ThreadPoolExecutor(1) as pool:
        found = outcomes(pool, lambda event: event.set(), [began])
        assert began.wait(5.0)
        assert list(found) == [(0, None)]


def test_a_callback_that_raises_ends_the_wait_for_a_result() -> None:
    may_end, calls = Event(), []

    def alive() -> None:
        calls.append(1)
        if len(calls) > 1:
            raise CancelledError

    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(CancelledError):  # while the only item still runs
            list(outcomes(pool, lambda event: event.wait(5.0), [may_end], alive))
        may_end.set()
    calls.clear()
    done: list[int] = []
    with pytest.raises(CancelledError):
        list(outcomes(None, done.append, [1, 2, 3], alive))
    assert done == [1]


def test_the_number_of_processes_is_limited() -> None:
    with engine_processes(1) as here:
        assert here is None
    for workers in (0, 257):
        with pytest.raises(InputError, match="between 1 and 256"), engine_processes(workers):
            pass


def test_the_collector_is_as_before_after_a_search_that_fails() -> None:
    assert gc.isenabled()
    with pytest.raises(CancelledError), without_cyclic_collection():
        assert not gc.isenabled()
        raise CancelledError
    assert gc.isenabled()
