"""Plan search: bounds for every plan, the closed form for the promising ones, the engine for the best."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from itertools import product
from math import inf, isfinite
from typing import Any, Literal, get_args

from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.hwmodels.units import SECONDS_PER_DAY, SECONDS_PER_HOUR
from moesim.simulator.layout.job import check_profile
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.planner.candidates import GIB, find_candidates
from moesim.simulator.planner.found import Candidates
from moesim.simulator.planner.pareto import front
from moesim.simulator.planner.processes import engine_processes
from moesim.simulator.planner.progress import Say, part, share_of, told
from moesim.simulator.planner.refusals import Refusals
from moesim.simulator.planner.replay import CLOSED_FORM_ERROR
from moesim.simulator.planner.result import PlanResult, PlanRow
from moesim.simulator.planner.rows import Simulated, closed_form_memory, make_row, scenario_of, simulate_plan
from moesim.simulator.planner.space import PlanSpace, load_space, resolve
from moesim.simulator.planner.study import Study
from moesim.simulator.scenario import Scenario, load_scenario, with_overrides
from moesim.simulator.schedules import SCHEDULES

Objective = Literal["time", "cost", "energy", "deadline", "memory"]

NEAR_BEST = 1.05
"""A scenario's own plan up to this share of the best time is ranked: all that may be faster are estimated."""

BOUNDED, ESTIMATED = 0.5, 0.65
"""Shares of a search's time at which bounds and closed forms are usually done."""

