"""Figures of studies: differences, and intervals of figures that go in proportion to one that has its own."""

from __future__ import annotations

import pytest

from moesim.simulator.engine.records import Execution
from moesim.simulator.predict.figures import bands_of_figures
from moesim.simulator.predict.result import Result
from moesim.simulator.predict.step import Prepared
from moesim.simulator.studies.compare import changes
from moesim.simulator.studies.uncertainty import uncertainty

Run = tuple[Prepared, Execution, Result]


def test_figures_in_proportion_have_the_same_relative_interval(home_case: Run) -> None:
    prepared, execution, result = home_case
    found = uncertainty(prepared, [execution], result)
    bands = bands_of_figures(result, found)
    assert {name: bands[name] for name in found.bands} == found.bands
    for name, value, like in (
        ("tokens_per_s_per_gpu", result.step.tokens_per_s_per_gpu, "tokens_per_s"),
        ("tokens_per_day", result.step.tokens_per_day, "tokens_per_s"),
        ("mfu_noncausal", result.step.mfu_noncausal, "mfu_causal"),
        ("gpu_hours", result.run.gpu_hours, "days"),
    ):
        assert bands[name].predicted == pytest.approx(value, rel=1e-12)
        assert bands[name].p10 / value == pytest.approx(bands[like].p10 / bands[like].predicted, rel=1e-12)
        assert bands[name].p10 < value < bands[name].p90
    days, hours = bands["days"], bands["gpu_hours"]
    assert hours.p90 == pytest.approx(days.p90 * 24 * prepared.cluster.n_gpus, rel=1e-12)


def test_changes_are_figure_by_figure_and_leave_out_what_is_unknown(home_case: Run) -> None:
    result = home_case[2]
    step = result.step.model_copy(update={"time_s": result.step.time_s + 1.0})
    run = result.run.model_copy(update={"cost_usd": None})
    found = changes(result, result.model_copy(update={"step": step, "run": run}))
    assert found["step_time_s"] == pytest.approx(1.0)
    assert found["days"] == 0.0
    assert "cost_usd" not in found
    assert "fits" not in found
