"""Plan search: bounds every plan, estimates the promising ones in closed form and simulates the best."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial
from itertools import combinations, islice, product
from math import isfinite
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.simulator.common.processes import engine_processes, outcomes, without_cyclic_collection
from moesim.simulator.dispatchers.registry import dispatcher
from moesim.simulator.layout.job import resolve
from moesim.simulator.planner.candidate_search import VariantSearch
from moesim.simulator.planner.engine_stage import (
    draws_of_own,
    placed,
    rank,
    simulate_own,
    simulated,
    with_front,
)
from moesim.simulator.planner.fleet.simulate import plan_fleet
from moesim.simulator.planner.goal import Goal, OnProgress, equal_part, no_progress, rising, scaled
from moesim.simulator.planner.placements import IN_ORDER
from moesim.simulator.planner.refusals import AT_RISK, Refusals, refusal_text
from moesim.simulator.planner.result import PlanResult, PlanRow, PlanStep, TrainerVerdict, scenario_of
from moesim.simulator.planner.space import (
    PlanSpace,
    headroom_sentence,
    kept_as_stated,
    load_space,
    with_defaults,
    with_headroom,
    with_trainer,
)
from moesim.simulator.scenario import AnyScenario, Scenario, load_scenario, with_overrides
from moesim.simulator.scenario.inputs import inputs_of
from moesim.simulator.schedules import SCHEDULES
from moesim.simulator.trainers.registry import trainer_of
from moesim.simulator.trainers.trainer import Trainer

OWN, BOUNDED, ESTIMATED = 0.62, 0.66, 0.75
"""Shares of the progress bar at which the bounds, the scenario's own plan and the closed forms are done; as
measured on the home case on one core, so that the share grows with time."""


def plan(
    scenario: AnyScenario,
    *overrides: str | PlanSpace,
    space: PlanSpace | str | None = None,
    objective: str = "time",
    top: int = 10,
    deadline_days: float | None = None,
    budget_usd: float | None = None,
    progress: OnProgress | None = None,
    workers: int = 1,
    trainer: str | None = None,
    headroom: float | None = None,
    scheduler: str | None = None,
) -> PlanResult:
    """Find the best plans for a scenario's model and batch on its cluster or fleet (docs/planner.md).

    `scenario` and overrides: as for `load_scenario`. `space`: values to try (`PlanSpace`, a file, or None
    for the defaults); a `PlanSpace` may also stand among the overrides. `objective`: time, cost (of the
    run), energy, memory (most head-room), or deadline (cheapest that keeps `deadline_days`; fewest GPU-
    hours if the cluster has no price). `top`: number of families that the engine simulates and ranks, up
    to 1,000; plans of one family differ only in precision, recompute, SMs and ZeRO stage. `workers`:
    processes that run the engine (1 = this process); the result does not depend on it, and a script with
    more than one must guard its main module. `scheduler`: address of a Dask cluster to use instead.
    `trainer`: a training framework, such as "megatron" or "megatron@0.14"; only plans that it can run are
    searched, priced as it runs them, and `result.trainer` says what the best of all plans would gain.
    `headroom`: share of the memory that the bytes in use leave free; 0 admits plans at risk; None keeps
    what framework and allocator may reserve. `progress` gets the share of the work that is done (0 to 1)
    and a text, also while it waits for the engine; an exception that it raises ends the search. Raises
    InputError for a malformed or empty space and for contradictory limits, and InfeasibleError, with
    counts by reason, if no plan is legal, fits and keeps the limits.
    """
    spaces = [one for one in (space, *overrides) if isinstance(one, PlanSpace)]
    if len(spaces) > 1 or (spaces and isinstance(space, str)):
        raise InputError("plan takes one space, and several are given")
    space = spaces[0] if spaces else space
    scenario = load_scenario(scenario, [text for text in overrides if not isinstance(text, PlanSpace)])
    asked, say = scenario, rising(progress or no_progress)
    wanted, goal = with_headroom(load_space(space), headroom), Goal(objective, top, deadline_days, budget_usd)
    goal.check(scenario)
    framework = None if trainer is None else trainer_of(trainer)
    scenario, trained = with_trainer(scenario, wanted, framework.release if framework else None)
    if framework is not None and scenario.fleet is not None:
        raise InputError(f"trainer={trainer}: no trainer splits layers over a fleet's pools; give a cluster")
    with engine_processes(workers, scheduler) as pool, without_cyclic_collection():
        if framework is not None:
            alone = replace(goal, top=1)
            started = None if pool is None else pool.submit(_best_of_all, scenario, wanted, alone)
            adapted, replaced = framework.adapted(scenario, any_plan=True)
            result = plan_cluster(adapted, wanted, goal, say, pool, framework)
            best = _best_of_all(scenario, wanted, alone) if started is None else started.result()
            gain = 0.0 if best is None else 1.0 - goal.value(best) / goal.value(result.best)
            reasons = () if best is None else framework.problems_of(best.scenario)
            verdict = TrainerVerdict(framework.label, replaced, best, reasons, gain)
            searched = dataclasses.replace(result, trainer=verdict)
        elif scenario.fleet is not None:
            searched = plan_fleet(scenario, wanted, goal, say, pool, _fastest_alone)
        else:
            searched = plan_cluster(scenario, wanted, goal, say, pool)
    kept = (headroom_sentence(wanted, scenario), *trained, *kept_as_stated(wanted, scenario))
    return dataclasses.replace(searched, inputs=inputs_of(asked), headroom=wanted.headroom, kept=kept)


def _best_of_all(scenario: Scenario, wanted: PlanSpace, goal: Goal) -> PlanRow | None:
    """The best plan of a space whatever the trainer (in a worker process); None if none fits.

    The family that is fastest in closed form is simulated for each variant of the space, and nothing else.
    """
    rows = []
    for search in _searches(scenario, wanted, goal, no_progress, None, None):
        if not len(search.candidates.bound):
            continue
        search.explore(None, no_progress)
        for number in search.chosen:
            step = simulated(scenario_of(search.scenario, search.candidates, number))
            if isinstance(step, str) or not step.keeps(search.headroom):
                continue
            if (step.time_s or 0.0) <= search.most_s:
                rows.append(search.row(number, step))
    return min(rows, key=goal.value, default=None)


def plan_cluster(
    scenario: Scenario,
    wanted: PlanSpace,
    goal: Goal,
    say: OnProgress,
    pool: Executor | None,
    trainer: Trainer | None = None,
) -> PlanResult:
    """The best plans for a scenario on one cluster, over all variants of the space."""
    start = time.perf_counter()
    waiting = partial(say, OWN, "waiting for the scenario's own plan")
    own_step = partial(simulate_own, draws=goal.objective != "memory")
    own_plan = outcomes(pool, own_step, [] if wanted.variants else [scenario], waiting)
    searches = _searches(scenario, wanted, goal, say, trainer, pool)
    refused = Refusals()
    for search in searches:
        refused.merge(search.candidates.refused)
    bounded = time.perf_counter()
    alive = [search for search in searches if len(search.candidates.bound)]
    if not alive:
        raise InfeasibleError(_nothing(refused))
    mine = next((step for _, step in own_plan), "")
    own = None if isinstance(mine, str) else searches[0].own(mine)
    reasons = () if own is None else _against_own(trainer, scenario)
    for number, search in enumerate(alive):
        search.explore(own, equal_part(say, number, len(alive), BOUNDED, ESTIMATED))
    estimated = time.perf_counter()
    rows, problems, draws = rank(alive, goal, pool, scaled(say, ESTIMATED, 1.0))
    if not rows:
        first = "no plan that was simulated keeps the deadline or budget"
        raise InfeasibleError(_nothing(refused, "; ".join([first, *problems[:2]])))
    ranked = len(rows)
    rows, pareto, claims = with_front(alive, rows, goal, pool)
    rows, own = placed(rows, own, goal, pool, draws | draws_of_own(mine))
    considered = sum(s.candidates.space.size for s in searches)
    proven = min(s.proven_s for s in alive)
    return PlanResult(
        objective=goal.objective,
        ranked=tuple(rows),
        pareto=tuple(pareto),
        refused=refused.rows(),
        own=own,
        own_rank=None if own is None or reasons else alive[0].rank_of(own),
        considered=considered,
        legal=sum(s.candidates.legal for s in searches),
        fitting=sum(s.candidates.fitting for s in searches),
        estimated=sum(s.study.estimated for s in alive),
        simulated=ranked + claims,
        price_tables=sum(s.candidates.priced for s in searches),
        proven_s=proven if isfinite(proven) else None,
        rivals=0 if goal.objective == "memory" else sum(s.rivals(rows) for s in alive),
        notes=(*_notes(alive, goal, mine), *_saved_sms(alive, rows[0], wanted), *reasons, *problems),
        evaluated_per_s=considered / (bounded - start),
        seconds={
            "bounds": bounded - start,
            "closed form": estimated - bounded,
            "engine": time.perf_counter() - estimated,
        },
    )


def _against_own(trainer: Trainer | None, scenario: Scenario) -> tuple[str, ...]:
    """A sentence on why the trainer cannot run the scenario's own plan; none where it can."""
    problems = () if trainer is None else trainer.problems_of(scenario)
    if trainer is None or not problems:
        return ()
    return (f"{trainer.label} cannot run the scenario's own plan: {'; '.join(problems)}",)


