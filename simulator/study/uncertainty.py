"""P10, P50 and P90 of a prediction: seeded Monte Carlo on the first-order response of the step time."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log

import numpy as np
import numpy.typing as npt

from moesim.hwmodels.errors import InputError
from moesim.simulator.causes import step_seconds
from moesim.simulator.cost.table import CostTable
from moesim.simulator.engine.critical import critical_path
from moesim.simulator.engine.execute import Execution, execute_all, last_end
from moesim.simulator.prepare import Prepared, prepare
from moesim.simulator.pricing import Pricer
from moesim.simulator.result import Result
from moesim.simulator.scenario import Scenario
from moesim.simulator.simulate import simulate, summarise
from moesim.simulator.study.band import Band, Effect, Uncertainty
from moesim.simulator.study.metrics import UNCERTAIN, Metric, figures, uncertain_metric
from moesim.simulator.study.response import path_weights, response_s
from moesim.simulator.study.sources import (
    MODEL_ERROR,
    QUANTILE_90,
    Source,
    entry_sources,
    model_error,
    shifted,
)

FloatArray = npt.NDArray[np.float64]
Ranges = Mapping[str, tuple[object, object]]
"""Scenario keys with their lowest and highest value; the scenario's own value is the likeliest."""

LINK_SHARES = ("collective.", "p2p.", "engine.")
"""Curves that price sends and collectives, which do not list what they stand on."""

SAMPLES = 4096
"""Draws of a Monte Carlo: the 10 % point is then that of 9 to 11 %."""


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
    """A scenario key at the ends of its range, each with its figures (None: illegal there)."""

    key: str
    ends: tuple[object, object]
    results: tuple[Result, Result]


def _slope(at: float, seconds: float) -> float:
    return seconds / at if at else 0.0


