"""Effects of uncertain sources on the step time.

Calibration entries are evaluated to first order along the critical path, scenario keys and seeds in the
engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from math import fsum

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.calibration import CalibrationProfile
from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.host import load_host
from moesim.hwmodels.provenance import Sourced, sourced_numbers, with_value
from moesim.simulator.cost.cost_table import cost_table
from moesim.simulator.cost.launches import BESIDE_POLLING, polled_share
from moesim.simulator.cost.pricing import LINK_SHARES
from moesim.simulator.cost.table import CostTable
from moesim.simulator.engine.compilation import compile_program
from moesim.simulator.engine.critical import Segment, critical_path
from moesim.simulator.engine.program import PricedSchedule, Program
from moesim.simulator.engine.records import Execution, last_group, step_time_s
from moesim.simulator.layout.expert_load import popularity_of
from moesim.simulator.layout.job import ResolvedJob
from moesim.simulator.memory.gpu import retries_s
from moesim.simulator.predict.driver import simulate
from moesim.simulator.predict.result import Result
from moesim.simulator.predict.step import Prepared, run_step
from moesim.simulator.scenario import Scenario
from moesim.simulator.studies.sources import (
    CLOCK,
    CLUSTER,
    HOST,
    JITTER,
    MAX_VIO,
    MODEL_ERROR,
    POLLING,
    RETRIES,
    SESSION,
    SPREADS,
    Source,
    cluster_sources,
    entry_sources,
    host_source,
    model_error,
    number_sources,
    path_weights,
    polling_source,
    ranged,
    redrawn_response_s,
    response_s,
    session,
    shifted,
    shifted_cluster,
    shifted_together,
    spread_response_s,
    step_evidence,
)

Ranges = Mapping[str, tuple[object, object]]
"""Lowest and highest value by scenario key; the scenario's own value is the most likely."""


class EntryEffect(Struct, frozen=True):
    """A source and the seconds by which it changes the step at its 10 % and 90 % points.

    `at`: the relative changes at these points. `exact`: whether the engine computed the seconds.
    """

    source: Source
    at: tuple[float, float]
    seconds: tuple[float, float]
    exact: bool = False

    def draw_s(self, samples: int, seed: int) -> FloatArray:
        """Seconds by which every draw changes the step, piecewise linear through the two points and zero."""
        return self.at_change(drawn_changes(self.source, samples, seed))

    def at_change(self, change: FloatArray) -> FloatArray:
        """Seconds by which the step changes at a relative change of the source's times."""
        low, high = (seconds / at if at else 0.0 for at, seconds in zip(self.at, self.seconds, strict=True))
        return np.asarray(np.where(change < 0, change * low, change * high))


class RangeEffect(Struct, frozen=True):
    """A scenario key with the results at both ends of its range."""

    key: str
    ends: tuple[object, object]
    results: tuple[Result, Result]


