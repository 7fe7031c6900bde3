"""What a sweep still has to do: known, illegal and missing points, before anything is computed."""

from __future__ import annotations

from pathlib import Path

import pytest

import moesim
from moesim.hwmodels.errors import InputError
from moesim.simulator.scenario import Scenario
from moesim.simulator.studies.sweep import survey

SPACE = {"communication.sms": [8, 20], "parallel.pp": [7, 8]}


@pytest.fixture(scope="module")
def small() -> Scenario:
    return moesim.load(
        "deepseek-v3-2048xh800", "cluster.nodes=16", "parallel.pp=8", "parallel.ep=8", "batch.sequences=512",
        "schedule=1f1b",
    )  # fmt: skip


def test_without_a_store_every_legal_point_is_missing(small: Scenario) -> None:
    found = survey(small, {"communication.sms": [8, 20, 132]})
    assert found.total == 3
    assert found.missing == ({"communication.sms": 8}, {"communication.sms": 20}, {"communication.sms": 132})


def test_points_that_a_sweep_stored_are_known_and_equal(small: Scenario, tmp_path: Path) -> None:
    store = tmp_path / "sweep.sqlite"
    space = {"communication.sms": [8, 20]}
    done = moesim.sweep(small, {"communication.sms": [8]}, workers=1, store=store)
    found = survey(small, space, store)
    assert found.missing == ({"communication.sms": 20},)
    assert found.points == done.points


def test_an_illegal_point_has_its_reason_and_is_never_missing(small: Scenario) -> None:
    found = survey(small, {"batch.sequences": [512, -1]})
    (point,) = found.points
    assert (point.status, point.values) == ("illegal", {"batch.sequences": -1})
    assert "batch.sequences" in point.reason
    assert found.missing == ({"batch.sequences": 512},)


def test_a_point_that_is_not_admitted_ends_the_survey(small: Scenario) -> None:
    def admit(scenario: Scenario) -> None:
        if scenario.batch.sequences > 1000:
            raise InputError("too large")

    with pytest.raises(InputError, match="too large"):
        survey(small, {"batch.sequences": [512, 5120]}, admit=admit)
