"""The shipped scenarios fit, are what they are called, and say how far they can be trusted."""

from __future__ import annotations

import moesim
from moesim.hwmodels.confidence import LEVELS
from moesim.simulator.scenario import load_scenario
from moesim.simulator.scenario.presets import shipped_presets

HOME = "deepseek-v3-2048xh800"


def test_presets_fit_and_say_how_sure_they_are() -> None:
    rows = shipped_presets()
    assert [row.preset for row in rows] == moesim.presets()
    assert len(rows) >= 8
    for row in rows:
        scenario = load_scenario(row.preset)
        assert scenario.name == row.preset and row.description and row.confidence in LEVELS
        assert moesim.check(scenario).memory.fits
    found = {row.preset: row for row in rows}
    assert found[HOME].confidence == "measured" and found[HOME].defaults == 0
    assert found["deepseek-v3-1024xmi300x"].confidence == "published"
    assert {row.accelerator for row in rows} >= {"h100-sxm", "h200-sxm", "b200-sxm", "gb200", "mi300x"}
