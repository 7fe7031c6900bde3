"""Faster links as overrides, and simulated advice."""

from __future__ import annotations

import pytest

import moesim
from moesim.simulator.scenario import Scenario
from moesim.simulator.schedules import SCHEDULES
from moesim.simulator.studies import compare as module
from moesim.simulator.studies.compare import Neighbour, change_bands, neighbours
from moesim.simulator.studies.curves import faster_links

HOME = ("deepseek-v3-2048xh800", "batch.sequences=4096")


def test_faster_links_multiply_bandwidths_and_shorten_the_step() -> None:
    scenario = moesim.load(*HOME)
    assert faster_links(scenario) == ()
    doubled = faster_links(scenario, nic=2.0)
    assert "cluster.node.nic_bandwidth=100 GB/s" in doubled
    machine = scenario.overridden(*doubled).machine
    assert machine.node.scale_out_bytes_per_s == 2 * scenario.machine.node.scale_out_bytes_per_s
    fabric, before = machine.network.fabric, scenario.machine.network.fabric
    assert fabric is not None
    assert before is not None
    assert fabric.link_bandwidth.value == 2 * before.link_bandwidth.value
    quick = moesim.simulate(scenario.overridden(*faster_links(scenario, nic=2.0, scale_up=2.0)))
    assert quick.step.time_s < moesim.simulate(scenario).step.time_s
    assert not quick.warnings


def test_neighbours_are_what_the_simulator_says_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RECOMPUTE", ("deepseek-v3", "none"))
    monkeypatch.setattr(module, "SCHEDULES", {"1f1b": SCHEDULES["1f1b"]})
    monkeypatch.setattr(module, "SMS_STEPS", (4,))
    scenario = moesim.load(*HOME)
    own = moesim.simulate(scenario)
    said: list[tuple[float, str]] = []
    found = neighbours(scenario, own, lambda share, text: said.append((share, text)))
    by_override = {row.override: row for row in found}
    assert {"communication.sms=24", "parallel.ep=32", "recompute=none", "schedule=1f1b"} <= set(by_override)
    more = by_override["communication.sms=24"]
    assert more.step_time_s == moesim.simulate(scenario.overridden("communication.sms=24")).step.time_s
    assert more.change == more.step_time_s / own.step.time_s - 1.0
    assert not by_override["recompute=none"].fits
    assert [row.fits for row in found] == sorted((row.fits for row in found), reverse=True)
    assert said[0][0] == 0.0
    assert all(0.0 <= share < 1.0 for share, _ in said)


def test_a_change_has_an_interval_of_its_own_narrower_than_that_of_the_step(small: Scenario) -> None:
    scenario = small
    result = moesim.simulate(scenario, uncertainty=True)
    faster = scenario.overridden("communication.sms=8")
    other = moesim.simulate(faster)
    row = Neighbour(
        override="communication.sms=8",
        why="",
        step_time_s=other.step.time_s,
        change=other.step.time_s / result.step.time_s - 1.0,
        memory_bytes=0.0,
        fits=True,
        verdict="fits",
    )
    same = row.model_copy(update={"override": "seed=0", "step_time_s": result.step.time_s, "change": 0.0})
    bands = change_bands(scenario, result, [row, same])
    band = bands["communication.sms=8"]
    assert result.uncertainty is not None
    step = result.uncertainty.bands["step_time_s"]
    assert band.p10 <= band.p50 <= band.p90 and band.predicted == row.change
    assert band.p90 - band.p10 < (step.p90 - step.p10) / step.predicted  # the draws are shared
    alike = bands["seed=0"]
    assert alike.p10 == alike.p90 == 0.0 and not alike.has_sign


def test_an_illegal_change_and_a_fleet_have_no_interval() -> None:
    scenario = moesim.load("deepseek-v3-trace-pair")
    result = moesim.simulate(scenario)
    wrong = Neighbour(
        override="parallel.ep=7",
        why="",
        step_time_s=1.0,
        change=0.0,
        memory_bytes=0.0,
        fits=True,
        verdict="fits",
    )
    assert change_bands(scenario, result, [wrong]) == {}