ROUNDING = 1e-9
"""Relative difference below which two closed forms are the same."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a plan must keep: days for the run, dollars for the run."""

    deadline_days: float | None
    budget_usd: float | None

    def most_step_s(self, scenario: Scenario, cluster: Cluster) -> float:
        """Longest step that keeps both."""
        tokens = scenario.batch.sequences * scenario.batch.sequence_length
        steps = -(-scenario.run.tokens // tokens)
        most = inf
        if self.deadline_days is not None:
            most = self.deadline_days * SECONDS_PER_DAY / steps
        if self.budget_usd is not None:
            usd_per_hour = cluster.usd_per_gpu_hour * cluster.n_gpus
            most = min(most, self.budget_usd / usd_per_hour * SECONDS_PER_HOUR / steps)
        return most


def plan(
    scenario: Scenario | str,
    space: PlanSpace | str | None = None,
    objective: str = "time",
    top: int = 10,
    deadline_days: float | None = None,
    budget_usd: float | None = None,
    progress: Say | None = None,
    workers: int = 1,
) -> PlanResult:
    """The best plans for a scenario's model, batch and cluster, or fleet (docs/planner.md, "Fleets").

    `space`: values to try (`PlanSpace`, a file, or None for the defaults). `objective`: time, cost (of the
    run), energy, memory (most head-room), or deadline (cheapest that keeps `deadline_days`; GPU-hours where
    the cluster has no price). `top`: families of plans that are ranked and simulated; a family differs in
    precision, recompute, SMs and ZeRO stage only. `workers`: processes of the engine (1 = this one); a
    script that asks for more guards its main module, as multiprocessing demands. The result does not depend
    on it. `progress` is called with the share that is done, from 0 to 1, and what is being done. Raises
    InputError for a malformed or empty space and contradictory limits, InfeasibleError, with the counts by
    reason, where nothing is legal, fits and keeps the limits.
    """
    if isinstance(scenario, str):
        scenario = load_scenario(scenario)
    say = progress or (lambda share, text: None)
    wanted = load_space(space)
    limits = _checked(scenario, objective, top, deadline_days, budget_usd)
    if scenario.fleet is not None:
        from moesim.simulator.planner.fleet.simulate import plan_fleet

        with engine_processes(workers) as pool:
            return plan_fleet(
                scenario, wanted, objective, top, deadline_days, budget_usd, say, pool, _fastest_alone
            )
    start = time.perf_counter()
    with engine_processes(workers) as pool:
        plain = not wanted.variants
        started = pool.submit(_simulate_own, scenario) if pool is not None and plain else None
        variants = list(_variants(wanted))
        searches = [
            _Search(
                changed,
                with_overrides(scenario, texts) if texts else scenario,
                wanted,
                limits,
                part(say, *share_of(number, len(variants), 0.0, BOUNDED)),
            )
            for number, (changed, texts) in enumerate(variants)
        ]
        refused = Refusals()
        for search in searches:
            refused.merge(search.candidates.refused)
        bounded = time.perf_counter()
        alive = [search for search in searches if len(search.candidates.bound)]
        if not alive:
            raise InfeasibleError(_nothing(refused))
        mine: Simulated | str = ""
        if plain:
            say(BOUNDED, "simulating the scenario's own plan")
            mine = _simulate_own(scenario) if started is None else started.result()
        own = None if isinstance(mine, str) else searches[0].own(mine)
        for number, search in enumerate(alive):
            search.explore(objective, top, own, part(say, *share_of(number, len(alive), BOUNDED, ESTIMATED)))
        estimated = time.perf_counter()
        rows, problems = _ranked(alive, objective, top, pool, part(say, ESTIMATED, 1.0))
        if not rows:
            first = "no plan that was simulated keeps the deadline or budget"
            raise InfeasibleError(_nothing(refused, "; ".join([first, *problems[:2]])))
        simulated = len(rows)
        rows, pareto, claims = _with_front(alive, rows, objective, top, pool)
    end = time.perf_counter()
    considered = sum(s.candidates.space.size for s in searches)
    proven = min(s.proven_s for s in alive)
    return PlanResult(
        objective=objective,
        ranked=tuple(rows),
        pareto=tuple(pareto),
        refused=refused.rows(),
        own=None
        if own is None
        else replace(own, margin=_value(own, objective) / _value(rows[0], objective) - 1),
        own_rank=None if own is None else alive[0].rank_of(own),
        considered=considered,
        legal=sum(s.candidates.legal for s in searches),
        fitting=sum(s.candidates.fitting for s in searches),
        estimated=sum(s.study.estimated for s in alive),
        simulated=simulated + claims,
        price_tables=sum(s.candidates.priced for s in searches),
        proven_s=proven if isfinite(proven) else None,
        rivals=0 if objective == "memory" else sum(s.rivals(rows) for s in alive),
        notes=(*_notes(alive, objective, mine), *problems),
        evaluated_per_s=considered / (bounded - start),
        seconds={"bounds": bounded - start, "closed form": estimated - bounded, "engine": end - estimated},
    )


def _simulate_own(scenario: Scenario) -> Simulated | str:
    """The scenario's own plan; where it is illegal or does not fit, why."""
    simulated = _simulate(scenario)
    if isinstance(simulated, str):
        return simulated
    used, capacity = simulated.memory_bytes / GIB, simulated.capacity_bytes / GIB
    return simulated if used <= capacity else f"out of memory: needs {used:.2f} of {capacity:.2f} GiB"


def _simulate(scenario: Scenario) -> Simulated | str:
    """The engine's step of a plan (in a worker process), or why the engine does not take it."""
    try:
        return simulate_plan(scenario)
    except InputError as error:
        return str(error)


def _fastest_alone(scenario: Scenario, space: PlanSpace) -> PlanResult:
    """The fastest plan of one pool of a fleet."""
    return plan(scenario, space, top=1)


def _checked(
    scenario: Scenario, objective: str, top: int, deadline_days: float | None, budget_usd: float | None
) -> Limits:
    names = get_args(Objective)
    if objective not in names:
        raise InputError(f"objective={objective!r} is not one of {', '.join(names)}")
    if not 1 <= top <= 1000:
        raise InputError(f"top={top} must lie between 1 and 1000")
    for key, value in (("deadline_days", deadline_days), ("budget_usd", budget_usd)):
        if value is not None and not (isfinite(value) and value > 0):
            raise InputError(f"{key}={value} must be a finite number above 0")
    if objective == "deadline" and deadline_days is None:
        raise InputError("objective=deadline needs deadline_days, the days that the run may take")
    if scenario.fleet is not None:  # the rest is checked pool by pool
        return Limits(deadline_days, budget_usd)
    if scenario.stages.blocks is not None:
        raise InputError(
            "stages.blocks fixes a part of the model: a plan search needs the whole; leave it out"
        )
    if (objective == "cost" or budget_usd is not None) and scenario.machine.price_per_gpu_hour is None:
        scenario.machine.usd_per_gpu_hour  # noqa: B018 - raises, with the remedy
    if objective == "energy":
        scenario.machine.accelerator.tdp_w  # noqa: B018 - raises where it has no figure
    return Limits(deadline_days, budget_usd)


def _variants(space: PlanSpace) -> Iterator[tuple[dict[str, Any], list[str]]]:
    keys = list(space.variants)
    for values in product(*space.variants.values()):
        yield (
            dict(zip(keys, values, strict=True)),
            [f"{key}={json.dumps(value)}" for key, value in zip(keys, values, strict=True)],
        )


class _Search:
    """One variant of the scenario: its candidates and their study."""

    def __init__(
        self, changed: dict[str, Any], scenario: Scenario, wanted: PlanSpace, limits: Limits, say: Say
    ) -> None:
        self.changed, self.scenario = changed, scenario
        self.shape: ModelShape = scenario.shape
        self.cluster = scenario.machine
        profile = scenario.calibration
        check_profile(profile, self.cluster)
        fixed = scenario.stages.layers if wanted.layout == "scenario" else None
        if wanted.layout == "scenario" and fixed is None:
            raise InputError("layout=scenario, but the scenario has no stages.layers; use layout=balanced")
        space = resolve(wanted, scenario, self.shape, self.cluster)
        self.most_s = limits.most_step_s(scenario, self.cluster)
        self.candidates: Candidates = find_candidates(
            scenario, self.shape, self.cluster, profile, space, fixed, self.most_s, say
        )
        self.study = Study(scenario, self.shape, self.candidates)
        self.proven_s = inf
        self.chosen: list[int] = []
        self.front: list[tuple[int, int]] = []

    def own(self, simulated: Simulated) -> PlanRow:
        """The scenario's plan as it is."""
        scenario, estimate = self.scenario, None
        if scenario.schedule in SCHEDULES:
            estimate = self.study.seconds_of(scenario, simulated.layers, simulated.microbatches)
        return make_row(scenario, self.cluster, simulated, None, estimate, None, 1, self.changed)

    def explore(self, objective: str, top: int, own: PlanRow | None, say: Say) -> None:
        """Estimate what may be among the best, and the front."""
        if objective == "memory":
            self.chosen = self.study.leanest(top)
        else:
            self.proven_s = self.study.fastest(top, say=say)
            best = self.study.best_of_families()
            fastest = self.candidates.time_s[best[0]]
            if own is not None and (own.closed_form_s or inf) <= NEAR_BEST * fastest:
                self.proven_s = self.study.fastest(top, own.closed_form_s or 0.0, say=say)
            self.chosen = self.study.best_of_families()[:top]

    def rank_of(self, own: PlanRow) -> int | None:
        """Families with a faster closed form, plus one; None where not all that may be faster have one."""
        if own.closed_form_s is None or own.closed_form_s > self.proven_s:
            return None
        times = self.candidates.time_s[self.study.best_of_families()]
        return int((times < own.closed_form_s * (1.0 - ROUNDING)).sum()) + 1

    def rivals(self, rows: list[PlanRow]) -> int:
        """Families not simulated whose closed form is within its error of the fastest that was."""
        best = min((row.closed_form_s or inf for row in rows), default=inf)
        times = self.candidates.time_s[self.study.best_of_families()]
        return max(0, int((times <= best * (1.0 + CLOSED_FORM_ERROR)).sum()) - len(self.chosen))

    def row(self, number: int, simulated: Simulated | None, placement: int | None = None) -> PlanRow:
        """A plan as a row, with its fastest placement or another one that was tried."""
        c = self.candidates
        scenario = scenario_of(self.scenario, c, number, placement)
        tried = {which: seconds for seconds, _, which in c.others.get(number, ())}
        seconds = c.time_s[number] if placement is None else tried.get(placement, c.time_s[number])
        found = simulated or closed_form_memory(scenario, self.shape, c, number, placement)
        family = int((c.family == c.family[number]).sum())
        return make_row(
            scenario,
            self.cluster,
            found,
            c.assignment(number, placement),
            float(seconds),
            float(c.bound[number]),
            family,
            self.changed,
        )


def _ranked(
    searches: list[_Search],
    objective: str,
    top: int,
    pool: Executor | None,
    say: Say,
) -> tuple[list[PlanRow], list[str]]:
    """The best plans of all variants, simulated, best first; and a sentence for each that could not be."""
    todo = [(search, number) for search in searches for number in search.chosen]
    if len(searches) > 1:
        rough = sorted((_value(s.row(n, None), objective), i) for i, (s, n) in enumerate(todo))
        todo = [todo[i] for _, i in rough[:top]]
    estimated = sum(s.study.estimated for s in searches)
    say(0.0, f"{estimated:,} plans in closed form; the front of time and memory")
    scenarios = [scenario_of(s.scenario, s.candidates, n) for s, n in todo]
    running = None if pool is None else pool.map(_simulate, scenarios)
    for search in searches:  # this process refines the fronts while the others simulate
        search.front = search.study.front()
    simulated = list(told(map(_simulate, scenarios) if running is None else running, len(todo), say))
    rows, problems = [], []
    for (search, number), found in zip(todo, simulated, strict=True):
        if isinstance(found, str):
            problems.append(f"{search.row(number, None).label} is left out: {found}")
        elif found.memory_bytes <= found.capacity_bytes and (found.time_s or 0.0) <= search.most_s:
            rows.append(search.row(number, found))
    return _by_objective(rows, objective), problems


def _by_objective(rows: Iterable[PlanRow], objective: str) -> list[PlanRow]:
    """Rows best first, each with its distance from the best."""
    kept = sorted(rows, key=lambda row: (_value(row, objective), row.memory_bytes, row.label))
    best = _value(kept[0], objective) if kept else 1.0
    return [replace(row, margin=_value(row, objective) / best - 1.0) for row in kept]


def _value(row: PlanRow, objective: str) -> float:
    """What an objective minimises."""
    if objective == "memory":
        return row.memory_bytes
    if objective == "energy":
        assert row.energy_j is not None
        return row.energy_j
    if objective == "cost" or (objective == "deadline" and row.cost_usd is not None):
        assert row.cost_usd is not None
        return row.cost_usd
    return row.gpu_hours if objective == "deadline" else row.time_s


def _with_front(
    searches: list[_Search], ranked: list[PlanRow], objective: str, top: int, pool: Executor | None
) -> tuple[list[PlanRow], list[PlanRow], int]:
    """The ranked rows; those that no other beats in time, GPU-hours and memory, by time; claims simulated.

    A row of the front that is not ranked keeps its closed form, unless that beats the best simulated plan:
    such a claim is simulated before it is shown, and ranked if it holds.
    """
    known, tried = {_key(row): row for row in ranked}, 0
    places = [(search, number, placement) for search in searches for number, placement in search.front]
    drawn = (search.row(number, None, placement) for search, number, placement in places)
    shown = {place: known.get(_key(row), row) for place, row in zip(places, drawn, strict=True)}
    while True:
        best = _value(ranked[0], objective)
        rows = list(shown.values())
        kept = [rows[n] for n in front([(row.time_s, row.gpu_hours, row.memory_bytes) for row in rows])]
        claims = [
            place
            for place, row in shown.items()
            if row in kept and row.source == "closed form" and _value(row, objective) < best
        ]
        if not claims or objective == "memory":
            break
        run = map if pool is None else pool.map
        steps = list(run(_simulate, [shown[place].scenario for place in claims]))
        tried += len(claims)
        for place, step in zip(claims, steps, strict=True):
            if isinstance(step, str):
                del shown[place]
                continue
            search, number, placement = place
            shown[place] = row = search.row(number, step, placement)
            if _value(row, objective) < best and row.time_s <= search.most_s:
                ranked = _by_objective([*ranked, row], objective)[:top]
    kept = [replace(row, margin=_value(row, objective) / best - 1.0) for row in kept]
    return ranked, sorted(kept, key=lambda row: (row.time_s, row.memory_bytes, row.label)), tried


def _key(row: PlanRow) -> str:
    """What tells two plans apart."""
    return json.dumps(row.scenario.model_dump(mode="json"), sort_keys=True)


def _notes(searches: list[_Search], objective: str, own: Simulated | str) -> list[str]:
    notes = []
    if isinstance(own, str) and own:
        notes.append(f"the scenario's own plan is not among them: {own}")
    if any(search.study.capped for search in searches):
        notes.append(
            "the closed form stopped at its limit of plans: a plan beyond it might be among the best"
        )
    if objective == "energy":
        notes.append("energy counts every accelerator at its board's power limit, whatever it does")
    return notes


def _nothing(refused: Refusals, first: str = "no plan of the space is legal and fits") -> str:
    rows = refused.rows()
    listed = "; ".join(f"{row.count:,} x {row.reason} ({row.example})" for row in rows[:4])
    return f"{first}. Refused: {listed or 'nothing'}; widen the space, the cluster or the limits"
