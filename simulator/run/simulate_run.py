"""Simulates a run from start to end: its phases, steps, interruptions, finish date and bill."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.provenance import sourced_numbers
from moesim.hwmodels.units import SECONDS_PER_DAY, SECONDS_PER_HOUR, parse_quantity, time_text
from moesim.simulator.layout.job import ResolvedJob
from moesim.simulator.model.precision import Precision
from moesim.simulator.run.bill import HOURS_PER_DAY, NO_RATES, BoardPower, per_hour
from moesim.simulator.run.events import simulate_events, simulate_one
from moesim.simulator.run.failures import (
    NODE,
    PROCESS,
    RACK,
    SYSTEM,
    FailureModel,
    Groups,
    Interruptions,
    Offenders,
    Outage,
    SlowNodes,
    Stop,
    Tier,
    checkpoint_bytes,
    checkpoint_tiers,
    loads_s,
)
from moesim.simulator.run.report import (
    FinishDates,
    Ledger,
    PhaseWork,
    RunReport,
    date_text,
    mean,
    outlook,
    spread,
)
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.run_plan import OPTIMAL, Ramp, RunPhase, RunPlan
from moesim.simulator.schedules import build

# -- phases ------------------------------------------------------------------------------------------
# Divides a run plan into whole steps with batch ramps; interpolates step times between batches (pure).


class Level(Struct, frozen=True):
    """Steps at one batch size."""

    sequences: int
    steps: int


def steps_for(tokens: float, sequences: int, sequence_length: int) -> int:
    """Number of whole steps that cover a number of tokens (eq. F6)."""
    return math.ceil(tokens / (sequences * sequence_length))


def levels(
    tokens: float, sequences: int, sequence_length: int, ramp: Ramp | None, increment: int
) -> list[Level]:
    """Batch sizes in order, each with its steps (eq. J1).

    The ramp's increments share its tokens evenly; a step belongs to the increment in which it starts.
    `increment` (sequences) applies where the ramp states none. Raises InputError for a ramp that decreases,
    and for an increment that does not divide it.
    """
    if ramp is None:
        return [Level(sequences, steps_for(tokens, sequences, sequence_length))]
    by = ramp.increment or increment
    if ramp.sequences >= sequences:
        raise InputError(
            f"run.ramp.sequences={ramp.sequences} must be below the full batch of {sequences}; leave the "
            "ramp out for a constant batch"
        )
    if (sequences - ramp.sequences) % by:
        raise InputError(
            f"run.ramp: from {ramp.sequences} to {sequences} sequences is not a whole number of increments "
            f"of {by}; state run.ramp.increment, for example {math.gcd(sequences - ramp.sequences, by)}"
        )
    count = (sequences - ramp.sequences) // by
    sizes, done = [], 0
    for number in range(count):
        batch = ramp.sequences + number * by
        boundary = ramp.tokens * (number + 1) / count
        steps = max(0, math.ceil((boundary - done) / (batch * sequence_length)))
        sizes.append(Level(batch, steps))
        done += steps * batch * sequence_length
    rest = max(0, math.ceil((tokens - done) / (sequences * sequence_length)))
    return [*sizes, Level(sequences, rest)]


class StepTimes(Struct, frozen=True):
    """Step time (s) over batch size (sequences), linear between a few simulated batches (eq. J1).

    A step takes the fill and end of the pipeline plus a time for each micro-batch, so it is nearly linear.
    `error` is the largest relative error at an inner point that the interpolation leaves out.
    """

    sequences: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, sequences: int) -> float:
        """Step time at a batch size; below the smallest simulated batch the first line is extended."""
        if len(self.sequences) == 1:
            return self.seconds[0]
        right = min(max(bisect_right(self.sequences, sequences), 1), len(self.sequences) - 1)
        return _line(
            sequences,
            (self.sequences[right - 1], self.seconds[right - 1]),
            (self.sequences[right], self.seconds[right]),
        )

    @property
    def error(self) -> float:
        """Largest relative error at an inner point of the line between its neighbours; 0 without one."""
        points = list(zip(self.sequences, self.seconds, strict=True))
        misses = [
            abs(_line(points[i][0], points[i - 1], points[i + 1]) / points[i][1] - 1.0)
            for i in range(1, len(points) - 1)
        ]
        return max(misses, default=0.0)


def _line(x: int, first: tuple[int, float], second: tuple[int, float]) -> float:
    slope = (second[1] - first[1]) / (second[0] - first[0])
    return first[1] + slope * (x - first[0])


def work_seconds(levels: Sequence[Level], times: StepTimes) -> float:
    """Seconds of all steps of a phase."""
    return math.fsum(level.steps * times.at(level.sequences) for level in levels)


# -- work --------------------------------------------------------------------------------------------
# Computes the training time of each phase of a run from simulated steps.


class StepFigures(Struct, frozen=True):
    """Time and memory of one simulated step, for the simulation of a run."""

    time_s: float
    needed_bytes: float
    capacity_bytes: float


Measure = Callable[[ResolvedJob], StepFigures]
"""Simulates one step of a job; raises InputError for an illegal one."""


class _Stretch(Struct, frozen=True):
    """The work of a simulated phase: its job, and its tokens or steps."""

    name: str
    job: ResolvedJob
    tokens: float | None
    steps: int | None
    ramp: Ramp | None
    assumption: str

    @property
    def quantum(self) -> int:
        """Sequences of one micro-batch in all pipelines together."""
        return self.job.layout.dp * self.job.scenario.parallel.microbatch


def phase_works(job: ResolvedJob, measure: Measure) -> list[PhaseWork]:
    """Every phase of the job's run plan, the main one first (eq. J1).

    `measure` is called once for each phase, and up to twice more for a batch ramp. Raises InputError with the
    name of a phase whose plan is illegal.
    """
    scenario, plan = job.scenario, job.scenario.run
    main = _Stretch("main", job, plan.tokens, None, plan.ramp, "")
    works = [replace(_simulated(main, measure), starts=True)]
    for phase in plan.phases:
        if phase.gpu_hours is not None:
            hours = phase.gpu_hours
            note = f"{phase.name}: {hours.text} as stated ({hours.source}), not predicted"
            seconds = hours.value * SECONDS_PER_HOUR / job.cluster.n_gpus
            works.append(PhaseWork(phase.name, True, 0, 0.0, 0, 0, 0.0, seconds, notes=(note,)))
            continue
        try:
            own = job.changed_to(phase_scenario(scenario, phase))
            stretch = _Stretch(phase.name, own, phase.tokens, phase.steps, phase.ramp, phase.assumption)
            works.append(replace(_simulated(stretch, measure), starts=bool(phase.override)))
        except InputError as error:
            raise InputError(f"run.phases {phase.name!r}: {error}") from None
    return works


def phase_scenario(scenario: Scenario, phase: RunPhase) -> Scenario:
    """The scenario with the batch, the sequence length and the overrides of a phase."""
    batch = scenario.batch
    return scenario.overridden(
        f"batch.sequences={phase.sequences or batch.sequences}",
        f"batch.sequence_length={phase.sequence_length or batch.sequence_length}",
        *phase.override,
    )


def _simulated(stretch: _Stretch, measure: Measure) -> PhaseWork:
    name, scenario, ramp = stretch.name, stretch.job.scenario, stretch.ramp
    batch = scenario.batch
    full = measure(stretch.job)
    notes = [f"{name}: {stretch.assumption}"] if stretch.assumption else []
    if full.needed_bytes > full.capacity_bytes:
        notes.append(
            f"{name}: does not fit: {full.needed_bytes / 2**30:.1f} of {full.capacity_bytes / 2**30:.1f} GiB"
        )
    if stretch.steps is not None:
        steps = [Level(batch.sequences, stretch.steps)]
    else:
        assert stretch.tokens is not None
        steps = levels(stretch.tokens, batch.sequences, batch.sequence_length, ramp, stretch.quantum)
    times = StepTimes((batch.sequences,), (full.time_s,))
    if ramp is not None:
        times = _ramp_times(stretch, ramp, full.time_s, measure)
        if ramp.sequences < times.sequences[0]:
            notes.append(
                f"{name}: schedule {scenario.schedule} cannot run batches below {times.sequences[0]:,} "
                "sequences on this plan; their step times continue the line of the next ones down to "
                f"{ramp.sequences:,}"
            )
    return PhaseWork(
        name=name,
        stated=False,
        steps=sum(level.steps for level in steps),
        tokens=float(sum(level.steps * level.sequences * batch.sequence_length for level in steps)),
        sequences=batch.sequences,
        sequence_length=batch.sequence_length,
        step_time_s=full.time_s,
        seconds=work_seconds(steps, times),
        interpolation_error=times.error,
        notes=tuple(notes),
    )


def _ramp_times(stretch: _Stretch, ramp: Ramp, full_s: float, measure: Measure) -> StepTimes:
    """Step times at the smallest batch that the schedule can run, at a middle batch and at the full one."""
    scenario, quantum = stretch.job.scenario, stretch.quantum
    full = scenario.batch.sequences
    first = _legal(scenario, math.ceil(ramp.sequences / quantum), full // quantum, quantum)
    if first == full:
        raise InputError(
            f"run.ramp: schedule {scenario.schedule} runs no batch from {ramp.sequences} to below {full} "
            "sequences on this plan, so the times of their steps are not known; use fewer data-parallel "
            "ranks or another schedule"
        )
    middle = _legal(scenario, math.isqrt(first * full) // quantum, full // quantum, quantum)
    seconds = {full: full_s}
    for sequences in (first, middle):
        if sequences not in seconds:
            smaller = scenario.overridden(f"batch.sequences={sequences}")
            seconds[sequences] = measure(stretch.job.changed_to(smaller)).time_s
    return StepTimes(tuple(sorted(seconds)), tuple(seconds[s] for s in sorted(seconds)))


def _legal(scenario: Scenario, least: int, most: int, quantum: int) -> int:
    """Sequences of the smallest batch, with `least` or more micro-batches, that the schedule can run."""
    plan = scenario.parallel
    for count in range(max(1, least), most):
        if scenario.schedule.lower().endswith(".csv"):
            break  # a file is written for one number of micro-batches
        try:
            build(scenario.schedule, plan.pp, count, plan.vpp)
        except InputError:
            continue
        return count * quantum
    return most * quantum


# -- interruptions -----------------------------------------------------------------------------------
# Derives the interruptions of a run plan: rates, checkpoint costs and interval, and whether it can end.


def interruptions(
    plan: RunPlan, cluster: Cluster, parameters: int, recipe: Precision, microbatches: int = 0
) -> Interruptions:
    """The interruptions of a plan on a cluster (eqs. J2 to J4, J11).

    `parameters`: number of trained parameters, which sets the size of a checkpoint. `microbatches`: those of
    a step in all pipelines. Raises InputError where an asynchronous write takes longer than the interval, for
    more spares than nodes, for groups that do not divide the nodes, and for rates above one a second.
    """
    _check_machine(plan, cluster)
    severities = _severities(plan, cluster)
    save = plan.checkpoint
    size = checkpoint_bytes(parameters, recipe)
    if save is not None and save.size is not None:
        size = save.size.value
    outlives = [*(tier.outlives for tier in save.tiers), SYSTEM] if save else [SYSTEM]
    loads = loads_s(save, cluster, size)
    stops = []
    for stop, severity in severities:
        tier = next(i for i, kept in enumerate(outlives) if kept >= severity)
        stops.append(
            replace(stop, tier=tier, restart_s=_restart_s(plan, cluster, severity, loads[tier], stop.planned))
        )
    tiers: tuple[Tier, ...] = (Tier(),)
    saved = None
    if save is not None:
        needs = [math.fsum(s.rate_per_s for s in stops if s.tier == i) for i in range(len(outlives))]
        tiers, saved = checkpoint_tiers(save, cluster, size, needs, loads)
    outlives_node = next(i for i, kept in enumerate(outlives) if kept >= NODE)
    if plan.preemption is not None and plan.preemption.notice.value < tiers[outlives_node].stall_s:
        stops = [replace(s, planned=s.planned and s.name != PREEMPTED) for s in stops]  # too late to save
    model = replace(_model(plan, cluster, stops, tiers, microbatches), outlives_node=outlives_node)
    parts: dict[str, float] = {}
    if plan.restart is not None and plan.restart.parts is not None and stops:
        load = loads[outlives_node]
        how = RESTART_OF[plan.spares.kind if plan.spares else "cold"]
        parts = plan.restart.parts.seconds(cluster.nodes, cluster.n_gpus, load, how)._asdict()
    return Interruptions(model, saved, tuple(_notes(plan)), parts)


def _model(
    plan: RunPlan, cluster: Cluster, stops: Sequence[Stop], tiers: tuple[Tier, ...], microbatches: int
) -> FailureModel:
    """The failure model of a plan, from its stops and checkpoint tiers."""
    names = [stop.name for stop in stops]
    slow, pause, groups, spares = plan.slow, plan.maintenance, plan.fault_tolerance, plan.spares
    offenders = plan.failures.repeat_offenders if plan.failures else None
    model = FailureModel(
        stops=tuple(stops),
        tiers=tiers,
        nodes=cluster.nodes,
        spares=spares.count if spares else None,
        crews=spares.crews if spares else None,
        trays=spares.trays if spares else 0,
        growth=names.index(GROWTH) if GROWTH in names else -1,
    )
    if offenders is not None:
        count = max(1, round(offenders.nodes.value * cluster.nodes))
        who = Offenders(count, offenders.faults.value, offenders.evict_after)
        model = replace(model, offenders=who)
    if slow is not None:
        lasts_s = slow.lasts.value if slow.lasts else 0.0
        rate = slow.rate.value * cluster.nodes / SECONDS_PER_DAY
        times = (slow.factor.value, slow.detection.value, slow.undetected.value, lasts_s)
        model = replace(model, slow=SlowNodes(rate, *times, names.index(SLOW_NODE)))
    if pause is not None:
        outage = Outage(pause.every.value, pause.lasts.value, names.index(PLANNED))
        model = replace(model, maintenance=outage)
    if groups is not None:
        stall_s = groups.stall.value if groups.stall else 0.0
        rejoin_s = groups.rejoin.value if groups.rejoin else stall_s
        each = (groups.step_cost.value, groups.batch == "keep", microbatches // groups.groups)
        nodes, go_on = cluster.nodes // groups.groups, groups.mode == "continue"
        of = Groups(groups.groups, groups.minimum, go_on, nodes, stall_s, rejoin_s, *each)
        model = replace(model, groups=of)
    return replace(model, stops=()) if model.certain else model


SLOW_NODE, PLANNED, GROWTH, PREEMPTED = (
    "slow node swapped",
    "planned maintenance",
    "group returns",
    "preempted",
)
"""Names of the stops that no failure rate states."""


RESTART_OF = {"cold": "rescheduled", "warm": "warm", "hot": "hot"}
"""How a job restarts after the loss of a node, by the kind of its spares."""


def _severities(plan: RunPlan, cluster: Cluster) -> list[tuple[Stop, int]]:
    """Every stop of a plan, with what it takes with it."""
    away = plan.spares.repair.value if plan.spares else 0.0
    per_s = cluster.nodes / SECONDS_PER_DAY
    rate, restart = plan.failures, plan.restart
    noticed = restart.detection.value if restart else 0.0
    found: list[tuple[Stop, int]] = []
    if rate is not None and plan.interrupted:
        total = sum(c.count for c in rate.counts)
        for c in rate.counts:
            special = restart.detection_of.get(c.cause) if restart else None
            each = rate.interruptions.value * per_s * c.count / total
            stop = Stop(c.cause, each, special.value if special else noticed, nodes=int(c.node), away_s=away)
            found.append((stop, NODE if c.node else PROCESS))
        for shared in rate.correlated:
            number = -(-cluster.nodes // shared.nodes.n)
            nodes = min(shared.nodes.n, cluster.nodes)
            each = shared.rate.value * number / SECONDS_PER_DAY
            found.append((Stop(shared.cause, each, noticed, nodes=nodes, away_s=away), RACK))
    if plan.preemption is not None:
        taken = plan.preemption
        stop = Stop(PREEMPTED, taken.rate.value * per_s, nodes=1, away_s=taken.away.value)
        found.append((replace(stop, planned=plan.checkpoint is not None), NODE))
    if plan.slow is not None:
        found.append((Stop(SLOW_NODE, nodes=1, planned=True, away_s=away), NODE))
    if plan.maintenance is not None:
        found.append((Stop(PLANNED, planned=True), PROCESS))
    if plan.fault_tolerance is not None and plan.fault_tolerance.mode == "elastic":
        found.append((Stop(GROWTH, planned=True), NODE))
    fastest = math.fsum(stop.rate_per_s for stop, _ in found)
    if fastest > 1.0:
        most = SECONDS_PER_DAY / cluster.nodes
        raise InputError(
            f"run.failures: {fastest:.3g} interruptions of the job a second on {cluster.nodes:,} nodes; the "
            f"model takes up to one a second. Nearest possible: {most:.3g} /node-day in all"
        )
    return found


def _check_machine(plan: RunPlan, cluster: Cluster) -> None:
    """Raise InputError, with the nearest possible value, where a plan does not fit the machine."""
    nodes, spares, groups = cluster.nodes, plan.spares, plan.fault_tolerance
    if spares is not None and spares.count > nodes:
        raise InputError(
            f"run.spares.count={spares.count:,} exceeds the job's {nodes:,} nodes; nearest possible: "
            f"{nodes:,}"
        )
    if groups is not None and nodes % groups.groups:
        near = min((n for n in range(1, nodes + 1) if nodes % n == 0), key=lambda n: abs(n - groups.groups))
        raise InputError(
            f"run.fault_tolerance.groups={groups.groups} does not divide the job's {nodes:,} nodes; nearest "
            f"possible: {near}"
        )
    if groups is not None and groups.mode == "elastic" and spares is None:
        raise InputError(
            "run.fault_tolerance.mode=elastic needs run.spares: without them a replacement is always at hand "
            "and the job never shrinks; for example run.spares={count: 0, repair: 3 days}"
        )
    for name, stated in (("slow", plan.slow), ("preemption", plan.preemption)):
        if stated is not None and stated.rate.value * nodes > SECONDS_PER_DAY:
            raise InputError(
                f"run.{name}.rate={stated.rate.text}: more than one event a second on {nodes:,} nodes; "
                f"nearest possible: {SECONDS_PER_DAY / nodes:.3g} /node-day"
            )


def _restart_s(plan: RunPlan, cluster: Cluster, severity: int, load_s: float, planned: bool) -> float:
    """Seconds of a restart after a stop of some severity; 0 where the plan states no restart.

    It is that of one group where the others train on, but for planned stops, which are of the whole job.
    """
    if plan.restart is None:
        return 0.0
    how = "in place" if severity == PROCESS else RESTART_OF[plan.spares.kind if plan.spares else "cold"]
    groups, parts = plan.fault_tolerance, 1
    if groups is not None and groups.mode == "continue" and not planned:
        parts = groups.groups
    return plan.restart.recovery_s(cluster.nodes // parts, cluster.n_gpus // parts, load_s, how)


def _notes(plan: RunPlan) -> list[str]:
    """What a plan takes for granted, in words."""
    notes, save, rate = [], plan.checkpoint, plan.failures
    if save is not None and save.size is None:
        notes.append(
            "a checkpoint holds master weights and both moments once; weights are cast anew from them"
        )
    if save is not None and save.asynchronous and save.stall is None:
        notes.append(
            "asynchronous checkpoints: training waits for the copy to host memory at the nominal host link"
        )
    if rate is not None and rate.causes is None and plan.spares is not None:
        notes.append(
            f"failure rate {rate.name!r} states no causes: every interruption is taken to break a node"
        )
    if plan.interrupted and plan.spares is None:
        notes.append("run.spares is not set: a replacement node is always at hand, unpaid until it is needed")
    if plan.spares is not None and plan.spares.kind != "cold" and plan.restart and not plan.restart.parts:
        notes.append(f"run.spares.kind={plan.spares.kind} is not used: the restart has one figure, no parts")
    if plan.spares is not None and plan.spares.trays:
        notes.append("run.spares.trays: the price of a rack's GPU-hours is taken to include its spare trays")
    if plan.interrupted:
        absent = [key for key in ("slow", "preemption", "maintenance") if getattr(plan, key) is None]
        if absent:
            notes.append(f"not in the run, since run.{', run.'.join(absent)} state none of them")
    if plan.interrupted and rate is not None and plan.restart is not None:
        unused = set(plan.restart.detection_of) - {c.cause for c in rate.counts}
        if unused:
            notes.append(
                f"restart {plan.restart.name!r}: detection of {', '.join(sorted(unused))} is not used; rate "
                f"{rate.name!r} names no such cause"
            )
    if plan.restart is not None and plan.restart.parts is not None and plan.interrupted:
        parts = sourced_numbers(plan.restart)
        spans = [f"{path.split('.')[-1]} {n.text}" for path, n in parts if n.kind == "assumed"]
        if spans:
            notes.append(f"restart {plan.restart.name!r}, parts that nobody published: {', '.join(spans)}")
    return notes


# -- simulate run ------------------------------------------------------------------------------------
# Simulates a run from start to end and reports its phases, interruptions, finish date and bill.


def simulate_run(
    plan: RunPlan,
    cluster: Cluster,
    phases: Sequence[PhaseWork],
    interruptions: Interruptions,
    seed: int,
    factors: FloatArray | None = None,
    power: BoardPower | None = None,
) -> RunReport:
    """Simulate a run event by event and report it; `phases` comes from `phase_works`.

    `factors`: relative step times of the replicas where the step time is uncertain ([replicas], about 1). A
    factor scales all phases of its replica, with the same random interruptions (docs/model.md, eq. J9).
    `power`: of a GPU while it trains and while it waits; absent: always that of a node under load.
    Percentiles and outlook use the factors; predicted figures and tables use the predicted step. Raises
    InfeasibleError where the run practically never ends, InputError for illegal prices and plans.
    """
    model = interruptions.model
    work = [phase.seconds for phase in phases if not phase.stated]
    steps = [phase.step_time_s for phase in phases if not phase.stated]
    _check_intervals(plan, math.fsum(work))
    interruptions.check_feasible(work, steps)
    replicas = len(factors) if factors is not None else plan.replicas
    alike = 1 if model.certain else replicas  # without interruptions all replicas are equal
    start_s = plan.start_s(cluster.n_gpus)
    runs = simulate_events(work, model, alike, seed, step_s=steps)
    book = wide = Ledger(phases, runs, cluster.n_gpus, NO_RATES, start_s).billed(plan, cluster, power)
    bill = book.bill
    interruptions.check_waiting(math.fsum(work), mean(np.array([run.seconds("waiting") for run in runs])))
    if factors is not None:
        drawn = simulate_events(work, model, replicas, seed, factors, steps)
        wide = Ledger(phases, drawn, cluster.n_gpus, bill, start_s)
    timeline = None
    if not model.certain:
        shown = book.median()
        timeline = book.timeline(simulate_one(work, model, seed, shown, 1.0, steps, show=True), shown)
    expected_s = interruptions.expected_seconds(work, steps) + book.startup_s
    return RunReport(
        **_ends(plan, book, wide),
        goodput_expected=math.fsum(work) / expected_s if work else 1.0,
        causes=tuple(book.causes(interruptions.causes)),
        checkpoint=interruptions.checkpoint,
        assumptions=(*(n for p in phases for n in p.notes), *interruptions.notes, *bill.notes),
        replicas=alike if factors is None else replicas,
        seed=seed,
        step_factor=None if factors is None else spread(factors, 1.0),
        mean_groups=book.mean_groups(),
        restart_parts=interruptions.restart_parts,
        timeline=timeline,
    )


def _ends(plan: RunPlan, book: Ledger, wide: Ledger) -> dict[str, Any]:
    """When the run ends and what it costs; `wide`: with an uncertain step time too."""
    bill = book.bill
    days = spread(wide.wall_s / SECONDS_PER_DAY, mean(book.wall_s / SECONDS_PER_DAY))
    hours = days.predicted * HOURS_PER_DAY
    ends = spread(wide.wall_s, mean(book.wall_s)).model_dump()
    return {
        "phases": tuple(book.rows()),
        "days": days,
        "finish": FinishDates(**{name: date_text(plan.start, seconds) for name, seconds in ends.items()})
        if plan.start
        else None,
        "gpu_hours": book.gpu_hours(),
        "goodput": spread(wide.goodput(), mean(book.goodput())),
        "interruptions": spread(wide.interruptions(), mean(book.interruptions())),
        "cost_usd": bill.of_run(days),
        "cost_parts_usd": bill.parts_of_run(hours),
        "price": bill.described,
        "energy_kwh": per_hour(days, bill.kwh_per_hour),
        "electricity_usd": None
        if bill.electricity_usd_per_hour is None
        else bill.electricity_usd_per_hour * hours,
        "co2_kg": per_hour(days, bill.kg_co2_per_hour),
        "mean_w_per_gpu": book.mean_w,
        "outlook": tuple(outlook(plan.start, wide.wall_s, bill)),
    }


def _check_intervals(plan: RunPlan, work_s: float) -> None:
    """Raise InputError for a checkpoint or a maintenance interval that is longer than the training."""
    save = plan.checkpoint
    stated = [("run.maintenance.every", plan.maintenance.every.value)] if plan.maintenance else []
    if save is not None and plan.interrupted:
        texts = [("run.checkpoint.interval", save.interval)]
        texts += [(f"run.checkpoint.tiers ({tier.where})", tier.interval) for tier in save.tiers]
        stated += [(place, parse_quantity(text, "s")) for place, text in texts if text != OPTIMAL]
    for place, length in stated:
        if work_s and length > work_s:
            raise InputError(
                f"{place}={time_text(length)} is longer than the training of {time_text(work_s)}; nearest "
                f"possible: {time_text(work_s)}"
            )
