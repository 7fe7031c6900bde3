"""Intervals by the engine itself (docs/model.md, eq. U7)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import moesim
from moesim.hwmodels.errors import InputError
from moesim.simulator.predict.driver import predict
from moesim.simulator.predict.step import run_step
from moesim.simulator.scenario import Scenario
from moesim.simulator.studies.effects import drawn_changes, entry_effects, moved
from moesim.simulator.studies.uncertainty import engine_bands, engine_steps_s


def test_engine_draws_are_the_runs_themselves(small: Scenario) -> None:
    """A draw is one engine run with all sources off together, in this process or in workers (eq. U7)."""
    prepared, executions, result = predict(small)
    effects = entry_effects(prepared, executions)
    with ThreadPoolExecutor(1) as pool:
        here = engine_steps_s(prepared, effects, 8, seed=3, pool=pool)
    changes = {e.source.id: float(drawn_changes(e.source, 8, 3)[7]) for e in effects}
    used = tuple(prepared.program.costs.evidence.entries)
    assert here[7] == run_step(moved(prepared, changes, used), stages=prepared.stages).time_s
    bands = engine_bands(prepared, result, effects, 8, left_out=0.0, seed=3)
    step = bands.bands["step_time_s"]
    assert [step.p10, step.p50, step.p90] == pytest.approx(
        list(np.quantile(here, [0.1, 0.5, 0.9])), rel=1e-12
    )
    first_order = result.step.time_s + sum(e.draw_s(8, 3) for e in effects)
    assert bands.first_order_rms == pytest.approx(np.sqrt(((first_order / here - 1.0) ** 2).mean()))


@pytest.mark.parametrize("draws", [-1, 19, 10_001])
def test_engine_draws_out_of_range_are_refused(small: Scenario, draws: int) -> None:
    for call in (
        lambda: moesim.simulate(small, uncertainty=True, engine_draws=draws),
        lambda: moesim.sensitivity(small, engine_draws=draws),
        lambda: moesim.interval(small, engine_draws=draws),
    ):
        with pytest.raises(InputError, match=f"engine draws={draws}: give 20 to 10,000"):
            call()
