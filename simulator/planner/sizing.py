"""Sizing: how many accelerators a training job needs, of which kind, and what they cost within limits.

Every size gets its best plan in closed form; the engine runs the sizes that win, and those next to a limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from fractions import Fraction
from itertools import pairwise
from math import inf, isfinite
from typing import get_args

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.confidence import GENERIC, Confidence
from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.hwmodels.units import SECONDS_PER_DAY, SECONDS_PER_HOUR
from moesim.hwmodels.validation import nearest
from moesim.simulator.common.processes import engine_processes, outcomes, without_cyclic_collection
from moesim.simulator.engine.records import step_time_s
from moesim.simulator.layout.job import resolve
from moesim.simulator.model.counts import parameters_mtp, parameters_total
from moesim.simulator.planner.candidate_search import VariantSearch
from moesim.simulator.planner.goal import Goal, OnProgress, front, no_progress, rising
from moesim.simulator.planner.hardware import PAYMENTS, Payment, price_under
from moesim.simulator.planner.refusals import AT_RISK, FULL, NO_HEADROOM, Refusal
from moesim.simulator.planner.result import CAUSES, PlanRow, step_causes
from moesim.simulator.planner.sized import (
    WINS,
    Bend,
    Curve,
    IllegalSize,
    Limit,
    ScalingCurve,
    Sides,
    SizedPlan,
    Sizing,
    SizingSearch,
    at_size,
    by_cost,
    by_days,
    divides,
    energy_of_size,
    sizes_asked,
    sizing_space,
    winners_of,
)
from moesim.simulator.planner.space import PlanSpace, load_space, with_headroom
from moesim.simulator.predict.driver import predict
from moesim.simulator.predict.work_size import Band
from moesim.simulator.run.simulate_run import interruptions, steps_for
from moesim.simulator.scenario import AnyScenario, Scenario, load_scenario
from moesim.simulator.scenario.defaults import accelerator_named
from moesim.simulator.scenario.inputs import CLOSED_FORM, EVENTS, inputs_of
from moesim.simulator.studies.compare import band_of_margin
from moesim.simulator.studies.effects import draws_s, entry_effects
from moesim.simulator.studies.whole_run import with_default_stops

ROUNDS = 6
"""Most sizes of an accelerator that are tried next to a limit."""


# -- work of one size, also in worker processes --------------------------------------------------------


class _Asked(Struct, frozen=True):
    """The plan search of one size: the scenario there, and what is searched."""

    scenario: Scenario
    space: PlanSpace
    search: SizingSearch


class _Measured(Struct, frozen=True):
    """The simulated step of a plan, with its relative draws."""

    time_s: float
    mfu_causal: float
    confidence: Confidence
    causes_s: dict[str, float]
    board_w: float | None
    """Mean power of a board by what runs (eq. C34); None where nobody knows it."""
    draws: FloatArray | None
    """None where no interval was asked for."""


class _Size(Struct):
    """One size while it is worked on: its best plan, and what the engine measured of it."""

    row: PlanRow
    measured: _Measured | None = None
    point: SizedPlan | None = None


def _best_plan(asked: _Asked) -> PlanRow | str:
    """The best plan of one size in closed form, or why there is none."""
    try:
        with without_cyclic_collection():
            search = VariantSearch({}, asked.scenario, asked.space, Goal(top=1), no_progress)
            if not len(search.candidates.bound):
                return _reason(search.candidates.refused.rows(), search.candidates.legal)
            search.explore(None, no_progress)
            return search.row(search.chosen[0], None)
    except (InputError, InfeasibleError) as error:
        return str(error)


def _reason(refused: Sequence[Refusal], legal: int) -> str:
    """The nearest miss of the memory where plans are legal, else the most frequent reason."""
    memory = [row for row in refused if row.reason in (FULL, AT_RISK, NO_HEADROOM)]
    rows = memory if legal and memory else refused
    said = (row.example if ": " in row.example else f"{row.reason} ({row.example})" for row in rows[:2])
    return "; ".join(said) or "no plan is legal"


def _measure(asked: tuple[Scenario, bool]) -> _Measured | str:
    """Simulate a plan, with or without draws (in a worker process); the message if the engine refuses it."""
    scenario, drawn = asked
    try:
        prepared, executions, result = predict(scenario)
    except (InputError, InfeasibleError) as error:
        return str(error)
    seconds = step_time_s(executions)
    draws = np.asarray(draws_s(seconds, entry_effects(prepared, executions)) / seconds) if drawn else None
    board_w = None if result.energy is None else result.energy.board_w
    causes = step_causes(prepared, executions[0])
    return _Measured(seconds, result.step.mfu_causal, result.confidence, causes, board_w, draws)


def _wall_s(scenario: Scenario, work_s: float, step_s: float, microbatches: int) -> float:
    """Expected seconds of the run with its stops (eqs. J5 and J12); inf for one that practically never ends.

    `microbatches`: those of a step in all pipelines. Raises InputError for stops that this size cannot have.
    """
    stopped, _ = with_default_stops(scenario)
    job = resolve(stopped)
    trained = parameters_total(job.shape) + parameters_mtp(job.shape)
    stops = interruptions(stopped.run, job.cluster, trained, stopped.recipe, microbatches)
    return stops.expected_seconds([work_s], [step_s])


# -- the search over sizes -----------------------------------------------------------------------------


class _Sizer(Struct):
    """Prices sizes and simulates those that matter; `sizes` and `illegal` are by (accelerator, GPUs)."""

    scenario: Scenario
    goal: Goal
    payment: Payment
    search: SizingSearch
    wanted: PlanSpace
    pool: Executor | None
    say: OnProgress
    per_gpu: Fraction | None = None
    """Sequences of a GPU, of a weak curve; None keeps the whole batch."""
    sizes: dict[tuple[str, int], _Size] = field(default_factory=dict)
    illegal: dict[tuple[str, str], str] = field(default_factory=dict)

    def price(self, asked: Iterable[tuple[str | None, str, int]], say: OnProgress) -> None:
        """Search the best plan in closed form at sizes (accelerator, key, value) that are new."""
        works: dict[tuple[str, int], _Asked] = {}
        for accelerator, key, value in asked:
            name = accelerator or self.scenario.machine.accelerator.name
            try:
                there = self._batched(at_size(self.scenario, accelerator, key, value))
                place = (name, there.machine.n_gpus)
                if place not in self.sizes and (name, f"{place[1]:,}") not in self.illegal:
                    works[place] = _Asked(there, sizing_space(there, self.wanted, self.search), self.search)
            except (InputError, InfeasibleError) as error:
                what = f"{value:,}" if key == "cluster.gpus" else f"{value:,} nodes of"
                self.illegal[name, what] = str(error)
        done, places = 0, list(works)
        say(0.0, f"plans at {len(places)} sizes")
        for number, found in outcomes(self.pool, _best_plan, list(works.values())):
            done += 1
            place = places[number]
            say(done / len(places), f"{done} of {len(places)} sizes planned in closed form")
            if isinstance(found, str):
                self.illegal[place[0], f"{place[1]:,}"] = found
                continue
            size = _Size(found)
            self._draw(place, size)

    def _batched(self, there: Scenario) -> Scenario:
        """The scenario with the batch of a GPU kept, on a weak curve."""
        if self.per_gpu is None:
            return there
        sequences = self.per_gpu * there.machine.n_gpus
        if sequences.denominator != 1:
            raise InputError(
                f"a batch of {float(self.per_gpu):g} sequences a GPU is no whole number on "
                f"{there.machine.n_gpus:,} GPUs"
            )
        return there.replace(batch={"sequences": int(sequences)})

    def simulate(self, rows: Iterable[SizedPlan], drawn: bool = True) -> bool:
        """Simulate plans of sizes that were not, with draws or without; returns whether there were any."""
        places = dict.fromkeys((row.accelerator, row.n_gpus) for row in rows)
        known = {place: self.sizes[place].measured for place in places}
        todo = [place for place, one in known.items() if one is None or (drawn and one.draws is None)]
        scenarios = [(self.sizes[place].row.scenario, drawn) for place in todo]
        for number, found in outcomes(self.pool, _measure, scenarios):
            self.say(0.9, f"{number + 1} of {len(todo)} sizes that win simulated")
            size = self.sizes[todo[number]]
            if isinstance(found, str):
                del self.sizes[todo[number]]
                self.illegal[todo[number][0], f"{todo[number][1]:,}"] = found
                continue
            size.measured = found
            self._draw(todo[number], size)
        return bool(todo)

    def _draw(self, place: tuple[str, int], size: _Size) -> None:
        """Work out the figures of a size, and enter it; a run that never ends makes it illegal."""
        row, measured, scenario = size.row, size.measured, size.row.scenario
        seconds = row.time_s if measured is None else measured.time_s
        batch, cluster, tokens = scenario.batch, scenario.machine, scenario.run.tokens
        work_s = steps_for(tokens, batch.sequences, batch.sequence_length) * seconds
        try:
            wall_s = _wall_s(scenario, work_s, seconds, batch.sequences // scenario.parallel.microbatch)
            if not isfinite(wall_s):
                raise InputError("the run never finishes: it stops before it can save")
        except InputError as error:
            self.sizes.pop(place, None)
            self.illegal[place[0], f"{place[1]:,}"] = str(error)
            return
        price, problem = None, ""
        try:
            price = price_under(cluster, self.payment)
        except InputError as error:
            problem = str(error)
        days, gpu_hours = wall_s / SECONDS_PER_DAY, wall_s / SECONDS_PER_HOUR * cluster.n_gpus
        spares = scenario.run.spares.count if scenario.run.spares else 0
        cost = None if price is None else gpu_hours * (1.0 + spares / cluster.nodes) * price.value
        most_usd = inf if self.goal.budget_usd is None else self.goal.budget_usd
        within = days <= (self.goal.deadline_days or inf) and (cost if cost is not None else inf) <= most_usd
        size.point = SizedPlan(
            accelerator=place[0],
            n_gpus=cluster.n_gpus,
            nodes=cluster.nodes,
            node=cluster.node.name,
            network=cluster.network.name,
            nic_bytes_per_s=None if cluster.node.nic_bandwidth is None else cluster.node.nic_bandwidth.value,
            profile=resolve(scenario).profile.name,
            confidence=None if measured is None else measured.confidence,
            plan=row.label,
            precision=row.precision,
            recompute=row.recompute,
            source="closed form" if measured is None else "simulated",
            step_time_s=seconds,
            mfu_causal=None if measured is None else measured.mfu_causal,
            tokens_per_s_per_gpu=batch.sequences * batch.sequence_length / seconds / cluster.n_gpus,
            memory_bytes=row.memory_bytes,
            verdict=row.verdict,
            training_days=work_s / SECONDS_PER_DAY,
            days=days,
            gpu_hours=gpu_hours,
            cost_usd=cost,
            tokens_per_usd=None if cost is None else tokens / cost,
            price=price,
            price_problem=problem or ("" if price else f"no price of {place[0]} is known"),
            **energy_of_size(cluster, None if measured is None else measured.board_w, wall_s),
            within=within,
            spread=None if measured is None or measured.draws is None else Band.of(1.0, measured.draws),
            causes_s={} if measured is None else measured.causes_s,
            inputs=inputs_of(scenario, CLOSED_FORM if measured is None else EVENTS),
        )
        self.sizes[place] = size

    def points(self, accelerator: str | None = None) -> list[SizedPlan]:
        """The legal sizes, by accelerator in the order asked and GPUs."""
        known = [size.point for _, size in sorted(self.sizes.items()) if size.point is not None]
        return [point for point in known if accelerator in (None, point.accelerator)]

    def close_in(self, names: Sequence[str | None]) -> None:
        """Try the whole nodes between the largest size that misses the deadline and the next that keeps it.

        The node counts nearest to what the deadline needs are tried first. Where no size keeps the deadline,
        larger ones are tried up to the first that does.
        """
        for _ in range(ROUNDS):
            asked = [one for name in names if (one := self._next(name)) is not None]
            if not asked:
                return
            self.price(asked, lambda share, text: self.say(0.75 + 0.1 * share, f"next to the limits: {text}"))

    def _next(self, name: str | None) -> tuple[str | None, str, int] | None:
        accelerator = name or self.scenario.machine.accelerator.name
        misses, keeps = self._sides(accelerator)
        deadline = self.goal.deadline_days
        if deadline is None or (keeps is None and misses is None):
            return None
        known = keeps or misses
        assert known is not None
        per_node = known.n_gpus // known.nodes
        need = known.n_gpus * known.days / deadline / per_node
        low = 0 if misses is None else misses.nodes
        high = keeps.nodes if keeps is not None else max(2 * low, int(1.5 * need) + 1)
        if keeps is None and low > need:
            return None  # larger, and still too slow
        tried = {n for a, n in self.sizes if a == accelerator}
        refused = {size for a, size in self.illegal if a == accelerator}
        there = self.sizes[accelerator, known.n_gpus].row.scenario
        space = self._any_size(there)
        for nodes in sorted(range(low + 1, high), key=lambda n: (abs(n - need), n)):
            gpus = nodes * per_node
            if gpus in tried or {f"{gpus:,}", f"{nodes:,} nodes of"} & refused:
                continue
            if divides(self.scenario, space, gpus):
                return name, "cluster.nodes", nodes
        return None

    def _any_size(self, there: Scenario) -> PlanSpace:
        """The space of one size with the pipeline degrees of any other."""
        space = sizing_space(there, self.wanted, self.search)
        if self.search != "narrow" or self.wanted.pp is not None:
            return space if self.search == "own" else space.model_copy(update={"pp": self.wanted.pp})
        most = max(there.parallel.pp, there.shape.n_layers // 2)
        return space.model_copy(update={"pp": tuple(range(1, most + 1))})

    def _sides(self, accelerator: str) -> tuple[SizedPlan | None, SizedPlan | None]:
        """(largest size that misses the deadline below the smallest that keeps it, that smallest one)."""
        days = self.goal.deadline_days or inf
        points = self.points(accelerator)
        keeps = next((point for point in points if point.days <= days), None)
        below = [
            point for point in points if point.days > days and (not keeps or point.n_gpus < keeps.n_gpus)
        ]
        return (below[-1] if below else None), keeps

    def _paid_sides(self, accelerator: str) -> tuple[SizedPlan | None, SizedPlan | None]:
        """(next size above the largest that keeps the budget, that largest one)."""
        budget = self.goal.budget_usd or inf
        points = [point for point in self.points(accelerator) if point.cost_usd is not None]
        kept = [point for point in points if (point.cost_usd or 0.0) <= budget]
        above = [point for point in points if not kept or point.n_gpus > kept[-1].n_gpus]
        return (above[0] if above else None), (kept[-1] if kept else None)

    def sides(self, names: Sequence[str]) -> tuple[Sides, ...]:
        """The sizes of each accelerator on both sides of each limit, and what became of those between."""
        goal, found = self.goal, []
        for name in names:
            if goal.deadline_days is not None:
                found.append(self._beside(name, "deadline", *self._sides(name)))
            if goal.budget_usd is not None:
                found.append(self._beside(name, "budget", *self._paid_sides(name)))
        return tuple(found)

    def _beside(
        self, accelerator: str, limit: Limit, misses: SizedPlan | None, keeps: SizedPlan | None
    ) -> Sides:
        between = ""
        if misses is not None and keeps is not None:
            per_node = keeps.n_gpus // keeps.nodes
            small, large = sorted((misses.n_gpus, keeps.n_gpus))
            space = self._any_size(self.sizes[accelerator, keeps.n_gpus].row.scenario)
            whole = range(small + per_node, large, per_node)
            open_ = [gpus for gpus in whole if divides(self.scenario, space, gpus)]
            refused = [gpus for gpus in open_ if (accelerator, f"{gpus:,}") in self.illegal]
            untried = len(open_) - len(refused)
            between = (
                f"whole nodes between: {len(whole):,} sizes; {len(whole) - len(open_):,} of them split GPUs "
                f"or the batch of {self.scenario.batch.sequences:,} sequences unevenly, no plan is legal and "
                f"fits on {len(refused):,}, {untried:,} not tried"
            )
        elif (keeps or misses) is not None:
            between = f"no size {'misses' if misses is None else 'keeps'} the {limit}"
        return Sides(accelerator=accelerator, limit=limit, misses=misses, keeps=keeps, between=between)

    def winners(self, accelerator: str | None = None) -> dict[str, SizedPlan]:
        """The best sizes within the limits by objective, of one accelerator or of all."""
        return winners_of([point for point in self.points(accelerator) if point.within])

    def nearest(self) -> tuple[SizedPlan, ...]:
        """Where none keeps the limits: the cheapest of those that keep the deadline, the fastest of those
        that keep the budget, and where nothing keeps one of them, what comes nearest to it."""
        points, goal = self.points(), self.goal
        priced = [point for point in points if point.cost_usd is not None] or points
        near: list[SizedPlan] = []
        if not points:
            return ()
        if goal.deadline_days is not None:
            kept = [point for point in priced if point.days <= goal.deadline_days]
            near.append(min(kept, key=by_cost) if kept else min(points, key=by_days))
        if goal.budget_usd is not None:
            kept = [point for point in priced if (point.cost_usd or inf) <= goal.budget_usd]
            near.append(min(kept, key=by_days) if kept else min(priced, key=by_cost))
        return tuple({(point.accelerator, point.n_gpus): point for point in near}.values())

    def settle(self, objective: str, names: Sequence[str]) -> None:
        """Simulate what wins, stands next to a limit or is nearest, until none is a closed form."""
        while True:
            rows = [*self.winners().values()] or list(self.nearest())
            rows += [won[objective] for name in names if objective in (won := self.winners(name))]
            simulated, beside = self.simulate(rows), []
            if self.goal.deadline_days is not None:
                beside = [row for name in names for row in self._sides(name) if row is not None]
            if self.goal.budget_usd is not None:
                beside += [row for name in names for row in self._paid_sides(name) if row is not None]
            if not self.simulate(beside, drawn=False) and not simulated:
                return

    def curve(self, name: str, kind: Curve) -> ScalingCurve:
        """The scaling curve over all legal sizes of an accelerator, simulated."""
        places = [place for place in sorted(self.sizes) if place[0] == name]
        self.simulate(self.points(name))
        pairs = [(size.point, size.measured) for place in places if (size := self.sizes.get(place))]
        known = [(point, measured) for point, measured in pairs if point is not None and measured is not None]
        bends = tuple(_bend(kind, *pair) for pair in pairwise(known))
        points = tuple(point for point, _ in known)
        return ScalingCurve(
            accelerator=name, kind=kind, points=points, bends=bends, illegal=self.refused(name)
        )

    def refused(self, name: str | None = None) -> tuple[IllegalSize, ...]:
        """The sizes at which no plan runs."""
        rows = sorted(self.illegal.items(), key=lambda item: (item[0][0], len(item[0][1]), item[0][1]))
        return tuple(
            IllegalSize(accelerator=accelerator, size=size, reason=reason)
            for (accelerator, size), reason in rows
            if name in (None, accelerator)
        )


def _bend(kind: Curve, before: tuple[SizedPlan, _Measured], after: tuple[SizedPlan, _Measured]) -> Bend:
    """What the larger of two sizes loses against ideal scaling, by mechanism.

    A strong curve's ideal step is that of the smaller size times the ratio of the GPUs, a weak curve's the
    same step. The mechanisms of both steps add up to them (eq. P4), so their differences add up to the loss.
    """
    (small, first), (large, second) = before, after
    assert first.draws is not None and second.draws is not None, "a curve is simulated with draws"
    ideal = small.n_gpus / large.n_gpus if kind == "strong" else 1.0
    lost = {cause: second.causes_s[cause] - ideal * first.causes_s[cause] for cause in CAUSES}
    lost_s = second.time_s - ideal * first.time_s
    margin = lost_s / (ideal * first.time_s)
    main = max(lost, key=lambda cause: lost[cause] if lost_s >= 0.0 else -lost[cause])
    return Bend(
        accelerator=large.accelerator,
        from_gpus=small.n_gpus,
        to_gpus=large.n_gpus,
        lost_s=lost_s,
        lost=band_of_margin(margin, first.draws, second.draws),
        cause=main,
        by_cause_s=lost,
    )


def size(
    scenario: AnyScenario,
    *overrides: str,
    nodes: str | int | Sequence[int] | None = None,
    gpus: str | int | Sequence[int] | None = None,
    accelerators: Sequence[str] = (),
    deadline_days: float | None = None,
    budget_usd: float | None = None,
    objective: str = "cost",
    payment: Payment = "as stated",
    search: SizingSearch = "narrow",
    space: PlanSpace | str | None = None,
    headroom: float | None = None,
    curve: Curve | None = None,
    workers: int = 1,
    scheduler: str | None = None,
    progress: OnProgress | None = None,
) -> Sizing:
    """Size a training job: the fewest GPUs, the cheapest and the fastest size within deadline and budget.

    `nodes` or `gpus`: sizes to try, as a list or an expression such as `64..1024:x2`; absent, doubling sizes
    by rule, and with a deadline the whole nodes on both sides of it. `accelerators`: names, in short too
    (`h100`), each with its usual node, network, profile and price; absent, the scenario's cluster. Limits
    count the stops of the run (`run.failures=none` turns them off). `objective`: gpus, cost (most tokens per
    dollar) or time. `payment`: as in `compare_hardware`. `search`: `narrow` is quick, `whole` tries all
    plans, `own` keeps the scenario's plan; `space` states keys of it. `curve`: simulates every size with the
    whole batch (`strong`) or the batch of a GPU (`weak`) kept, and names what makes it bend. `scheduler`:
    address of a Dask cluster to use in place of `workers` processes. `progress` is
    called with the share of the work (0 to 1) and a text. Raises InputError for malformed sizes, limits and
    names; sizes that cannot be are in `illegal`, and where none keeps the limits `winners` is empty.
    """
    loaded = load_scenario(scenario, overrides)
    words = (
        ("objective", objective, tuple(WINS)),
        ("payment", payment, PAYMENTS),
        ("curve", curve, get_args(Curve)),
    )
    _check(loaded, (*words, ("search", search, get_args(SizingSearch))))
    goal = Goal(top=1, deadline_days=deadline_days, budget_usd=budget_usd)
    goal.check_limits()
    wanted = with_headroom(load_space(space), headroom)
    if wanted.variants:
        raise InputError(
            f"sizing varies the size alone, and the space varies {', '.join(wanted.variants)} too: state it "
            "as an override"
        )
    named = dict.fromkeys(map(accelerator_named, accelerators))
    names: tuple[str | None, ...] = tuple(named) or (None,)
    say = rising(progress or no_progress)
    asked = sizes_asked(loaded, names, nodes, gpus)
    with engine_processes(workers, scheduler) as pool:
        sizer = _Sizer(loaded, goal, payment, search, wanted, pool, say)
        sizer.price(asked, lambda share, text: say(0.75 * share, text))
        if (nodes is None and gpus is None) or not sizer.winners():
            sizer.close_in(names)
        plain = [name or loaded.machine.accelerator.name for name in names]
        sizer.settle(objective, plain)
        curves = _curves(sizer, asked, plain, curve)
    say(1.0, "sized")
    return _finished(sizer, objective, plain, curves)


def _curves(
    sizer: _Sizer, asked: Sequence[tuple[str | None, str, int]], names: Sequence[str], kind: Curve | None
) -> tuple[ScalingCurve, ...]:
    """The scaling curves that are asked for; those of a weak curve search plans for batches of their own."""
    if kind == "weak":
        own = sizer.scenario
        per_gpu = Fraction(own.batch.sequences, own.machine.n_gpus)
        sizer = replace(sizer, goal=Goal(top=1), per_gpu=per_gpu, sizes={}, illegal={})
        sizer.price(asked, lambda share, text: sizer.say(0.9, f"weak curve: {text}"))
    return () if kind is None else tuple(sizer.curve(name, kind) for name in names)


def _check(scenario: Scenario, chosen: Sequence[tuple[str, str | None, Sequence[str]]]) -> None:
    """Raise InputError for a fleet and for words that are not among those known, as (key, value, known)."""
    if scenario.fleet is not None:
        raise InputError(
            "sizing takes one cluster, and the scenario has a fleet: name accelerators without it"
        )
    for key, value, known in chosen:
        if value is not None and value not in known:
            raise InputError(
                f"{key}={value!r} is not one of {', '.join(known)}{nearest(str(value), list(known))}",
                key=key,
                nearest=tuple(known),
            )


def _finished(
    sizer: _Sizer, objective: str, names: Sequence[str], curves: tuple[ScalingCurve, ...]
) -> Sizing:
    """The result of a finished search."""
    goal, points, winners = sizer.goal, sizer.points(), sizer.winners()
    best = [sizer.winners(name).get(objective) for name in names]
    priced = [point for point in points if point.cost_usd is not None]
    kept = front([(point.days, point.cost_usd or 0.0) for point in priced])
    defaults = with_default_stops(sizer.scenario)[1]
    stops = "count the stops" if defaults or sizer.scenario.run.interrupted else "are those without stops"
    notes = [f"days and cost {stops} of the run; intervals are those of the step (eq. U2)"]
    notes += ["* closed form, within 3 % of the engine for 95 of 100 plans"]
    if any(point.energy_j is not None for point in points):
        notes += ["energy: of simulated sizes by what runs (eq. C34), of closed forms at the board's limit"]
    if spares := sizer.scenario.run.spares:
        notes += [f"cost pays for the spare nodes too (run.spares: {spares.count:,})"]
    levels = {(point.accelerator, point.profile, point.confidence) for point in points if point.confidence}
    notes += [
        f"{name} stands on profile {profile}: its GEMMs on "
        + ("datasheet peaks" if level == "peak-only" else f"{level} rates")
        + (", all else on assumed fractions of the datasheet" if profile == GENERIC else "")
        for name, profile, level in sorted(levels)
        if level != "measured"
    ]
    notes += sorted({point.price_problem for point in points if point.price_problem})
    return Sizing(
        scenario=sizer.scenario.name,
        inputs=inputs_of(sizer.scenario),
        objective=objective,
        payment=sizer.payment,
        search=sizer.search,
        deadline_days=goal.deadline_days,
        budget_usd=goal.budget_usd,
        points=tuple(points),
        illegal=sizer.refused(),
        winners=winners,
        by_accelerator=tuple(row for row in best if row is not None),
        sides=sizer.sides(names),
        frontier=tuple(sorted((priced[n] for n in kept), key=by_days)),
        nearest=() if winners else sizer.nearest(),
        curves=curves,
        defaults=defaults,
        notes=tuple(notes),
    )
