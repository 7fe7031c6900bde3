"""Comparison: differences that add up to the nanosecond, changed keys, and texts for notebooks."""

from __future__ import annotations

from math import fsum

import numpy as np
import pytest

import moesim
from moesim.hwmodels.errors import InputError
from moesim.simulator.predict.figures import bands_of_figures
from moesim.simulator.scenario import Scenario
from moesim.simulator.studies.compare import (
    Comparison,
    bands_of_changes,
    bands_of_draws,
    bands_of_margins,
    compare,
    differences,
    relative_draws,
)
from moesim.simulator.studies.explain import explain


@pytest.fixture(scope="module")
def three(small: Scenario) -> Comparison:
    others = [small.replace(**{"communication.sms": 8}), small.replace(schedule="1f1b", seed=3)]
    return compare([small, *others], names=["base", "few", "plain"], uncertainty=True)


def test_the_waterfall_adds_up_exactly(three: Comparison) -> None:
    for number, side in enumerate(three.sides):
        ns = [round(item.seconds[number] * 1e9) for item in three.waterfall]
        assert sum(ns) == round(float(side.figures["step_time_s"] or 0.0) * 1e9)
        changes = fsum(item.seconds[number] - item.seconds[0] for item in three.waterfall)
        step = [float(s.figures["step_time_s"] or 0.0) for s in (three.sides[0], side)]
        assert changes == pytest.approx(step[1] - step[0], abs=1e-9)


def test_changed_keys_are_named(three: Comparison) -> None:
    assert three.sides[0].differs == {}
    assert three.sides[1].differs == {"communication.sms": (20, 8)}
    assert three.sides[2].differs == {"schedule": ("dualpipe", "1f1b"), "seed": (0, 3)}


def test_differences_hold_their_prediction(three: Comparison) -> None:
    assert three.sides[0].delta_s is None
    band = three.sides[2].delta_s
    assert band is not None
    assert band.p10 < band.predicted < band.p90


def test_rows_have_every_scenario_and_change(three: Comparison) -> None:
    row = three.rows()[0]
    assert list(row) == ["figure", "0: base", "1: few", "change 1", "2: plain", "change 2"]
    assert row["change 1"] == row["1: few"] - row["0: base"]
    assert [r["cause"] for r in three.waterfall_rows()] == [item.cause for item in three.waterfall]
    assert three.to_pandas().shape == (len(three.rows()), 6)
    assert "<td>step_time_s</td>" in three._repr_html_()


def test_only_two_to_four_scenarios(small: Scenario) -> None:
    for count in (1, 5):
        with pytest.raises(InputError, match="2 to 4"):
            compare([small] * count)
    with pytest.raises(InputError, match="3 names for 2"):
        compare([small] * 2, names=["a", "b", "c"])


def test_differences_of_nested_mappings() -> None:
    a = {"x": {"y": 1, "z": [1]}, "only": 1}
    b = {"x": {"y": 2, "z": [1]}, "new": {"k": 1}}
    assert differences(a, b) == {"x.y": (1, 2), "only": (1, None), "new": (None, {"k": 1})}


def test_an_explanation_accounts_for_the_step(small: Scenario) -> None:
    result = moesim.simulate(small, uncertainty=True)
    told = explain(result)
    assert fsum(cause.share for cause in told.causes) == pytest.approx(1.0)
    assert f"{result.step.time_s:.3f} s" in told.sentences[0]
    assert "probability 0.8" in str(told)
    assert moesim.explain(small).causes == told.causes
    assert told.rows()[0] == told.causes[0].model_dump()


def test_a_change_of_price_alone_is_sure_and_a_scenario_against_itself_has_no_difference(
    small: Scenario,
) -> None:
    dear = small.replace(cluster={"price_per_gpu_hour": "$4/h"})
    draws = relative_draws(small)
    first, other = moesim.simulate(small), moesim.simulate(dear)
    again = bands_of_changes(first, draws, first, draws)
    assert all((b.p10, b.p50, b.p90) == (0.0, 0.0, 0.0) and not b.has_sign for b in again.values())
    bands = bands_of_changes(first, draws, other, draws)
    assert first.run.cost_usd is not None and other.run.cost_usd is not None
    assert bands["cost_usd"].has_sign and not bands["step_time_s"].has_sign
    assert bands["cost_usd"].predicted == other.run.cost_usd - first.run.cost_usd


def test_intervals_from_draws_are_those_of_the_prediction(small: Scenario) -> None:
    result = moesim.simulate(small, uncertainty=True)
    assert result.uncertainty is not None
    found = bands_of_draws(result, relative_draws(small))
    for name, band in bands_of_figures(result, result.uncertainty).items():
        assert found[name].model_dump() == pytest.approx(band.model_dump(), rel=1e-9)


def test_the_distance_from_the_best_plan_is_surer_than_either_step() -> None:
    shared, own = np.linspace(0.8, 1.2, 1001), np.linspace(-0.01, 0.01, 1001)[::-1]
    first, second = bands_of_margins([0.0, 0.05], [shared, shared + own])
    assert (first.p10, first.p50, first.p90) == pytest.approx((0.0, 0.0, 0.0), abs=1e-12)
    assert second.predicted == pytest.approx(0.05)
    assert 0.03 < second.p10 < second.p50 < second.p90 < 0.07
    assert second.has_sign
    assert not bands_of_margins([0.0, 0.005], [shared, shared + own])[1].has_sign
