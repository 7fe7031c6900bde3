"""Faster links as overrides, and simulated advice."""

from __future__ import annotations

import pytest

import moesim
from moesim.simulator.schedules import SCHEDULES
from moesim.simulator.studies import neighbours as module
from moesim.simulator.studies.faster_links import faster_links
from moesim.simulator.studies.neighbours import neighbours

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
