"""How far the first-order response is from running the engine for every draw.

    python -m lab.benchmarks.uncertainty [--draws 48] [--workers 2] [--set KEY=VALUE]

Both use the same draws of every calibration entry. In the engine's runs all entries are off together, so
what is compared includes their interaction.
"""

from __future__ import annotations

import argparse

import numpy as np

import moesim
from moesim.simulator.common.processes import worker_pool
from moesim.simulator.predict.step import prepare
from moesim.simulator.predict.driver import predict
from moesim.simulator.predict.step import run_step
from moesim.simulator.scenario import Scenario
from moesim.simulator.studies.effects import drawn_changes, entry_effects, moved

HOME = "deepseek-v3-2048xh800"


def step_s(scenario: Scenario, changes: dict[str, float]) -> float:
    """Step time with every source off by its change, from the engine (s)."""
    base = prepare(scenario)
    job = moved(base, changes, tuple(base.program.costs.evidence.entries))
    return run_step(job, stages=base.stages).time_s


def main() -> None:
    """Print quantiles of both and the error of single draws."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=48)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    options = parser.parse_args()
    scenario = moesim.load(HOME, *options.overrides)
    prepared, executions, result = predict(scenario)
    effects = entry_effects(prepared, executions)
    draws = options.draws
    linear = result.step.time_s + sum(effect.draw_s(draws, 0) for effect in effects)
    by_source = {e.source.id: drawn_changes(e.source, draws, 0) for e in effects}
    points = [{name: float(values[n]) for name, values in by_source.items()} for n in range(draws)]
    with worker_pool(options.workers) as pool:
        full = np.array(list(pool.map(step_s, [scenario] * draws, points)))
    error = linear / full - 1.0
    print(f"{scenario.name}, {len(effects)} entries, {draws} draws; predicted {result.step.time_s:.3f} s")
    print("                P10      P50      P90     deviation (s)")
    for name, values in (("first order", linear), ("engine", full)):
        p10, p50, p90 = np.quantile(values, [0.1, 0.5, 0.9])
        print(f"{name:12s}  {p10:7.3f}  {p50:7.3f}  {p90:7.3f}  {values.std(ddof=1):10.3f}")
    print(
        f"first order / engine - 1: mean {error.mean():+.2%}, rms {np.sqrt((error**2).mean()):.2%}, "
        f"from {error.min():+.2%} to {error.max():+.2%}"
    )


if __name__ == "__main__":
    main()
