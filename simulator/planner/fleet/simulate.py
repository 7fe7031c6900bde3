"""Plan search for a fleet, with a comparison of its best plan with each pool alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from math import fsum, isfinite

from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.hwmodels.units import SECONDS_PER_DAY, SECONDS_PER_HOUR
from moesim.simulator.layout.job import usd_per_hour
from moesim.simulator.planner.closed_form import CLOSED_FORM_ERROR
from moesim.simulator.planner.fleet.best_first import (
    FleetPlan,
    FleetPools,
    FleetSearch,
    fleet_pools,
    fleet_space,
    legal_fleet_frames,
)
from moesim.simulator.planner.goal import Goal, OnProgress
from moesim.simulator.planner.refusals import refusal_text
from moesim.simulator.planner.result import (
    CAUSES,
    FleetVerdict,
    PlanResult,
    PlanRow,
    PoolAlone,
    make_row,
    simulate_plan,
)
from moesim.simulator.planner.space import PlanSpace
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.sections import Stages
from moesim.simulator.schedules import pool_defaults

# -- verdict -----------------------------------------------------------------------------------------
# Compares the best plan of a mixed fleet with each pool alone, in figures and sentences (pure).


def verdict(best: PlanRow, alone: Sequence[PoolAlone]) -> FleetVerdict:
    """Compare the fleet's best plan with every pool alone."""
    rows = [row.plan for row in alone if row.plan is not None]
    wins = all(best.time_s < row.time_s for row in rows)
    ideal = ideal_s([row.time_s for row in rows]) if len(rows) == len(alone) else None
    parts = [
        f"{pool.accelerator} holds {pool.layers} layers on pipeline ranks {pool.first_rank} to "
        f"{pool.last_rank} at {1e3 * pool.layer_s:.1f} ms a layer, idle {pool.bubble_s:.2f} s, "
        f"{pool.memory.total_bytes / 2**30:.0f} of {pool.memory.capacity_bytes / 2**30:.0f} GiB"
        for pool in best.pools
    ]
    return FleetVerdict(
        tuple(alone),
        wins,
        ideal,
        None if ideal is None else ideal / best.time_s,
        (
            *_steps(best, alone),
            *(["; ".join(parts) + "."] if parts else []),
            *_losses(best, rows, ideal),
            *_money(best, alone),
        ),
    )


def ideal_s(alone_s: Sequence[float]) -> float:
    """Step time (s) of a fleet whose pools share the work without loss (docs/model.md, eq. S5)."""
    return 1.0 / fsum(1.0 / seconds for seconds in alone_s)


def _steps(best: PlanRow, alone: Sequence[PoolAlone]) -> list[str]:
    said = [f"The fleet's best plan takes {best.time_s:.2f} s a step ({best.label})."]
    for row in alone:
        who = f"{row.n_gpus:,} x {row.accelerator} alone"
        if row.plan is None:
            said.append(f"{who} cannot run it: {row.reason}")
            continue
        alone_s = row.plan.time_s
        what = (
            f"the fleet is {alone_s / best.time_s:.2f}x as fast"
            if alone_s > best.time_s
            else f"the other pools make it {best.time_s / alone_s - 1.0:.1%} slower"
        )
        said.append(f"{who} takes {alone_s:.2f} s ({row.plan.label}): {what}.")
    return said


def _losses(best: PlanRow, rows: Sequence[PlanRow], ideal: float | None) -> list[str]:
    if ideal is None or not best.causes_s:
        return []
    said = [
        f"If the pools shared the work without loss, each at the pace that it has alone, a step would take "
        f"{ideal:.2f} s: the fleet reaches {ideal / best.time_s:.0%} of that."
    ]
    fastest = min(rows, key=lambda row: row.time_s)
    gaps = [(best.causes_s[c] / best.time_s - fastest.causes_s[c] / fastest.time_s, c) for c in CAUSES]
    more = [f"{cause} {gap:+.1%}" for gap, cause in sorted(gaps, key=lambda g: -g[0]) if gap > 0.01]
    if more:
        said.append(
            f"Share of its step that goes elsewhere, against the fastest pool alone: {', '.join(more)}."
        )
    return said


def _money(best: PlanRow, alone: Sequence[PoolAlone]) -> list[str]:
    priced = [(row.accelerator, row.plan.cost_usd) for row in alone if row.plan is not None]
    if best.cost_usd is None or any(usd is None for _, usd in priced):
        return ["No cost: a pool has no price_per_gpu_hour."]
    others = ", ".join(f"{name} alone ${usd / 1e6:.3g} M" for name, usd in priced if usd is not None)
    return [f"The run costs ${best.cost_usd / 1e6:.3g} M on the fleet{f'; {others}' if others else ''}."]


