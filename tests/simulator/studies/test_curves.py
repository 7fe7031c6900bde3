"""Curves through a scenario: the values tried, what they set, and what is said about illegal ones."""

from __future__ import annotations

import pytest

import moesim
from moesim.hwmodels.errors import InputError
from moesim.simulator.scenario import Scenario
from moesim.simulator.studies.curves import MOST_VALUES, axes, curve_point, overrides_at

HOME = "deepseek-v3-2048xh800"


def test_every_axis_holds_the_present_value_among_sensible_ones() -> None:
    home = moesim.load(HOME)
    found = {axis.name: axis for axis in axes(home)}
    assert list(found) == ["sms", "nic", "scale_up", "ep", "imbalance", "batch", "sequence", "nodes"]
    for axis in found.values():
        assert list(axis.values) == sorted(set(axis.values))
        assert 2 <= len(axis.values) == len(axis.words) <= MOST_VALUES
        assert overrides_at(home, axis.name, axis.values[axis.own]) == ()
    assert all(256 % ep == 0 for ep in found["ep"].values)
    assert all(batch % 128 == 0 for batch in found["batch"].values), "whole micro-batches of 128 replicas"
    assert found["nodes"].words[found["nodes"].own] == "2,048"
    assert found["nic"].words[found["nic"].own] == "50 GB/s"


def test_axes_that_the_hardware_or_the_model_lacks_are_left_out() -> None:
    home = moesim.load(HOME)
    dense = {a.name for a in axes(moesim.load("llama-3-70b-64xh100"))}
    assert "ep" not in dense and "imbalance" not in dense and "batch" in dense
    slice_ = {a.name for a in axes(home.replace(cluster="tpu-v5p-2048-slice", profile=None))}
    assert "sms" not in slice_ and "nic" not in slice_


def test_the_nearest_values_come_first() -> None:
    axis = next(axis for axis in axes(moesim.load(HOME)) if axis.name == "sms")
    order = axis.nearest_first()
    assert order[0] == axis.own and sorted(order) == list(range(len(axis.values)))
    distances = [abs(place - axis.own) for place in order]
    assert distances == sorted(distances)


@pytest.mark.parametrize(
    ("name", "value", "texts"),
    [
        ("sms", 8.0, ("communication.sms=8",)),
        ("ep", 32.0, ("parallel.ep=32",)),
        ("imbalance", 0.08, ("routing.expert_load_cv=0.08",)),
        ("batch", 30720.0, ("batch.sequences=30720",)),
        ("nodes", 128.0, ("cluster.nodes=128",)),
        ("sequence", 32768.0, ("batch.sequence_length=32768",)),
    ],
)
def test_a_value_sets_its_key(name: str, value: float, texts: tuple[str, ...]) -> None:
    assert overrides_at(moesim.load(HOME), name, value) == texts  # type: ignore[arg-type]


def test_a_point_is_the_prediction_of_the_changed_scenario(small: Scenario) -> None:
    point = curve_point(small, "sms", 8.0)
    expected = moesim.simulate(small.overridden("communication.sms=8"))
    assert point.status == ("ok" if expected.memory.fits else "does not fit")
    assert point.figures["step_time_s"] == expected.step.time_s
    assert point.figures["mfu_causal"] == expected.step.mfu_causal
    assert point.figures["cost_usd"] == expected.run.cost_usd
    faster = curve_point(small, "nic", 2.0)
    assert (faster.figures["step_time_s"] or 0.0) < (
        curve_point(small, "nic", 1.0).figures["step_time_s"] or 0.0
    )


def test_an_illegal_value_and_one_without_memory_say_why() -> None:
    home = moesim.load(HOME)
    illegal = curve_point(home, "nodes", 32.0)
    assert illegal.status == "illegal" and "parallel.ep=64" in illegal.reason and illegal.figures == {}
    full = curve_point(home.overridden("batch.sequences=4096"), "ep", 8.0)
    assert full.status == "does not fit" and "GiB" in full.reason and full.figures["step_time_s"]


def test_what_is_not_admitted_is_not_simulated() -> None:
    def refuse(scenario: Scenario) -> Scenario:
        raise InputError(f"{scenario.batch.sequences} sequences are too many here")

    point = curve_point(moesim.load(HOME), "batch", 30720.0, refuse)
    assert (point.status, point.reason) == ("illegal", "30720 sequences are too many here")
