"""Prices the ways to split a layer in the worker processes of a search, beside the process that searches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.errors import InputError
from moesim.simulator.common.garbage import without_cyclic_collection
from moesim.simulator.layout.job import resolve
from moesim.simulator.model.precision import Precision
from moesim.simulator.model.recompute import Recompute
from moesim.simulator.planner.bound import BoundBook
from moesim.simulator.planner.expert_loads import ExpertLoads
from moesim.simulator.planner.placements import Placement
from moesim.simulator.planner.prices import PriceBook
from moesim.simulator.planner.processes import PATIENCE_S
from moesim.simulator.planner.recipe_numbers import RecipeNumbers
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.parallel import ParallelPlan


@dataclass(frozen=True, slots=True)
class SplitTask:
    """Plans that split a layer in different ways, with all that a worker needs to price them."""

    scenario: Scenario
    recipes: tuple[Precision, ...]
    numbered: tuple[Precision, ...]
    """Recipes in the order of their numbers, so that keys of prices are those of the process that asks."""
    policies: tuple[Recompute, ...]
    sms: tuple[int, ...]
    zero_stages: tuple[int, ...]
    placements: tuple[Placement, ...]
    plans: tuple[ParallelPlan, ...]


@dataclass(frozen=True, slots=True)
class PricedSplits:
    """`BoundBook.compute` of every plan of a task, and the keys of the prices behind it."""

    seconds: list[FloatArray]
    keys: frozenset[tuple[object, ...]]


def priced_splits(task: SplitTask) -> PricedSplits | None:
    """Price the plans of a task (in a worker process); None if one of them has no price."""
    with without_cyclic_collection():
        job = resolve(task.scenario)
        numbers = RecipeNumbers(task.numbered)
        book = PriceBook(task.scenario, job.shape, job.cluster, job.profile, numbers=numbers)
        bounds = BoundBook(
            book,
            task.recipes,
            task.policies,
            task.sms,
            task.zero_stages,
            ExpertLoads(task.scenario, job.shape),
            task.placements,
        )
        try:
            return PricedSplits([bounds.compute(plan) for plan in task.plans], book.keys)
        except InputError:
            return None  # the process that searches raises it


def price_splits(
    bounds: BoundBook, plans: Sequence[ParallelPlan], pool: Executor, alive: Callable[[int], None]
) -> None:
    """Price layer splits in this process and in those of a pool; `bounds` keeps the seconds.

    `alive` is called with the number of plans that are priced, at least every 0.1 s while others compute;
    what it raises ends the search. Plans without a price are left out, and raise where they are used. Which
    process prices a plan changes no number.
    """
    parts: dict[object, list[ParallelPlan]] = {}
    for plan in plans:  # plans of a part share the prices of their attention
        parts.setdefault((plan.tp, plan.microbatch / plan.cp), []).append(plan)
    tasks = [_task(bounds, part) for part in parts.values()]
    running = [(task, pool.submit(priced_splits, task)) for task in tasks]
    elsewhere: list[tuple[SplitTask, Future[PricedSplits | None]]] = []
    done = 0
    try:
        while running:
            task, future = running.pop()
            if not future.cancel():  # a worker has it
                elsewhere.append((task, future))
                continue
            for plan in task.plans:
                alive(done)
                bounds.compute(plan)
                done += 1
        for task, future in elsewhere:
            while not wait([future], PATIENCE_S).done:
                alive(done)
            priced = future.result()
            if priced is not None:
                bounds.keep(task.plans, priced.seconds)
                bounds.book.elsewhere |= priced.keys
            done += len(task.plans)
    except InputError:
        return  # raised again where all plans are read in order
    finally:
        for _, future in running:
            future.cancel()


def _task(bounds: BoundBook, plans: Sequence[ParallelPlan]) -> SplitTask:
    book = bounds.book
    return SplitTask(
        scenario=book.scenario,
        recipes=tuple(bounds.recipes),
        numbered=book.numbers.recipes,
        policies=tuple(bounds.policies),
        sms=tuple(bounds.sms),
        zero_stages=tuple(bounds.zero_stages),
        placements=tuple(bounds.placements),
        plans=tuple(plans),
    )