def generator_of(name: str, seed: int) -> np.random.Generator:
    """Random generator that belongs to a name, so that scenarios with a common source share its draws."""
    return np.random.default_rng([seed, int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")])


def drawn_changes(source: Source, samples: int, seed: int) -> FloatArray:
    """Relative changes of a source's times, one for each draw, equal in every scenario with the source."""
    generator = generator_of(source.id, seed)
    return source.draw(generator.standard_normal(samples), generator.random(samples))


def entry_effects(
    prepared: Prepared, executions: Sequence[Execution], exact: int = 0
) -> tuple[EntryEffect, ...]:
    """Effects of every used calibration entry and of every number with a range, largest effect first.

    They are computed to first order along the critical path (docs/model.md, eqs. U1, U4 and U5); the `exact`
    largest ones are simulated instead.
    """
    last = last_group(executions)
    path = critical_path(last)
    weights, before = path_weights(path), last.program.costs
    profile = prepared.profile
    carried = (e.id for e in profile.curves if e.id.startswith(LINK_SHARES))
    used = [*before.evidence.entries, *carried]
    architecture = prepared.cluster.accelerator.architecture
    found = []
    for source in (
        *entry_sources(profile, used, architecture, step_evidence(last.program).mean_errors()),
        *number_sources(profile),
        *cluster_sources(prepared.cluster),
        *host_sources(prepared),
    ):
        low, high = source.points()
        seconds = [response_s(weights, before, _priced(prepared, source, c)) for c in (low, high)]
        if any(seconds):
            found.append(EntryEffect(source, (low, high), (seconds[0], seconds[1])))
    common = [
        _session_effect(profile, used, found),
        *(_spread_effect(prepared, path, last.program, key) for key in SPREADS),
        _retries_effect(prepared),
    ]
    found += [effect for effect in common if effect is not None]
    found.sort(key=lambda e: (-max(map(abs, e.seconds)), e.source.id))
    first = [e if e.source is RETRIES else _run_exactly(prepared, executions, e, used) for e in found[:exact]]
    return (*first, *found[exact:])


def host_sources(prepared: Prepared) -> tuple[Source, ...]:
    """The sources of the host's times, where the scenario names a host: its range, and polling threads."""
    name = prepared.scenario.software.host
    if name is None:
        return ()
    found = host_source(load_host(prepared.scenario.path(name)))
    polling = polling_source(polled_share(prepared.pricer), BESIDE_POLLING)
    return tuple(source for source in (found, polling) if source is not None)


def _session_effect(
    profile: CalibrationProfile, used: Sequence[str], effects: Sequence[EntryEffect]
) -> EntryEffect | None:
    """Effect of the measurement session, which shifts every entry that it bounds together (eq. U4)."""
    source, bound = session(profile, used)
    low, high = source.points()
    moved = [effect for effect in effects if effect.source.id in bound]
    seconds = [fsum(float(e.at_change(np.array(c))) for e in moved) for c in (low, high)]
    return EntryEffect(source, (low, high), (seconds[0], seconds[1])) if any(seconds) else None


def _retries_effect(prepared: Prepared) -> EntryEffect | None:
    """Seconds of an allocator at its limit, for plans at risk (eq. M48); None where 9 of 10 draws fit."""
    memory = prepared.memory
    if memory.verdict != "at risk":
        return None
    cached, room = memory.range_bytes[1] - memory.total_bytes, memory.capacity_bytes - memory.total_bytes
    count = max(pool.schedule.microbatches for pool in prepared.pools)
    low, high = RETRIES.points()
    seconds = (retries_s(low * cached - room, count), retries_s(high * cached - room, count))
    return EntryEffect(RETRIES, (low, high), seconds) if seconds[1] else None


def _spread_effect(
    prepared: Prepared, path: Sequence[Segment], program: Program, key: str
) -> EntryEffect | None:
    """Effect of a spread with a range, wider or narrower with the same draws (eqs. U5 and U6)."""
    scenario = prepared.scenario
    number = _spread_of(scenario, key)
    source = None if number is None else ranged(key, number)
    if number is None or source is None or scenario.faults:
        return None
    low, high = source.points()
    seconds = []
    for change in (low, high):
        value = number.value * (1.0 + change)
        if key == CLOCK:
            clock = program.variation.clock
            seconds.append(spread_response_s(path, clock, number.value, value))
        else:
            seconds.append(redrawn_response_s(path, program, _redrawn(prepared, program, key, value)))
    return EntryEffect(source, (low, high), (seconds[0], seconds[1])) if any(seconds) else None


def _spread_of(scenario: Scenario, key: str) -> Sourced | None:
    """The number of a spread; None where the scenario has another kind of load."""
    return dict(sourced_numbers(scenario.model_copy(update={"profile": ""}))).get(key)


def _redrawn(prepared: Prepared, program: Program, key: str, value: float) -> Program:
    """The program with another spread of run-to-run noise or expert load, drawn from the same seed."""
    scenario, variation = prepared.scenario, program.variation
    if key == JITTER:
        variation = replace(variation, jitter_cv=value)
    else:
        draws = prepared.draws
        spec = replace(draws.spec, expert_cv=value)
        if key == MAX_VIO:
            moe = draws.job.shape.moe
            assert moe is not None
            popularity, _ = popularity_of(with_value(scenario, key, value), moe, draws.layers)
            spec = replace(draws.spec, popularity=popularity)
        loads = replace(draws, spec=spec).loads(program.group)
        if loads is None:
            return program
        full = variation.loads.shape
        variation = replace(
            variation, loads=loads.rows.reshape(full), node_loads=loads.node_rows.reshape(full)
        )
    order = scenario.communication.order_of(scenario.schedule)
    priced = PricedSchedule(program.schedule, program.blocks, program.costs, order)
    return compile_program(priced, variation, program.link_map, program.group)


def _sms(cluster: Cluster) -> int:
    """SMs of the accelerator; 0 where engines move the data, so that no law is a formula of them."""
    units = cluster.accelerator.compute_units
    return units.n if units else 0


def _priced(prepared: Prepared, source: Source, change: float) -> CostTable:
    cluster, profile = prepared.cluster, prepared.profile
    if source.id in (HOST, POLLING):
        pricer = prepared.pricer.at_host_slowness(prepared.scenario.software.host_slowness * (1.0 + change))
    elif source.id.startswith(CLUSTER):
        pricer = prepared.pricer.at_rates(cluster=shifted_cluster(cluster, source.id, change))
    else:
        other = shifted(profile, source.id, change, _sms(cluster))
        pricer = prepared.pricer.at_rates(profile=other)
    return cost_table(pricer, prepared.schedule, prepared.stages)


def _run_exactly(
    prepared: Prepared, executions: Sequence[Execution], effect: EntryEffect, used: Sequence[str]
) -> EntryEffect:
    base, engine = step_time_s(executions), prepared.engine.name
    seconds = []
    for change in effect.at:
        job = moved(prepared, {effect.source.id: change}, used)
        seconds.append(run_step(job, stages=prepared.stages, engine=engine).time_s - base)
    return EntryEffect(effect.source, effect.at, (seconds[0], seconds[1]), exact=True)


def moved(prepared: Prepared, changes: Mapping[str, float], used: Sequence[str]) -> ResolvedJob:
    """The job with sources shifted by relative changes, by id; `used`: entries that a session may shift."""
    scenario, profile, cluster = prepared.scenario, prepared.profile, prepared.cluster
    shifts: dict[str, list[float]] = {}
    for id_, change in changes.items():
        if id_ == RETRIES.id:  # no engine run has it
            continue
        if id_ in SPREADS:
            number = _spread_of(scenario, id_)
            if number is not None:
                scenario = scenario.replace(**{id_: number.value * (1.0 + change)})
            continue
        if id_ in (HOST, POLLING):
            scenario = scenario.replace(**{HOST: scenario.software.host_slowness * (1.0 + change)})
            continue
        if id_.startswith(CLUSTER):
            cluster = shifted_cluster(cluster, id_, change)
            scenario = scenario.model_copy(update={"cluster": cluster})
            continue
        for entry in session(profile, used)[1] if id_ == SESSION else (id_,):
            shifts.setdefault(entry, []).append(change)
    if len(shifts) == 1 and len(one := next(iter(shifts.items()))[1]) == 1:
        profile = shifted(profile, next(iter(shifts)), one[0], _sms(cluster))
    elif shifts:
        profile = shifted_together(profile, shifts, _sms(cluster))
    return replace(prepared.job, scenario=scenario, profile=profile, cluster=cluster)


def range_effects(scenario: Scenario, ranges: Ranges) -> tuple[RangeEffect, ...]:
    """Simulate the scenario with each key alone at the ends of its range. Raises InputError as `replace`."""
    return tuple(
        RangeEffect(
            key,
            ends,
            (simulate(scenario.replace(**{key: ends[0]})), simulate(scenario.replace(**{key: ends[1]}))),
        )
        for key, ends in ranges.items()
    )


def seed_deviation_s(scenario: Scenario, seeds: int, time_s: float) -> float:
    """Standard deviation (s) of the step time over the scenario's own seed and `seeds` further ones."""
    if seeds < 1:
        return 0.0
    others = [run_step(scenario.replace(seed=scenario.seed + n)).time_s for n in range(1, seeds + 1)]
    return float(np.std([time_s, *others], ddof=1))


# -- draws -------------------------------------------------------------------------------------------
# Draws of the step time from the effects of all sources.

SAMPLES = 4096
"""Draws of a Monte Carlo; with so many, the 10 % point lies between the true 9 % and 11 % points."""


def draws_s(time_s: float, effects: Sequence[EntryEffect]) -> FloatArray:
    """Draws of the step time (s) from the effects and from the error that no entry carries (eq. U2)."""
    seconds = np.full(SAMPLES, time_s)
    for effect in effects:
        seconds += effect.draw_s(SAMPLES, 0)
    return bounded(seconds, MODEL_ERROR, time_s, 0)


def bounded(seconds: FloatArray, left_out: float, time_s: float, seed: int) -> FloatArray:
    """Apply the factor for the error that no entry carries, and keep every draw above 0.1 `time_s`.

    Otherwise far tails could make a step instant or negative.
    """
    changed = seconds * (1.0 + drawn_changes(model_error(left_out), len(seconds), seed))
    return np.asarray(np.maximum(changed, 0.1 * time_s))
