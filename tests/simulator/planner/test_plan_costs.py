"""Layer splits priced by other processes equal those that the search prices itself."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from itertools import product
from threading import Event
from typing import Any

import numpy as np
import pytest

from moesim.hwmodels.errors import InputError
from moesim.simulator.common.bounded_cache import clear_caches
from moesim.simulator.common.processes import (
    LARGEST_PART,
    PARTS,
    engine_processes,
    outcomes,
    without_cyclic_collection,
)
from moesim.simulator.cost.plan_costs import PlanCosts
from moesim.simulator.layout.job import resolve
from moesim.simulator.layout.stages import blocks_of, from_layers_per_stage
from moesim.simulator.model.precision import PRECISIONS
from moesim.simulator.model.recompute import Recompute
from moesim.simulator.planner.bound import BoundBook
from moesim.simulator.planner.expert_loads import ExpertLoads
from moesim.simulator.scenario import Scenario, load_scenario
from moesim.simulator.scenario.parallel import ParallelPlan
from moesim.simulator.schedules import build

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
    costs = PlanCosts(job)
    recipes = [PRECISIONS["bf16"], PRECISIONS["fp8"]]
    loads = ExpertLoads(scenario, job.shape)
    return BoundBook(costs, loads, recipes, ["none", "full"], [20], [1], [None])


def test_it_does_not_matter_which_process_prices_a_split(small: Scenario) -> None:
    shared, alone = bounds_of(small), bounds_of(small)
    priced: list[int] = []
    shared.compute_with(PLANS, Worker(), priced.append)
    assert priced == [0, 1] and shared.costs.elsewhere  # a part here, a part elsewhere
    before = shared.costs.keys
    for plan in PLANS:
        np.testing.assert_array_equal(shared.compute(plan), alone.compute(plan), strict=True)
    assert shared.costs.keys == before == alone.costs.keys != frozenset()


def test_a_split_without_a_price_raises_where_it_is_read(small: Scenario) -> None:
    bounds = bounds_of(small)
    impossible = ParallelPlan(tp=3, ep=2, microbatch=1, sequence_parallel=True)
    bounds.compute_with([impossible, PLANS[0]], Worker(), lambda done: None)
    with pytest.raises(InputError, match="tp=3 does not divide"):
        bounds.compute(impossible)


# -- what is kept from the plans before changes no cost of the next one ----------------------------


COPYING = ("software.parameters_copied=true", "software.single_groups_copied=true")
SPLITS = list(product((1, 2), (1, 2), (1, 8, 16), (1, 2)))
"""Tensor, context and expert parallelism, and tensor parallelism inside of experts."""
POLICIES: tuple[Recompute, ...] = ("none", "full", "selective", "deepseek-v3")


def test_ends_of_a_schedule_are_those_of_costs_which_computed_no_other_schedule() -> None:
    """Transfers leave the port of gradients free only outside of pairs."""
    changes = ["parallel.pp=8", "parallel.vpp=2", "parallel.ep=16", "parallel.zero_stage=1"]
    scenario = load_scenario("qwen3-235b-a22b-256xh100", changes)
    job, plan = resolve(scenario), scenario.parallel
    stages = from_layers_per_stage(blocks_of(job.shape), (6,) * 14 + (5, 5))
    schedules = [build(name, 8, 16, 2) for name in ("interleaved-1f1b", "interleaved-1f1b-overlapped")]
    costs = PlanCosts(job)
    ends = [costs.sync(plan, scenario.recipe, "none", schedule, stages, 20) for schedule in schedules]
    alone = [
        PlanCosts(job).sync(plan, scenario.recipe, "none", schedule, stages, 20) for schedule in schedules
    ]
    assert ends == alone and ends[0] != ends[1]


@pytest.mark.parametrize(
    "software",
    [
        (),
        COPYING,
        ("communication.gemm_margin=24",),
        ("software.framework=megatron-core-0.16",),
        ("software.framework=torchtitan-0.2",),
    ],
)
def test_a_table_is_that_of_costs_which_computed_nothing_else(software: tuple[str, ...]) -> None:
    changes = ["cluster=h100-1024", "cluster.nodes=16", "profile=null", "model=qwen3-30b-a3b", *software]
    scenario = load_scenario("deepseek-v3-2048xh800", [*changes, "routing=null", "parallel.pp=4"])
    job = resolve(scenario)
    assert job.profile.power is not None, "the clock by the load is not tried"
    choices = list(product(SPLITS, (0, 2, 3), (1, 2), POLICIES, (16, 24)))
    random.Random(7).shuffle(choices)
    costs = PlanCosts(job)
    for split, zero_stage, microbatch, policy, sms in choices[:60]:
        tp, cp, ep, expert_tp = split
        plan = ParallelPlan(
            pp=4, tp=tp, cp=cp, ep=ep, expert_tp=expert_tp, microbatch=microbatch, zero_stage=zero_stage
        )
        clear_caches()
        fresh = PlanCosts(job)
        recipe = scenario.recipe
        schedule = build("dualpipe" if zero_stage < 3 else "1f1b", 4, 8)
        table, expected = (c.table(plan, recipe, policy, sms, schedule) for c in (costs, fresh))
        assert table == expected, (plan, policy, sms)
        alone, expected = (c.alone(plan, recipe, policy, sms) for c in (costs, fresh))
        assert alone == expected, (plan, policy, sms)


# -- results of worker processes as a stream, and what ends a search that runs in them -------------


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
