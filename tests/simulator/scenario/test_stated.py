"""Whose figure it is: overrides are credited to who gave them, everything else keeps its source."""

from __future__ import annotations

from pathlib import Path

import pytest

import moesim
from moesim.hwmodels.failure import load_storage
from moesim.simulator.run.report import rates
from moesim.simulator.scenario import Scenario, load_scenario

HOME = "deepseek-v3-2048xh800"
OWN_PRICE = "cluster.price_per_gpu_hour=$3/h"


def price_source(scenario: Scenario) -> str:
    price = scenario.machine.price_per_gpu_hour
    assert price is not None
    return price.source


@pytest.mark.parametrize(
    "scenario",
    [
        lambda: moesim.load(HOME, OWN_PRICE),
        lambda: moesim.load(HOME).overridden(OWN_PRICE),
        lambda: moesim.load(HOME).replace(cluster={"price_per_gpu_hour": "$3/h"}),
    ],
)
def test_a_price_of_ones_own_is_not_credited_to_the_preset(scenario: object) -> None:
    found = scenario()  # type: ignore[operator]
    assert price_source(found) == "stated by you"
    assert rates(found.machine, None, 0).described == "rented at $3/h (undated, stated by you)"
    assert "arXiv" in price_source(moesim.load(HOME))


def test_an_override_leaves_the_sources_of_everything_else() -> None:
    plain, changed = moesim.load(HOME), moesim.load(HOME, OWN_PRICE, "routing.expert_load_cv=0.1")
    assert changed.routing.expert_load_cv.source == "stated by you"
    assert changed.machine.accelerator == plain.machine.accelerator
    assert changed.variation == plain.variation
    sourced = "{value: $3/h, kind: published, source: a quote, date: 2026-05}"
    assert price_source(moesim.load(HOME, f"cluster.price_per_gpu_hour={sourced}")) == "a quote"


def test_a_figure_below_an_overridden_section_is_the_users_too() -> None:
    found = moesim.load(
        HOME,
        "run.checkpoint={interval: 1 h, storage: llama3-tectonic}",
        "run.spares={count: 2, repair: 3 days}",
    )
    assert found.run.spares is not None and found.run.spares.repair.source == "stated by you"
    assert found.run.checkpoint is not None
    assert found.run.checkpoint.storage == load_storage("llama3-tectonic")


def test_what_stands_in_a_file_stays_stated_in_the_file(tmp_path: Path) -> None:
    text = moesim.load(HOME).model_dump_json(exclude_none=True)
    path = tmp_path / "mine.json"
    path.write_text(text)
    assert price_source(load_scenario(str(path), ["parallel.ep=32"])) == price_source(moesim.load(HOME))
