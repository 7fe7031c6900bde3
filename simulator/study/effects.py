"""What each source does to the step time: entries along the critical path, keys and seeds in the engine."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moesim.simulator.causes import step_seconds
from moesim.simulator.cost.table import CostTable
from moesim.simulator.engine.critical import critical_path
from moesim.simulator.engine.execute import Execution, execute_all, last_end
from moesim.simulator.prepare import Prepared, prepare
from moesim.simulator.pricing import Pricer
from moesim.simulator.result import Result
from moesim.simulator.scenario import Scenario
from moesim.simulator.simulate import simulate, summarise
from moesim.simulator.study.response import path_weights, response_s
from moesim.simulator.study.sources import Source, entry_sources, shifted

FloatArray = npt.NDArray[np.float64]
Ranges = Mapping[str, tuple[object, object]]
"""Scenario keys with their lowest and highest value; the scenario's own value is the likeliest."""

LINK_SHARES = ("collective.", "p2p.", "engine.")
"""Curves that price sends and collectives, which do not list what they stand on."""


def predict(scenario: Scenario) -> tuple[Prepared, list[Execution], Result]:
    """One prediction with what it was made from."""
    prepared = prepare(scenario)
    executions = execute_all(prepared.programs)
    return prepared, executions, summarise(prepared, executions)


@dataclass(frozen=True, slots=True)
class EntryEffect:
    """A calibration entry and how many seconds the step changes at its two points."""

    source: Source
    at: tuple[float, float]
    seconds: tuple[float, float]
    exact: bool = False

    def draw_s(self, samples: int, seed: int) -> FloatArray:
        """Seconds of change of every draw, piecewise linear through the two points and zero."""
        change = drawn_changes(self.source, samples, seed)
        return np.asarray(
            np.where(
                change < 0,
                change * _slope(self.at[0], self.seconds[0]),
                change * _slope(self.at[1], self.seconds[1]),
            )
        )


@dataclass(frozen=True, slots=True)
class RangeEffect:
    """A scenario key at the ends of its range, each with its figures ."""

    key: str
    ends: tuple[object, object]
    results: tuple[Result, Result]


def _slope(at: float, seconds: float) -> float:
    return seconds / at if at else 0.0


def generator_of(name: str, seed: int) -> np.random.Generator:
    """Draws that belong to a name: two scenarios that share a source share its draws."""
    return np.random.default_rng([seed, int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")])


def drawn_changes(source: Source, samples: int, seed: int) -> FloatArray:
    """Relative changes of a source's times, one a draw; the same for every scenario that has the source."""
    generator = generator_of(source.id, seed)
    return source.draw(generator.standard_normal(samples), generator.random(samples))


def entry_effects(
    prepared: Prepared, executions: Sequence[Execution], exact: int = 0
) -> tuple[EntryEffect, ...]:
    """Every used calibration entry at its 10 % and 90 % points, the largest effect first.

    To first order along the critical path (docs/model.md, eq. U1); the `exact` largest are run again in
    the engine.
    """
    last = max(executions, key=lambda e: last_end(e.ranks))
    weights, before = path_weights(critical_path(last)), last.program.costs
    found = []
    carried = (e.id for e in prepared.profile.curves if e.id.startswith(LINK_SHARES))
    for source in entry_sources(prepared.profile, [*prepared.pricer.evidence.entries, *carried]):
        low, high = source.points()
        seconds = [response_s(weights, before, _priced(prepared, source, c)) for c in (low, high)]
        if any(seconds):
            found.append(EntryEffect(source, (low, high), (seconds[0], seconds[1])))
    found.sort(key=lambda e: (-max(map(abs, e.seconds)), e.source.id))
    first = [_run_exactly(prepared, executions, effect) for effect in found[:exact]]
    return (*first, *found[exact:])


def _priced(prepared: Prepared, source: Source, change: float) -> CostTable:
    profile = shifted(prepared.profile, source.id, change, prepared.cluster.accelerator.n_sms)
    pricer = Pricer(prepared.scenario, prepared.shape, prepared.cluster, profile, prepared.layout)
    return pricer.table(prepared.schedule, prepared.stages)


def _run_exactly(prepared: Prepared, executions: Sequence[Execution], effect: EntryEffect) -> EntryEffect:
    base = executions[0].end_ns / 1e9
    seconds = []
    for change in effect.at:
        profile = shifted(prepared.profile, effect.source.id, change, prepared.cluster.accelerator.n_sms)
        again = prepare(prepared.scenario, profile, prepared.stages)
        seconds.append(execute_all(again.programs)[0].end_ns / 1e9 - base)
    return EntryEffect(effect.source, effect.at, (seconds[0], seconds[1]), exact=True)


def range_effects(scenario: Scenario, ranges: Ranges) -> tuple[RangeEffect, ...]:
    """The scenario with each key alone at the ends of its range. Raises InputError as `replace` does."""
    return tuple(
        RangeEffect(
            key,
            ends,
            (simulate(scenario.replace(**{key: ends[0]})), simulate(scenario.replace(**{key: ends[1]}))),
        )
        for key, ends in ranges.items()
    )


def seed_deviation_s(scenario: Scenario, seeds: int, time_s: float) -> float:
    """Standard deviation of the step time over `seeds` further seeds and the scenario's own (s)."""
    if seeds < 1:
        return 0.0
    others = [step_seconds(scenario.replace(seed=scenario.seed + n)) for n in range(1, seeds + 1)]
    return float(np.std([time_s, *others], ddof=1))
