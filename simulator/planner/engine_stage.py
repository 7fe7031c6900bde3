"""Ranks the best plans of a search by the engine, and decides what its front claims."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.errors import InputError
from moesim.simulator.common.processes import outcomes
from moesim.simulator.model.recompute import recompute_label
from moesim.simulator.planner.candidate_search import VariantSearch
from moesim.simulator.planner.candidates import GIB
from moesim.simulator.planner.goal import Goal, OnProgress, equal_part, front
from moesim.simulator.planner.result import PlanRow, PlanStep, precision_name, scenario_of, simulate_plan
from moesim.simulator.predict.work_size import Band
from moesim.simulator.scenario import Scenario
from moesim.simulator.studies.compare import band_of_margin, places_of, relative_draws

FRONT = 0.5
"""Share of the time of this part after which the front is known; on one core as long as six simulations."""

Draws: TypeAlias = dict[tuple[object, ...], FloatArray]
"""Draws of the steps of simulated plans, by the key of their rows."""

OWN_KEY = ("the scenario's own plan",)
"""Key of the draws of the scenario's own plan, which may be among the others with other stages."""

Place: TypeAlias = tuple[VariantSearch, int, int]
"""A plan of a search with a placement of its space."""


def simulate_own(scenario: Scenario, draws: bool = False) -> PlanStep | str:
    """The simulated step of the scenario's own plan, or the reason why it is illegal or does not fit."""
    step = simulated(scenario, draws)
    if isinstance(step, str):
        return step
    used, capacity = step.memory.total_bytes / GIB, step.memory.capacity_bytes / GIB
    return step if step.memory.fits else f"out of memory: needs {used:.2f} of {capacity:.2f} GiB"


def simulated(scenario: Scenario, draws: bool = False) -> PlanStep | str:
    """Simulate a plan (in a worker process), with the draws of its step; the message if it is refused."""
    try:
        return simulate_plan(scenario, draws=draws)
    except InputError as error:
        return str(error)


def draws_of_own(step: PlanStep | str) -> Draws:
    """The draws of the scenario's own plan, if it was simulated with them."""
    return {} if isinstance(step, str) or step.draws is None else {OWN_KEY: step.draws}


def rank(
    searches: Sequence[VariantSearch], goal: Goal, pool: Executor | None, say: OnProgress
) -> tuple[list[PlanRow], list[str], Draws]:
    """Simulate the best plans of all variants, and find the fronts of time and memory.

    Returns the rows of the simulated plans, best first, sentences on those that the engine refused, and the
    draws of the steps where all of them will be compared.
    """
    todo = [(search, number) for search in searches for number in search.chosen]
    if len(searches) > 1:
        rough = sorted((goal.value(s.row(n, None)), i) for i, (s, n) in enumerate(todo))
        todo = [todo[i] for _, i in rough[: goal.top]]
    estimated = sum(s.study.estimated for s in searches)
    text = f"{estimated:,} plans estimated; simulating the best"
    say(0.0, text)
    scenarios = [scenario_of(s.scenario, s.candidates, n) for s, n in todo]
    # Plans that share draws of noise, schedules and prices run one after the other in a process.
    order = sorted(range(len(scenarios)), key=lambda n: (_shared_key(scenarios[n]), n))
    steps: dict[int, PlanStep | str] = {}

    def alive() -> None:
        done, count = len(steps), len(order)
        words = f"{done} of {count} plans simulated" if done else f"simulating {count} plans"
        say(FRONT + (1.0 - FRONT) * (done / max(1, count)), words)

    compared = len(order) <= MOST_COMPARED and goal.objective != "memory"
    running = outcomes(pool, partial(simulated, draws=compared), [scenarios[n] for n in order], alive)
    for number, search in enumerate(searches):  # this process refines the fronts while the workers simulate
        search.front = search.study.front(equal_part(say, number, len(searches), 0.0, FRONT))
    for place, step in running:
        steps[order[place]] = step
        alive()
    rows, problems, draws = [], [], Draws()
    for place, (search, number) in enumerate(todo):
        step = steps[place]
        if isinstance(step, str):
            problems.append(f"{search.row(number, None).label} is left out: {step}")
        elif step.keeps(search.headroom) and (step.time_s or 0.0) <= search.most_s:
            rows.append(search.row(number, step))
            if step.draws is not None:
                draws[_key(rows[-1])] = step.draws
    return goal.ranked(rows), problems, draws


