"""Other prices for a finished prediction: exactly what a fresh one would say, and nothing simulated."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

import moesim
from moesim.simulator.predict.result import Result
from moesim.simulator.scenario.inputs import inputs_of
from moesim.simulator.studies.reprice import repriced, unpriced, without_prices

HOME = "deepseek-v3-2048xh800"
JOB = str(Path(__file__).parents[2] / "golden" / "scenario-small.yaml")
PLANS = {
    "step": ("run={tokens: 1e11}",),
    "run": ("run=deepseek-v3", "run.phases=[]", "run.tokens=1e11", "run.ramp=null"),
}
BOUGHT = ("cluster=deepseek-h800-2048", "cluster.nodes=4", "run.price={buy: h800-bought}")


@cache
def plain(plan: str, *more: str) -> Result:
    """The prediction without prices, which all prices of a plan share."""
    return moesim.simulate(without_prices(moesim.load(JOB, *PLANS[plan], *more)))


def same(one: Result, other: Result) -> bool:
    """Equal, whatever the order of their sources."""
    a, b = one.model_dump(), other.model_dump()
    rows = [sorted(str(row) for row in data.pop("provenance")) for data in (a, b)]
    return a == b and rows[0] == rows[1]


@pytest.mark.parametrize(
    "price",
    [
        (),
        ('cluster.price_per_gpu_hour="$3/h"',),
        ("cluster.price_per_gpu_hour=null",),
        ("cluster.energy=germany",),
        ("cluster.energy=null",),
    ],
)
@pytest.mark.parametrize("plan", PLANS)
def test_a_repriced_result_is_a_fresh_one(plan: str, price: tuple[str, ...]) -> None:
    scenario = moesim.load(JOB, *PLANS[plan], *price)
    fresh = moesim.simulate(scenario)
    bare = plain(plan).model_copy(update={"inputs": inputs_of(without_prices(scenario))})
    assert same(repriced(bare, scenario), fresh)
    assert unpriced(fresh, scenario).model_dump_json() == bare.model_dump_json()


def test_a_bought_cluster_is_repriced_as_well() -> None:
    more = (*BOUGHT[:2], "profile=h800-published")
    scenario = moesim.load(JOB, *PLANS["run"], *more, BOUGHT[2])
    bare, fresh = moesim.simulate(without_prices(scenario)), moesim.simulate(scenario)
    later = repriced(bare, scenario)
    assert unpriced(fresh, scenario).model_dump_json() == bare.model_dump_json()
    assert fresh.run.report is not None
    assert later.run.report is not None
    assert later.run.report.cost_parts_usd == pytest.approx(fresh.run.report.cost_parts_usd)


def test_scenarios_that_differ_in_prices_only_are_one_without_them() -> None:
    plain = without_prices(moesim.load(HOME))
    assert plain == without_prices(moesim.load(HOME, "cluster.price_per_gpu_hour=$9/h", "cluster.energy=usa"))
    assert plain != without_prices(moesim.load(HOME, "communication.sms=16"))
    assert plain.machine.price_per_gpu_hour is None


def test_the_interval_of_the_cost_follows_the_price() -> None:
    scenario = moesim.load(JOB, *PLANS["step"], 'cluster.price_per_gpu_hour="$3/h"')
    plain = moesim.simulate(without_prices(scenario), uncertainty=True)
    fresh = moesim.simulate(scenario, uncertainty=True)
    assert plain.uncertainty is not None
    assert fresh.uncertainty is not None
    assert "cost_usd" not in plain.uncertainty.bands
    assert unpriced(fresh, scenario).model_dump_json() == plain.model_dump_json()
    later = repriced(plain, scenario).uncertainty
    assert later is not None
    assert set(later.bands) == set(fresh.uncertainty.bands)
    for name, band in fresh.uncertainty.bands.items():
        assert later.bands[name].model_dump() == pytest.approx(band.model_dump(), rel=1e-9), name
    without = repriced(fresh, without_prices(scenario)).uncertainty
    assert without is not None
    assert "cost_usd" not in without.bands
