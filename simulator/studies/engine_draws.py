"""Intervals by running the engine for every draw of all sources together, beside the first-order ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed

import numpy as np

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.errors import InputError
from moesim.simulator.common.garbage import without_cyclic_collection
from moesim.simulator.common.processes import default_workers, worker_pool
from moesim.simulator.predict.band import Band, EngineBands
from moesim.simulator.predict.compile import prepare
from moesim.simulator.predict.figures import UNCERTAIN, Metric, figures
from moesim.simulator.predict.prepared import Prepared
from moesim.simulator.predict.result import Result
from moesim.simulator.predict.step import run_step
from moesim.simulator.scenario import Scenario
from moesim.simulator.studies.effects import EntryEffect, drawn_changes, moved
from moesim.simulator.studies.monte_carlo import bounded
from moesim.simulator.studies.sources import MODEL_ERROR

DRAWS = 200
"""Draws of an interval by the engine; its P10 and P90 then lie between the true 6 % and 14 % points."""
FEWEST, MOST = 20, 10_000
CHUNK = 5
"""Draws that a worker takes at a time: fewer than a second of work."""

Say = Callable[[int, int], None]
"""Called with (draws done, draws in all)."""


def check_draws(draws: int) -> None:
    """Raise InputError for a number of draws out of range."""
    if not FEWEST <= draws <= MOST:
        raise InputError(f"engine draws={draws}: give {FEWEST} to {MOST:,}, for example {DRAWS}")


def start_workers(draws: int, workers: int | None = None) -> ProcessPoolExecutor | None:
    """Start the processes for so many draws, so that they import the engine while the caller predicts.

    None where one process does all of them. Raises InputError for a number of draws out of range.
    """
    check_draws(draws)
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
            bands[metric] = _band(float(value), scaled(result, metric, drawn))
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
    return _run_all(prepared, changes, draws, pool, say)


def scaled(result: Result, metric: Metric, seconds: FloatArray) -> FloatArray:
    """Values of a figure that the result has, at other step times (s)."""
    time = result.step.time_s
    scale = seconds / time if UNCERTAIN[metric] > 0 else time / seconds
    return np.asarray(float(figures(result)[metric] or 0.0) * scale)


def _band(predicted: float, values: FloatArray) -> Band:
    p10, p50, p90 = (float(v) for v in np.quantile(values, [0.1, 0.5, 0.9]))
    return Band(predicted=predicted, p10=p10, p50=p50, p90=p90)


def _run_all(
    prepared: Prepared,
    changes: Mapping[str, FloatArray],
    draws: int,
    pool: Executor | None,
    say: Say | None,
) -> FloatArray:
    """Step seconds of every draw."""
    seconds, done, engine = np.empty(draws), 0, prepared.engine.name
    chunks = [range(n, min(n + CHUNK, draws)) for n in range(0, draws, CHUNK)]
    points = [[{k: float(v[n]) for k, v in changes.items()} for n in chunk] for chunk in chunks]
    if pool is None:
        results = ((chunk, _steps_s(prepared, part)) for chunk, part in zip(chunks, points, strict=True))
    else:
        waiting = {
            pool.submit(_steps_of_scenario, prepared.scenario, part, engine): chunk
            for chunk, part in zip(chunks, points, strict=True)
        }
        results = ((waiting[future], future.result()) for future in as_completed(waiting))
    try:
        for chunk, values in results:
            seconds[list(chunk)] = values
            done += len(chunk)
            if say is not None:
                say(done, draws)
    finally:
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
    return seconds


def _steps_of_scenario(scenario: Scenario, points: Sequence[Mapping[str, float]], engine: str) -> list[float]:
    return _steps_s(prepare(scenario, engine=engine), points)


def _steps_s(prepared: Prepared, points: Sequence[Mapping[str, float]]) -> list[float]:
    used, engine = tuple(prepared.program.costs.evidence.entries), prepared.engine.name
    jobs = (moved(prepared, point, used) for point in points)
    with without_cyclic_collection():
        return [run_step(job, stages=prepared.stages, engine=engine).time_s for job in jobs]