PlanAlone = Callable[[Scenario, PlanSpace], PlanResult]
"""The search that finds the best plan of one pool alone."""


def plan_fleet(
    scenario: Scenario,
    wanted: PlanSpace,
    goal: Goal,
    say: OnProgress,
    pool: Executor | None,
    alone: PlanAlone,
) -> PlanResult:
    """Find the best plans for a scenario with a fleet, and for each pool alone.

    The arguments are those of `search.plan`. On a given fleet, cost, energy and deadline rank plans as time
    does. Raises InputError for options that a fleet's search does not have, and InfeasibleError, with counts
    by reason, if no plan is legal, fits and keeps the limits.
    """
    start = time.perf_counter()
    pools, shape = fleet_pools(scenario), scenario.shape
    usd = usd_per_hour([part.cluster for part in pools.parts])
    _check(scenario, wanted, goal, usd)
    fixed = scenario.stages.layers if wanted.layout == "scenario" else None
    own_space = fleet_space(wanted, scenario, pools, shape)
    space, frames, refused = legal_fleet_frames(own_space, scenario, pools, shape)
    legal = len(frames) * space.inner
    say(0.0, f"{legal:,} of {space.size:,} plans divide the fleet, model, batch and schedule")
    most_s = goal.most_step_s(scenario, usd)
    study = FleetSearch(scenario, shape, pools, space, frames, fixed, most_s, refused)
    proven = study.fastest(goal.top)
    best = study.best()
    estimated = time.perf_counter()
    if not best:
        raise InfeasibleError(refusal_text(refused, "no plan of the fleet is legal and fits", "pools"))
    say(0.75, f"{study.estimated:,} plans in closed form; simulating {len(best[: goal.top])}")
    rows = _simulated(scenario, study, best[: goal.top], usd, pool)
    if not rows:
        said = "no plan that was simulated keeps the deadline or budget"
        raise InfeasibleError(refusal_text(refused, said, "pools"))
    own = _own(scenario, pools, usd, rows[0].time_s)
    engine = time.perf_counter()
    numbers = range(len(pools.parts))
    each = [_alone(scenario, pools, n, wanted, own_space, alone, say) for n in numbers]
    end = time.perf_counter()
    return PlanResult(
        objective=goal.objective,
        ranked=tuple(rows),
        pareto=(),
        refused=refused.rows(),
        own=own,
        own_rank=_rank(own, rows, proven),
        considered=space.size,
        legal=legal,
        fitting=study.fitting,
        estimated=study.estimated,
        simulated=len(rows),
        price_tables=sum(len(costs.keys) for costs in study.costs),
        proven_s=proven if isfinite(proven) else None,
        rivals=_rivals(best, goal.top),
        notes=tuple(_notes(study, goal.objective)),
        evaluated_per_s=space.size / (estimated - start),
        seconds={"closed form": estimated - start, "engine": engine - estimated, "alone": end - engine},
        fleet=verdict(rows[0], each),
    )


def _rivals(best: Sequence[FleetPlan], top: int) -> int:
    """Count the plans that may be as fast as the best by their closed form but were not simulated."""
    near = sum(plan.time_s <= best[0].time_s * (1.0 + CLOSED_FORM_ERROR) for plan in best)
    return max(0, near - top)


def _check(scenario: Scenario, wanted: PlanSpace, goal: Goal, usd: float | None) -> None:
    """Raise InputError for options that a fleet's search does not have.

    `usd`: price of all pools in dollars an hour, None if unknown.
    """
    if goal.objective == "memory":
        raise InputError("objective=memory is not searched for a fleet; use time, cost, energy or deadline")
    if usd is None and (goal.objective == "cost" or goal.budget_usd is not None):
        raise InputError(
            "a pool of the fleet has no price_per_gpu_hour: state one in its cluster to plan by cost"
        )
    if wanted.layout == "scenario" and scenario.stages.layers is None:
        raise InputError("layout=scenario, but the scenario has no stages.layers; use layout=balanced")