def _searches(
    scenario: Scenario,
    wanted: PlanSpace,
    goal: Goal,
    say: OnProgress,
    trainer: Trainer | None,
    pool: Executor | None,
) -> list[VariantSearch]:
    """One search for every variant of the space, with its candidates."""
    variants = [dict(zip(wanted.variants, one, strict=True)) for one in product(*wanted.variants.values())]
    searches = []
    for number, changed in enumerate(variants):
        texts = [f"{key}={json.dumps(value)}" for key, value in changed.items()]
        own = with_overrides(scenario, texts) if texts else scenario
        part = equal_part(say, number, len(variants), 0.0, OWN)
        searches.append(VariantSearch(changed, own, wanted, goal, part, trainer, pool))
    return searches


def _fastest_alone(scenario: Scenario, space: PlanSpace) -> PlanResult:
    """The fastest plan of one pool of a fleet."""
    return plan(scenario, space, top=1)


def _notes(searches: list[VariantSearch], goal: Goal, own: PlanStep | str) -> list[str]:
    notes = list(dict.fromkeys(note for search in searches for note in search.notes))
    if isinstance(own, str) and own:
        notes.append(f"the scenario's own plan is not among them: {own}")
    if any(search.study.capped for search in searches):
        notes.append(
            "the closed form stopped at its limit of plans: a plan beyond it might be among the best"
        )
    if goal.objective == "energy":
        notes.append("energy counts every accelerator at its board's power limit, whatever it does")
    return notes


