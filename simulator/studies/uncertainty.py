"""P10, P50 and P90 of a prediction, by a seeded Monte Carlo on the first-order response of the step time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from math import log
from uuid import uuid4

import numpy as np
from pydantic import Field

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.errors import InputError
from moesim.simulator.common.bounded_cache import BoundedCache
from moesim.simulator.common.processes import (
    DaskPool,
    check_cluster,
    default_workers,
    without_cyclic_collection,
    worker_pool,
)
from moesim.simulator.common.tables import Row, TableResult
from moesim.simulator.engine.records import Execution, last_group
from moesim.simulator.predict.driver import predict
from moesim.simulator.predict.figures import UNCERTAIN, Metric, figures, uncertain_metric
from moesim.simulator.predict.result import Result
from moesim.simulator.predict.step import MovedStep, Prepared, prepare
from moesim.simulator.predict.work_size import Band, Effect, EngineBands, Uncertainty
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.inputs import Inputs
from moesim.simulator.studies.effects import (
    SAMPLES,
    EntryEffect,
    RangeEffect,
    Ranges,
    bounded,
    drawn_changes,
    draws_s,
    entry_effects,
    generator_of,
    moved,
    range_effects,
    seed_deviation_s,
)
from moesim.simulator.studies.sources import LEFT_OUT, MODEL_ERROR, QUANTILE_90, RETRIES, model_error
from moesim.simulator.studies.whole_run import with_uncertain_run

# -- engine draws ------------------------------------------------------------------------------------
# Intervals by running the engine for every draw of all sources together, beside the first-order ones.

DRAWS = 200
"""Draws of an interval by the engine; its P10 and P90 then lie between the true 6 % and 14 % points."""
FEWEST, MOST = 20, 10_000
LEVEL = 0.8
"""Probability with which an interval holds its figure."""
CHUNK = 5
"""Draws that a worker takes at a time: fewer than a second of work."""

Say = Callable[[int, int], None]
"""Called with (draws done, draws in all)."""


def check_draws(draws: int) -> None:
    """Raise InputError for a number of draws out of range."""
    if not FEWEST <= draws <= MOST:
        raise InputError(f"engine draws={draws}: give {FEWEST} to {MOST:,}, for example {DRAWS}")


def start_workers(
    draws: int, workers: int | None = None, scheduler: str | None = None
) -> ProcessPoolExecutor | DaskPool | None:
    """Start the processes for so many draws, so that they import the engine while the caller predicts.

    `scheduler`: address of a Dask cluster to use instead. None where one process does all of them. Raises
    InputError for a number of draws out of range, and for workers beside a cluster.
    """
    check_draws(draws)
    if scheduler is not None:
        if workers is not None:
            raise InputError(f"workers={workers} beside the Dask scheduler {scheduler}: leave workers out")
        return DaskPool(scheduler)
    count = min(workers or default_workers(), -(-draws // CHUNK))
    if count <= 1:
        return None
    pool = worker_pool(count)
    for _ in range(count):
        pool.submit(_ready)
    return pool


def _ready() -> None:
    """Do nothing; unpickling this function makes the worker import the engine."""


def engine_bands(
    prepared: Prepared,
    result: Result,
    effects: Sequence[EntryEffect],
    draws: int = DRAWS,
    *,
    left_out: float = MODEL_ERROR,
    seed: int = 0,
    pool: Executor | None = None,
    say: Say | None = None,
) -> EngineBands:
    """Bands of a finished prediction by engine runs with all sources off together (docs/model.md, eq. U7).

    `effects`: the sources of `entry_effects`, whose draws the first-order bands use as well. `pool`:
    processes of `start_workers`, which are shut down here; without it all runs are made in this process. The
    result does not depend on the number of processes.
    """
    time = result.step.time_s
    seconds = engine_steps_s(prepared, effects, draws, seed=seed, pool=pool, say=say)
    first_order = np.full(draws, time) + sum(effect.draw_s(draws, seed) for effect in effects)
    drawn = bounded(seconds, left_out, time, seed)
    base = figures(result)
    bands: dict[str, Band] = {}
    for metric in UNCERTAIN:
        value = base[metric]
        if value is not None:
            bands[metric] = Band.of(float(value), scaled(result, metric, drawn))
    error = first_order / seconds - 1.0
    return EngineBands(
        bands=bands,
        draws=draws,
        seed=seed,
        first_order_mean=float(error.mean()),
        first_order_rms=float(np.sqrt((error**2).mean())),
    )


def engine_steps_s(
    prepared: Prepared,
    effects: Sequence[EntryEffect],
    draws: int = DRAWS,
    *,
    seed: int = 0,
    pool: Executor | None = None,
    say: Say | None = None,
) -> FloatArray:
    """Step seconds of every draw [draws] by the engine, without the error that no source carries (eq. U7).

    The other arguments are those of `engine_bands`.
    """
    changes = {effect.source.id: drawn_changes(effect.source, draws, seed) for effect in effects}
    seconds, done, engine, run = np.empty(draws), 0, prepared.engine.name, uuid4().hex
    chunks = [range(n, min(n + CHUNK, draws)) for n in range(0, draws, CHUNK)]
    points = [[{k: float(v[n]) for k, v in changes.items()} for n in chunk] for chunk in chunks]
    if pool is None:
        step = MovedStep(prepared)
        results = ((chunk, _steps_s(step, part)) for chunk, part in zip(chunks, points, strict=True))
    else:
        waiting = {
            pool.submit(_steps_of_scenario, prepared.scenario, part, engine, run): chunk
            for chunk, part in zip(chunks, points, strict=True)
        }
        results = ((waiting[future], future.result()) for future in as_completed(waiting))
    try:
        with pool.losses_explained() if isinstance(pool, DaskPool) else nullcontext():
            for chunk, values in results:
                seconds[list(chunk)] = values
                done += len(chunk)
                if say is not None:
                    say(done, draws)
    finally:
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
    beside = [effect.draw_s(draws, seed) for effect in effects if effect.source is RETRIES]
    return np.asarray(sum(beside, start=seconds))


def scaled(result: Result, metric: Metric, seconds: FloatArray) -> FloatArray:
    """Values of a figure that the result has, at other step times (s)."""
    time = result.step.time_s
    scale = seconds / time if UNCERTAIN[metric] > 0 else time / seconds
    return np.asarray(float(figures(result)[metric] or 0.0) * scale)


def _steps_of_scenario(
    scenario: Scenario, points: Sequence[Mapping[str, float]], engine: str, run: str
) -> list[float]:
    """Step seconds of some draws in a worker, which prepares the scenario once in a run of draws."""
    return _steps_s(_STEPS.get((run, engine), lambda: MovedStep(prepare(scenario, engine=engine))), points)


_STEPS: BoundedCache[MovedStep] = BoundedCache(2)
"""The steps that this process draws, by the run of `engine_steps_s` and the engine."""


def _steps_s(step: MovedStep, points: Sequence[Mapping[str, float]]) -> list[float]:
    used = tuple(step.prepared.program.costs.evidence.entries)
    with without_cyclic_collection():
        return [step.time_s(moved(step.prepared, point, used)) for point in points]


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
    """Draws of every figure (docs/model.md, eq. U2), in which the effects of the sources add up in seconds.

    `seed_s`: standard deviation over seeds of load and jitter. `left_out`: standard deviation of the relative
    error that no entry carries. Draws depend on the name of their source, so scenarios share the draws of
    common sources.
    """
    time = result.step.time_s
    seconds = np.full(samples, time)
    for effect in effects:
        seconds += effect.draw_s(samples, seed)
    seconds += seed_s * generator_of("variation.seed", seed).standard_normal(samples)
    base = figures(result)
    extra: dict[Metric, FloatArray] = {metric: np.zeros(samples) for metric in UNCERTAIN}
    for item in ranges:
        place = _triangle(generator_of(f"scenario.{item.key}", seed).random(samples))
        ends = [r.step.time_s - time for r in item.results]
        seconds += np.where(place < 0, -place * ends[0], place * ends[1])
        for metric, power in UNCERTAIN.items():
            own = [_beyond_time(base, figures(r), metric, power) for r in item.results]
            extra[metric] += np.where(place < 0, -place * own[0], place * own[1])
    seconds = bounded(seconds, left_out, time, seed)
    found: dict[Metric, FloatArray] = {}
    for metric, power in UNCERTAIN.items():
        value = base[metric]
        if value is not None:
            scale = seconds / time if power > 0 else time / seconds
            found[metric] = float(value) * scale * (np.exp(extra[metric]) if ranges else 1.0)
    return found


def _triangle(u: FloatArray) -> FloatArray:
    """Quantiles of the triangular distribution on -1 to 1 with mode 0."""
    return np.asarray(np.where(u < 0.5, np.sqrt(2 * u) - 1, 1 - np.sqrt(2 * (1 - u))))


def _beyond_time(
    base: Mapping[str, float | bool | None],
    other: Mapping[str, float | bool | None],
    metric: Metric,
    power: int,
) -> float:
    """Logarithm of the part of a figure's change that the step time does not explain."""
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
    engine_draws: int = 0,
    workers: int | None = None,
    scheduler: str | None = None,
    left_out: float = MODEL_ERROR,
    samples: int = SAMPLES,
    seed: int = 0,
    say: Say | None = None,
) -> Uncertainty:
    """Bands of a finished prediction, and its sources with the largest first.

    `ranges`: further uncertain scenario keys. `seeds`: number of further seeds of load and jitter that are
    simulated. `exact`: number of sources whose effect is simulated. `engine_draws`: number of engine runs
    with all sources off together, from which further bands are taken, in `workers` processes (None: one a
    core) or on the Dask cluster of `scheduler`; `say` hears how many are done. Raises InputError for illegal
    values of a key.
    """
    pool = start_workers(engine_draws, workers, scheduler) if engine_draws else None
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
    bands = {name: Band.of(float(base[name] or 0.0), values) for name, values in drawn.items()}
    rows = [_entry_row(time, e) for e in effects] + [_range_row(e) for e in around]
    if deviation:
        rows.append(_seed_row(time, seeds, deviation))
    if left_out:
        rows.append(_left_out_row(time, left_out))
    rows.sort(key=lambda row: (-row.swing_s, row.source))
    by_engine = None
    if engine_draws:
        by_engine = engine_bands(
            prepared, result, effects, engine_draws, left_out=left_out, seed=seed, pool=pool, say=say
        )
    note = _along(prepared, executions)
    return Uncertainty(
        bands=bands, sources=tuple(rows), samples=samples, seed=seed, note=note, by_engine=by_engine
    )


