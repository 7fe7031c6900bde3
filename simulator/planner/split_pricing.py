"""Prices the ways to split a layer in the worker processes of a search, beside the process that searches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from math import fsum
from typing import Any

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.errors import InputError
from moesim.simulator.common.processes import without_cyclic_collection
from moesim.simulator.engine.program import NS, CompiledTemplate
from moesim.simulator.engine.records import Execution
from moesim.simulator.layout.job import resolve
from moesim.simulator.model.operator import BlockKind, Phase
from moesim.simulator.model.precision import Precision
from moesim.simulator.planner.bound import BoundBook
from moesim.simulator.planner.expert_loads import ExpertLoads
from moesim.simulator.planner.prices import PriceBook, RecipeNumbers
from moesim.simulator.planner.processes import PATIENCE_S
from moesim.simulator.predict.report import breakdowns, compute_ns, spans_ns
from moesim.simulator.predict.step import Prepared, PreparedPool
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.parallel import ParallelPlan
from moesim.simulator.schedules.template import EP_PHASES


@dataclass(frozen=True, slots=True)
class SplitTask:
    """Plans that split a layer in different ways, with all that a worker needs to price them."""

    scenario: Scenario
    numbered: tuple[Precision, ...]
    """Recipes in the order of their numbers, so that keys of prices are those of the process that asks."""
    axes: tuple[Sequence[Any], ...]
    """Recipes, policies, communication SMs, ZeRO stages and placements of the bounds."""
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
        bounds = BoundBook(book, ExpertLoads(task.scenario, job.shape), *task.axes)
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
    axes = bounds.recipes, bounds.policies, bounds.sms, bounds.zero_stages, bounds.placements
    numbered, scenario = bounds.book.numbers.recipes, bounds.book.scenario
    tasks = [SplitTask(scenario, numbered, axes, tuple(part)) for part in parts.values()]
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


# -- step mechanisms ---------------------------------------------------------------------------------
# Splits a simulated step into mechanisms, by which two plans can be compared.

CAUSES = (
    "arithmetic, alone on all SMs",
    "recompute",
    "SMs and bandwidth left to communication, uneven ranks",
    "waiting for communication",
    "bubble",
    "gradients and parameters over the network",
    "optimizer",
)
"""Mechanisms in the order of `step_causes`; their seconds add up to the step."""


def step_causes(prepared: Prepared, execution: Execution) -> dict[str, float]:
    """Seconds of a step by mechanism, mean over pipeline ranks (docs/model.md, eq. P4).

    Every pipeline rank pays the prices of its own pool.
    """
    owners, table = prepared.owners, execution.table
    ranks = len(execution.program.ranks)
    repeated = {number: _recompute(p) for number, p in {id(p): p for p in owners}.items()}
    alone: dict[int, tuple[float, float]] = {}
    totals = [0.0, 0.0]
    for rank, code, actions in execution.tasks.groups:
        if code not in alone:
            alone[code] = _alone(owners[rank], table.codes[code], repeated[id(owners[rank])])
        totals = [total + len(actions) * part for total, part in zip(totals, alone[code], strict=True)]
    arithmetic, again = (total / ranks for total in totals)
    compute = fsum(compute_ns(table).tolist()) / NS / ranks
    span = fsum(spans_ns(execution).tolist()) / NS / ranks
    update = fsum(s.optimizer[1] - s.optimizer[0] for s in execution.syncs) / NS / ranks
    rows = breakdowns(execution)
    end = fsum(row.optimizer for row in rows) / ranks
    bubble = fsum(row.bubble for row in rows) / ranks
    values = (arithmetic, again, compute - arithmetic - again, span - compute, bubble, end - update, update)
    return dict(zip(CAUSES, values, strict=True))


def difference(plan: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Extra seconds of `plan` over `other` by mechanism, largest difference first."""
    gaps = {cause: plan[cause] - other[cause] for cause in CAUSES}
    return dict(sorted(gaps.items(), key=lambda item: -abs(item[1])))


def _alone(
    pool: PreparedPool, code: CompiledTemplate, recompute: Mapping[tuple[BlockKind, Phase], float]
) -> tuple[float, float]:
    """Seconds of (first-time work, recomputation) of an action that runs alone on all SMs."""
    costs = pool.programs[0].costs
    work = again = 0.0
    for task in code.tasks:
        if task.phase in EP_PHASES or task.transfer is not None:
            continue
        price = costs.compute.get((task.kind, task.phase, "alone"))
        if price is not None:
            repeated = recompute.get((task.kind, task.phase), 0.0)
            work += price.fixed_s + price.row_s - price.exposed_s - price.host_s - repeated
            again += repeated
    return work, again


def _recompute(pool: PreparedPool) -> dict[tuple[BlockKind, Phase], float]:
    """Seconds of the recomputed operators, by block kind and phase."""
    pricer, found = pool.pricer, {}
    for kind in sorted({block.kind for stage in pool.stages.stages for block in stage}):
        for phase, operators in pricer.operators(kind).items():
            costs = pricer.operator_costs(kind, phase, "alone")
            found[kind, phase] = fsum(
                cost.seconds for op, cost in zip(operators, costs, strict=True) if op.recompute
            )
    return found