RISK = "not priced: fewer channels have fewer sends in flight on a congested network or beside late ranks"
"""What a saving of communication SMs risks and the prices do not contain."""


def _saved_sms(searches: Sequence[VariantSearch], best: PlanRow, wanted: PlanSpace) -> list[str]:
    """A note on what fewer communication SMs than were ever published would gain the best plan."""
    kernels = best.scenario.communication.kernels
    published = dispatcher(kernels).sms
    if published is None or wanted.sms is not None or best.ep == 1 or best.sms <= published.fewer:
        return []
    search = next(s for s in searches if s.changed == dict(best.changed))
    few = best.scenario.communication.model_copy(update={"sms": published.fewer})
    scenarios = best.scenario, best.scenario.model_copy(update={"communication": few})
    now_s, then_s = (search.study.seconds_of(s, best.layers, best.microbatches) for s in scenarios)
    return [
        f"{kernels} was published with {published.least.n} to {published.most.n} SMs, and no fewer "
        f"are tried: {published.fewer} would change the step of the best plan by "
        f"{then_s / now_s - 1.0:+.1%} (closed form); {RISK}"
    ]


def _nothing(refused: Refusals, first: str = "no plan of the space is legal and fits") -> str:
    remedy = "; a head-room of 0 admits plans at risk" if AT_RISK in refused.counts else ""
    return refusal_text(refused, first, "cluster") + remedy


# -- nearest -----------------------------------------------------------------------------------------
# Repairs a plan: the legal plans that fit and change the fewest keys of a scenario, fastest first.

REPAIRED = ("pp", "ep", "tp", "cp", "zero_stage", "recompute", "microbatch", "schedule", "vpp")
"""Keys of a plan that a repair may change; precision, communication SMs and placement keep their values."""

