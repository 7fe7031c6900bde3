"""Layer splits priced by other processes equal those that the search prices itself."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np
import pytest

from moesim.hwmodels.errors import InputError
from moesim.simulator.layout.job import resolve
from moesim.simulator.model.precision import PRECISIONS
from moesim.simulator.planner.bound import BoundBook
from moesim.simulator.planner.expert_loads import ExpertLoads
from moesim.simulator.planner.prices import PriceBook
from moesim.simulator.planner.split_pricing import price_splits
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.parallel import ParallelPlan

PLANS = [ParallelPlan(tp=tp, ep=ep, microbatch=2, sequence_parallel=tp > 1) for tp in (1, 2) for ep in (2, 8)]


class Worker(Executor):
    """Computes every second task at once, and leaves the others to be cancelled."""

    def __init__(self) -> None:
        self.tasks = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.tasks += 1
        if self.tasks % 2:
            future.set_running_or_notify_cancel()
            future.set_result(fn(*args, **kwargs))
        return future


def bounds_of(scenario: Scenario) -> BoundBook:
    job = resolve(scenario)
    book = PriceBook(scenario, job.shape, job.cluster, job.profile)
    recipes = [PRECISIONS["bf16"], PRECISIONS["fp8"]]
    loads = ExpertLoads(scenario, job.shape)
    return BoundBook(book, loads, recipes, ["none", "full"], [20], [1], [None])


def test_it_does_not_matter_which_process_prices_a_split(small: Scenario) -> None:
    shared, alone = bounds_of(small), bounds_of(small)
    priced: list[int] = []
    price_splits(shared, PLANS, Worker(), priced.append)
    assert priced == [0, 1] and shared.book.elsewhere  # a part here, a part elsewhere
    before = shared.book.priced
    for plan in PLANS:
        np.testing.assert_array_equal(shared.compute(plan), alone.compute(plan), strict=True)
    assert shared.book.priced == before == alone.book.priced > 0
    assert shared.book.keys == alone.book.keys


def test_a_split_without_a_price_raises_where_it_is_read(small: Scenario) -> None:
    bounds = bounds_of(small)
    impossible = ParallelPlan(tp=3, ep=2, microbatch=1, sequence_parallel=True)
    price_splits(bounds, [impossible, PLANS[0]], Worker(), lambda done: None)
    with pytest.raises(InputError, match="tp=3 does not divide"):
        bounds.compute(impossible)