def _shared_key(scenario: Scenario) -> tuple[object, ...]:
    """A key by which plans with the same draws of noise, then schedule, then prices are neighbours.

    The draws of a phase depend on micro-batches, members and place, not on the layers of the stages or on
    the schedule, and cost the most to make again.
    """
    plan = scenario.parallel
    return (
        (plan.pp, plan.tp * plan.cp / plan.microbatch, plan.ep, plan.tp, plan.cp, plan.expert_tp),
        (plan.vpp, scenario.schedule, scenario.stages.layers or (), plan.microbatch),
        precision_name(scenario),
        recompute_label(scenario.recompute),
        scenario.communication.sms,
    )


def with_front(
    searches: Sequence[VariantSearch], ranked: list[PlanRow], goal: Goal, pool: Executor | None
) -> tuple[list[PlanRow], list[PlanRow], int]:
    """Returns the ranked rows, the Pareto front by time, and the number of plans simulated for the front.

    The front is that of time, GPU-hours and memory. A row of the front that is not ranked keeps its
    closed-form time. If that beats the best simulated plan, the row is simulated before it is shown, and
    ranked if the engine confirms it.
    """
    known, tried = {_key(row): row for row in ranked}, 0
    places: list[Place] = [(search, number, p) for search in searches for number, p in search.front]
    drawn = (search.row(number, None, placement) for search, number, placement in places)
    shown = {place: known.get(_key(row), row) for place, row in zip(places, drawn, strict=True)}
    while True:
        best = goal.value(ranked[0])
        rows = list(shown.values())
        kept = [rows[n] for n in front([(row.time_s, row.gpu_hours, row.memory_bytes) for row in rows])]
        claims = [
            place
            for place, row in shown.items()
            if row in kept and row.source == "closed form" and goal.value(row) < best
        ]
        if not claims or goal.objective == "memory":
            break
        steps = dict(outcomes(pool, simulated, [shown[place].scenario for place in claims]))
        tried += len(claims)
        for n, place in enumerate(claims):
            step, (search, number, placement) = steps[n], place
            if isinstance(step, str) or not step.keeps(search.headroom):
                del shown[place]
                continue
            shown[place] = row = search.row(number, step, placement)
            if goal.value(row) < best and row.time_s <= search.most_s:
                ranked = goal.ranked([*ranked, row])[: goal.top]
    kept = [replace(row, margin=goal.value(row) / best - 1.0) for row in kept]
    return ranked, sorted(kept, key=lambda row: (row.time_s, row.memory_bytes, row.label)), tried


MOST_COMPARED = 10
"""Ranked plans of which a search computes intervals, which takes about a second each."""


def placed(
    rows: Sequence[PlanRow], own: PlanRow | None, goal: Goal, pool: Executor | None, known: Draws
) -> tuple[list[PlanRow], PlanRow | None]:
    """Ranked rows and the scenario's own, with places and the intervals of how far they are behind the best.

    `known`: draws of some of the rows; those of the others are computed.
    Plans that the interval of their difference does not tell apart share a place. Rows beyond
    `MOST_COMPARED` have no intervals, and with the objective memory none has: no step pays for memory.
    """
    own = None if own is None else replace(own, margin=goal.value(own) / goal.value(rows[0]) - 1.0)
    compared = [] if goal.objective == "memory" else list(rows[:MOST_COMPARED])
    asked = [*compared, *([own] if own is not None and compared else [])]
    keys = [*(_key(row) for row in compared), OWN_KEY][: len(asked)]
    draws = {n: known[key] for n, key in enumerate(keys) if key in known}
    rest = [n for n in range(len(asked)) if n not in draws]
    for place, drawn_now in outcomes(pool, relative_draws, [asked[n].scenario for n in rest]):
        draws[rest[place]] = drawn_now
    drawn = [draws.get(n) if n < len(compared) else None for n in range(len(rows))]
    places = places_of([row.margin for row in rows], drawn)
    placed_rows = [replace(row, place=place) for row, place in zip(rows, places, strict=True)]
    for n in range(len(compared)):
        placed_rows[n] = _with_bands(placed_rows[n], draws, n)
    if own is not None and compared:
        own = _with_bands(own, draws, len(compared))
    return placed_rows, own


def _with_bands(row: PlanRow, draws: Mapping[int, FloatArray], number: int) -> PlanRow:
    """The row with the intervals of its step and of its distance from the best, the row 0 of `draws`."""
    behind = band_of_margin(row.margin, draws[0], draws[number]) if number else None
    return replace(row, spread=Band.of(1.0, draws[number]), behind=behind)


def _key(row: PlanRow) -> tuple[object, ...]:
    """What identifies the plan of a row."""
    plan = row.scenario
    return (
        json.dumps(row.changed, sort_keys=True, default=str),
        plan.parallel,
        plan.schedule,
        plan.precision,
        plan.recompute,
        plan.communication.sms,
        plan.routing.eplb,
        plan.stages.layers,
    )