MOST_CHANGES = 3
"""Most keys that are changed together before a search of the whole space is the better question."""


class Repair(Struct, frozen=True):
    """A legal plan that fits, and the keys of the plan that it changes: (key, before, after)."""

    row: PlanRow
    changes: tuple[tuple[str, object, object], ...]


def nearest_plans(
    scenario: Scenario, most: int = 3, progress: OnProgress | None = None
) -> tuple[Repair, ...]:
    """Find the legal plans that fit and differ from the scenario's own in the fewest keys, fastest first.

    Plans with one changed key are tried before those with two, and these before those with three; layers
    are balanced over the stages anew. At most `most` plans with the same number of changes are simulated and
    returned. `progress` gets the share of the work and a text. Raises InputError for a fleet, and
    InfeasibleError where no change of up to three keys gives a legal plan that fits.
    """
    if scenario.fleet is not None:
        raise InputError("a repair changes the plan of one cluster; a fleet has several: use moesim plan")
    say = progress or no_progress
    goal = Goal(top=most)
    goal.check(scenario)
    job = resolve(scenario)
    whole = with_defaults(PlanSpace(), scenario, job.shape, job.cluster)
    own = own_plan(scenario)
    with without_cyclic_collection():
        for count in range(1, MOST_CHANGES + 1):
            searches: list[VariantSearch] = []
            keys = list(combinations(REPAIRED, count))
            for number, free in enumerate(keys):
                share = (count - 1 + number / len(keys)) / MOST_CHANGES
                say(share, f"plans that change {' and '.join(free)}")
                values = {key: tuple(v for v in getattr(whole, key) if v != own[key]) for key in free}
                if not all(values.values()) or not {*values.get("schedule", ()), own["schedule"]} <= {
                    *SCHEDULES
                }:
                    continue
                space = space_of_plan(scenario, own, values)
                with suppress(InputError, InfeasibleError):  # no plan of this space is legal and fits
                    search = VariantSearch({}, scenario, space, goal, no_progress)
                    if len(search.candidates.bound):
                        search.explore(None, no_progress)
                        searches.append(search)
            repairs = list(islice(_simulated(scenario, own, searches), most))
            if repairs:
                say(1.0, f"{len(repairs)} plans fit")
                return tuple(sorted(repairs, key=lambda repair: repair.row.time_s))
    raise InfeasibleError(
        f"no change of up to {MOST_CHANGES} keys ({', '.join(REPAIRED)}) gives a legal plan that fits into "
        f"{job.cluster.n_gpus:,} x {job.cluster.accelerator.name}; use more GPUs, or search the whole space "
        "(moesim plan)"
    )


def own_plan(scenario: Scenario) -> dict[str, Any]:
    """The scenario's own values of the keys that a repair may change."""
    own = {key: getattr(scenario.parallel, key) for key in REPAIRED if hasattr(scenario.parallel, key)}
    return {**own, "recompute": scenario.recompute, "schedule": scenario.schedule}


def space_of_plan(
    scenario: Scenario, own: Mapping[str, Any], free: Mapping[str, tuple[Any, ...]]
) -> PlanSpace:
    """The scenario's own plan (`own_plan`), with the values of the `free` keys in place of its own."""
    return PlanSpace(
        **{key: free.get(key, (own[key],)) for key in REPAIRED},
        precision=(scenario.precision,),
        sms=(scenario.communication.sms,),
        expert_tp=(scenario.parallel.expert_tp,),
        placement=(scenario.routing.eplb or IN_ORDER,),
    )


def _simulated(
    scenario: Scenario, own: Mapping[str, Any], searches: Sequence[VariantSearch]
) -> Iterator[Repair]:
    """The chosen plans that fit in the engine too, fastest in closed form first."""
    plans = [
        (float(search.candidates.time_s[number]), number, search)
        for search in searches
        for number in search.chosen
    ]
    for _, number, search in sorted(plans, key=lambda item: item[0]):
        candidate = scenario_of(scenario, search.candidates, number)
        step = simulated(candidate)
        if isinstance(step, PlanStep) and step.keeps(search.headroom):
            changes = ((key, own[key], after) for key, after in own_plan(candidate).items())
            different = tuple(change for change in changes if change[1] != change[2])
            yield Repair(search.row(number, step), different)