def _generator(name: str, seed: int) -> np.random.Generator:
    """Draws that belong to a name: two scenarios that share a source share its draws."""
    return np.random.default_rng([seed, int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")])


def drawn_changes(source: Source, samples: int, seed: int) -> FloatArray:
    """Relative changes of a source's times, one a draw; the same for every scenario that has the source."""
    generator = _generator(source.id, seed)
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


def samples_of(
    result: Result,
    effects: Sequence[EntryEffect],
    ranges: Sequence[RangeEffect] = (),
    *,
    seed_s: float = 0.0,
    left_out: float = MODEL_ERROR,
    samples: int = SAMPLES,
    seed: int = 0,
) -> dict[Metric, FloatArray]:
    """Draws of every figure (docs/model.md, eq. U2): effects of the sources add up in seconds.

    `seed_s`: deviation from draws of load and jitter; `left_out`: relative deviation for what no entry
    carries. Draws belong to the name of their source, so scenarios that share a source share them.
    """
    time = result.step.time_s
    seconds = np.full(samples, time)
    for effect in effects:
        seconds += effect.draw_s(samples, seed)
    seconds += seed_s * _generator("variation.seed", seed).standard_normal(samples)
    base = figures(result)
    extra: dict[Metric, FloatArray] = {metric: np.zeros(samples) for metric in UNCERTAIN}
    for item in ranges:
        place = _triangle(_generator(f"scenario.{item.key}", seed).random(samples))
        ends = [r.step.time_s - time for r in item.results]
        seconds += np.where(place < 0, -place * ends[0], place * ends[1])
        for metric, power in UNCERTAIN.items():
            own = [_beyond_time(base, figures(r), metric, power) for r in item.results]
            extra[metric] += np.where(place < 0, -place * own[0], place * own[1])
    seconds *= 1.0 + drawn_changes(model_error(left_out), samples, seed)
    # The slowest tenth of a thousandth may not make a step faster than a tenth of the prediction.
    seconds = np.maximum(seconds, 0.1 * time)
    found: dict[Metric, FloatArray] = {}
    for metric, power in UNCERTAIN.items():
        value = base[metric]
        if value is not None:
            scale = seconds / time if power > 0 else time / seconds
            found[metric] = float(value) * scale * (np.exp(extra[metric]) if ranges else 1.0)
    return found


def _triangle(u: FloatArray) -> FloatArray:
    """Triangular on -1 to 1 with mode 0."""
    return np.asarray(np.where(u < 0.5, np.sqrt(2 * u) - 1, 1 - np.sqrt(2 * (1 - u))))


def _beyond_time(
    base: Mapping[str, float | bool | None],
    other: Mapping[str, float | bool | None],
    metric: Metric,
    power: int,
) -> float:
    """Log of the change of a figure that the change of the step time does not explain."""
    before, after = base[metric], other[metric]
    times = base["step_time_s"], other["step_time_s"]
    if not before or not after or not times[0] or not times[1]:
        return 0.0
    return log(after / before) - power * log(times[1] / times[0])


def uncertainty(
    prepared: Prepared,
    executions: Sequence[Execution],
    result: Result,
    *,
    ranges: Ranges | None = None,
    seeds: int = 0,
    exact: int = 0,
    left_out: float = MODEL_ERROR,
    samples: int = SAMPLES,
    seed: int = 0,
) -> Uncertainty:
    """Bands of a finished prediction and its sources, the largest first.

    `ranges`: scenario keys that are uncertain too; `seeds`: further seeds of load and jitter to run;
    `exact`: so many sources run again in the engine. Raises InputError for illegal values of a key.
    """
    if samples < 100 or not 0.0 <= left_out < 1.0 or seeds < 0 or exact < 0:
        raise InputError(
            f"uncertainty: samples={samples} (at least 100), left_out={left_out} (0 to below 1), "
            f"seeds={seeds} and exact={exact} (0 or more)"
        )
    scenario, time = prepared.scenario, result.step.time_s
    effects = entry_effects(prepared, executions, exact)
    around = range_effects(scenario, ranges or {})
    deviation = seed_deviation_s(scenario, seeds, time)
    drawn = samples_of(
        result, effects, around, seed_s=deviation, left_out=left_out, samples=samples, seed=seed
    )
    base = figures(result)
    bands = {name: _band(float(base[name] or 0.0), values) for name, values in drawn.items()}
    rows = [_entry_row(time, e) for e in effects] + [_range_row(e) for e in around]
    if deviation:
        half = QUANTILE_90 * deviation
        text = f"{seeds} further seeds of expert load, speed and jitter"
        rows.append(
            Effect(
                source="variation.seed",
                meaning=text,
                low="-",
                high="+",
                low_s=time - half,
                high_s=time + half,
                exact=True,
            )
        )
    if left_out:
        source = model_error(left_out)
        low, high = source.points()
        rows.append(
            Effect(
                source=source.id,
                meaning=source.meaning,
                low=f"{low:+.1%}",
                high=f"{high:+.1%}",
                low_s=time * (1 + low),
                high_s=time * (1 + high),
            )
        )
    rows.sort(key=lambda row: (-row.swing_s, row.source))
    return Uncertainty(bands=bands, sources=tuple(rows), samples=samples, seed=seed)


def _band(predicted: float, values: FloatArray) -> Band:
    p10, p50, p90 = (float(v) for v in np.quantile(values, [0.1, 0.5, 0.9]))
    return Band(predicted=predicted, p10=p10, p50=p50, p90=p90)


def _entry_row(time: float, effect: EntryEffect) -> Effect:
    return Effect(
        source=effect.source.id,
        meaning=effect.source.meaning,
        low=f"{effect.at[0]:+.1%}",
        high=f"{effect.at[1]:+.1%}",
        low_s=time + effect.seconds[0],
        high_s=time + effect.seconds[1],
        exact=effect.exact,
    )


def _range_row(effect: RangeEffect) -> Effect:
    low, high = effect.results
    return Effect(
        source=effect.key,
        meaning="scenario key, range stated by the user",
        low=str(effect.ends[0]),
        high=str(effect.ends[1]),
        low_s=low.step.time_s,
        high_s=high.step.time_s,
        exact=True,
    )


def predict(scenario: Scenario) -> tuple[Prepared, list[Execution], Result]:
    """One prediction with what it was made from."""
    prepared = prepare(scenario)
    executions = execute_all(prepared.programs)
    return prepared, executions, summarise(prepared, executions)


def interval(
    scenario: Scenario, metric: str = "step_time_s", level: float = 0.8, *, seed: int = 0
) -> tuple[float, float, float]:
    """(low, mid, high) of a figure: the interval that holds it with probability `level`, and its median.

    Raises InputError for an unknown figure, a level outside 0 to 1 and a figure that the scenario does
    not have (a cost without a price).
    """
    name = uncertain_metric(metric)
    if not 0.0 < level < 1.0:
        raise InputError(f"level={level} is not between 0 and 1; 0.8 is the interval from P10 to P90")
    prepared, executions, result = predict(scenario)
    values = samples_of(result, entry_effects(prepared, executions), seed=seed).get(name)
    if values is None:
        raise InputError(f"{scenario.name} has no {metric}: its cluster states no price_per_gpu_hour")
    low, mid, high = np.quantile(values, [(1 - level) / 2, 0.5, (1 + level) / 2])
    return float(low), float(mid), float(high)


def with_uncertainty(
    scenario: Scenario, *, ranges: Ranges | None = None, seeds: int = 0, exact: int = 0
) -> Result:
    """A prediction that carries its bands; options as for `uncertainty`."""
    prepared, executions, result = predict(scenario)
    bands = uncertainty(prepared, executions, result, ranges=ranges, seeds=seeds, exact=exact)
    return result.model_copy(update={"uncertainty": bands})