def _along(prepared: Prepared, executions: Sequence[Execution]) -> str:
    """Note on the critical path along which the effects were computed."""
    if prepared.whole is None:
        return "each uncertain input moves the step along its critical path; nothing is simulated again"
    last = last_group(executions).program.group
    return (
        f"each uncertain input moves the step along the critical path of group {last}, the last of "
        f"{len(executions)}; how transfers share links stays as simulated"
    )


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


def _seed_row(time: float, seeds: int, deviation: float) -> Effect:
    half = QUANTILE_90 * deviation
    return Effect(
        source="variation.seed",
        meaning=f"{seeds} further seeds of expert load, speed and jitter",
        low="-",
        high="+",
        low_s=time - half,
        high_s=time + half,
        exact=True,
    )


def _left_out_row(time: float, left_out: float) -> Effect:
    source = model_error(left_out)
    low, high = source.points()
    return Effect(
        source=source.id,
        meaning=source.meaning,
        low=f"{low:+.1%}",
        high=f"{high:+.1%}",
        low_s=time * (1 + low),
        high_s=time * (1 + high),
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


def interval(
    scenario: Scenario,
    metric: str = "step_time_s",
    level: float = LEVEL,
    *,
    left_out: float = MODEL_ERROR,
    seed: int = 0,
    engine_draws: int = 0,
    scheduler: str | None = None,
) -> tuple[float, float, float]:
    """(low, mid, high) of a figure: the interval that holds it with probability `level`, and its median.

    `left_out`: standard deviation of the relative error that no calibration entry carries; 0 counts the
    entries alone. `engine_draws`: number of engine runs from which the interval is taken; 0 takes the
    first-order one; `scheduler`: address of a Dask cluster for these. Raises InputError for an unknown
    figure, a level outside 0 to 1, a number of draws out of range, a cluster without draws, and a figure that
    the scenario does not have (a cost without a price).
    """
    name = uncertain_metric(metric)
    if not 0.0 < level < 1.0:
        raise InputError(f"level={level} is not between 0 and 1; 0.8 is the interval from P10 to P90")
    check_cluster(scheduler, engine_draws)
    pool = start_workers(engine_draws, None, scheduler) if engine_draws else None
    prepared, executions, result = predict(scenario)
    if figures(result)[name] is None:
        raise InputError(f"{scenario.name} has no {metric}: its cluster states no price_per_gpu_hour")
    effects = entry_effects(prepared, executions)
    if engine_draws:
        seconds = engine_steps_s(prepared, effects, engine_draws, seed=seed, pool=pool)
        values = scaled(result, name, bounded(seconds, left_out, result.step.time_s, seed))
    else:
        values = samples_of(result, effects, left_out=left_out, seed=seed)[name]
    low, mid, high = np.quantile(values, [(1 - level) / 2, 0.5, (1 + level) / 2])
    return float(low), float(mid), float(high)


def step_interval(prepared: Prepared, executions: Sequence[Execution], result: Result) -> tuple[float, float]:
    """(P10, P90) of the step time (s) of a finished prediction.

    It is computed to first order along the critical path, without another simulation.
    """
    return interval_of(step_draws_s(prepared, executions, result))


def interval_of(drawn: FloatArray) -> tuple[float, float]:
    """(P10, P90) of draws."""
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def step_draws_s(prepared: Prepared, executions: Sequence[Execution], result: Result) -> FloatArray:
    """Draws of the step time (s) of a finished prediction; predictions share those of common sources."""
    return draws_s(result.step.time_s, entry_effects(prepared, executions))


def with_uncertainty(
    scenario: Scenario,
    *,
    engine_draws: int = 0,
    workers: int | None = None,
    scheduler: str | None = None,
    engine: str | None = None,
    say: Say | None = None,
) -> Result:
    """Predict a scenario with its bands, also in the report of its run; options as for `uncertainty`."""
    check_cluster(scheduler, engine_draws)
    if engine_draws:
        check_draws(engine_draws)
    prepared, executions, result = predict(scenario, engine=engine)
    bands = uncertainty(
        prepared,
        executions,
        result,
        engine_draws=engine_draws,
        workers=workers,
        scheduler=scheduler,
        say=say,
    )
    return with_uncertain_run(prepared, executions, result.model_copy(update={"uncertainty": bands}))


# -- sensitivity -------------------------------------------------------------------------------------
# Sensitivity of the step time to every uncertain input alone, for a tornado chart.


class Sensitivity(TableResult):
    """Effects of single sources on the step time, largest first."""

    scenario: str
    inputs: Inputs
    step: Band
    effects: tuple[Effect, ...]
    by_engine: EngineBands | None = Field(None, exclude_if=lambda value: value is None)
    """Bands by the engine itself, where they were asked for."""

    def rows(self) -> list[Row]:
        """One row for each source, with its low and high value and the step times there."""
        time = self.step.predicted
        return [
            {
                "source": e.source,
                "low": e.low,
                "high": e.high,
                "step_low_s": e.low_s,
                "step_high_s": e.high_s,
                "change_low": e.low_s / time - 1.0,
                "change_high": e.high_s / time - 1.0,
                "from": "stated" if e.source == LEFT_OUT else "engine" if e.exact else "critical path",
                "meaning": e.meaning,
            }
            for e in self.effects
        ]


def sensitivity(
    scenario: Scenario,
    ranges: Ranges | None = None,
    *,
    seeds: int = 0,
    exact: int = 0,
    engine_draws: int = 0,
    scheduler: str | None = None,
    left_out: float = MODEL_ERROR,
    say: Say | None = None,
) -> Sensitivity:
    """The step time with each source at its 10 % and 90 % points, and the other sources as predicted.

    The sources are every calibration entry that the prediction used, the scenario keys in `ranges` (lowest
    and highest value), `seeds` further seeds, and `left_out`, the relative error that no entry carries
    (docs/model.md, section 16). Entries are evaluated along the critical path; the `exact` largest are
    simulated instead. `engine_draws`: number of engine runs with all sources off together, on the Dask
    cluster at the address `scheduler` if it is given; `say` hears how many are done. Raises InputError for
    illegal values of a key, a number of draws out of range and a cluster without draws.
    """
    check_cluster(scheduler, engine_draws)
    if engine_draws:
        check_draws(engine_draws)
    prepared, executions, result = predict(scenario)
    bands = uncertainty(
        prepared,
        executions,
        result,
        ranges=ranges,
        seeds=seeds,
        exact=exact,
        engine_draws=engine_draws,
        scheduler=scheduler,
        left_out=left_out,
        say=say,
    )
    return Sensitivity(
        scenario=scenario.name,
        inputs=result.inputs,
        step=bands.bands["step_time_s"],
        effects=bands.sources,
        by_engine=bands.by_engine,
    )