def _simulated(
    scenario: Scenario,
    study: FleetSearch,
    plans: Sequence[FleetPlan],
    usd: float | None,
    pool: Executor | None,
) -> list[PlanRow]:
    """Simulate the plans, and return those that fit and keep the limits, fastest first."""
    scenarios = [_scenario_of(scenario, study, plan) for plan in plans]
    run = map if pool is None else pool.map
    rows, first = [], study.pools.parts[0].scenario.machine
    for plan, own, step in zip(plans, scenarios, list(run(simulate_plan, scenarios)), strict=True):
        if step.keeps(study.space.headroom):
            family = len(study.estimates[plan.frame])
            row = make_row(own, first, step, plan.time_s, plan.bound_s, family)
            rows.append(_billed(row, study.pools, usd))
    rows = [row for row in rows if row.time_s <= study.most_s]
    rows.sort(key=lambda row: (row.time_s, row.memory_bytes, row.label))
    return [
        replace(row, margin=row.time_s / rows[0].time_s - 1.0, place=place)
        for place, row in enumerate(rows, 1)
    ]


def _scenario_of(base: Scenario, study: FleetSearch, plan: FleetPlan) -> Scenario:
    """The scenario of a plan, ready for `simulate`."""
    frame, space = study.frames[plan.frame], study.space
    return base.model_copy(
        update={
            "parallel": frame.plan.model_copy(update={"zero_stage": space.zero_stage[plan.zero]}),
            "schedule": frame.schedule,
            "precision": space.precision[plan.recipe],
            "recompute": space.recompute[plan.policy],
            "stages": Stages(layers=plan.stages.layers_per_stage),
        }
    )


def _billed(row: PlanRow, pools: FleetPools, usd: float | None) -> PlanRow:
    """The row with the cost and the energy of all pools."""
    run_s = row.days * SECONDS_PER_DAY
    watts = [
        part.cluster.n_gpus
        * part.cluster.accelerator.tdp_w
        * (part.cluster.energy.pue.value if part.cluster.energy else 1.0)
        for part in pools.parts
    ]
    cost = None if usd is None else run_s / SECONDS_PER_HOUR * usd
    return replace(row, cost_usd=cost, energy_j=run_s * fsum(watts))


def _own(scenario: Scenario, pools: FleetPools, usd: float | None, best_s: float) -> PlanRow | None:
    """The simulated row of the scenario's own plan; None if it is illegal or does not fit."""
    try:
        step = simulate_plan(scenario)
    except InputError:
        return None
    if not step.memory.fits or step.time_s is None:
        return None
    row = make_row(scenario, pools.parts[0].scenario.machine, step)
    return replace(_billed(row, pools, usd), margin=step.time_s / best_s - 1.0)


def _rank(own: PlanRow | None, rows: list[PlanRow], proven_s: float) -> int | None:
    """Rank of the scenario's own plan among the simulated rows; None if a plan beyond them may be faster."""
    if own is None or own.time_s > proven_s or own.time_s > rows[-1].time_s:
        return None
    return sum(row.time_s < own.time_s for row in rows) + 1


def _alone(
    scenario: Scenario,
    pools: FleetPools,
    number: int,
    wanted: PlanSpace,
    space: PlanSpace,
    search: PlanAlone,
    say: OnProgress,
) -> PoolAlone:
    """The best plan of one pool alone, with its own GPUs, the same batch and the same values to try."""
    part = pools.parts[number]
    cluster, accelerator = part.cluster, part.cluster.accelerator.name
    say(0.8 + 0.2 * number / len(pools.parts), f"{accelerator} alone")
    one = part.scenario.model_copy(update={"cluster": cluster, "stages": Stages()})
    own = space.model_copy(
        update={
            "pp": wanted.pp,
            # One pool can run schedules that a fleet cannot; without them the fleet would look too good.
            "schedule": wanted.schedule or pool_defaults(),
            "sms": (one.communication.sms,) if one.communication.sms else None,
            "layout": "balanced",
        }
    )
    try:
        return PoolAlone(accelerator, cluster.n_gpus, search(one, own).best)
    except (InputError, InfeasibleError) as error:
        return PoolAlone(accelerator, cluster.n_gpus, None, str(error))


def _notes(study: FleetSearch, objective: str) -> list[str]:
    all_ = len(study.frames) * len(study.space.precision) * len(study.space.recompute)
    notes = [
        f"{study.expanded:,} of {all_:,} "
        "legal combinations of frame, precision and recompute got a layout and its memory; the others have a "
        "lower bound above the last ranked plan"
    ]
    if study.capped:
        notes.append("the search stopped at its limit of frames: a plan beyond it might be among the best")
    if objective == "energy":
        notes.append("energy counts every accelerator at its board's power limit, whatever it does")
    return notes
