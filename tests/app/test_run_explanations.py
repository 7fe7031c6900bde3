"""How the figures of Run & cost come about (app/explanations.py): the formulas give the figures shown."""

from __future__ import annotations

import pytest

import moesim
from moesim.app import explanations, predictions
from moesim.app.explanations import run_derivations, sources
from moesim.simulator.predict.result import Result
from moesim.simulator.scenario import Scenario
from moesim.simulator.studies.reprice import repriced, without_prices

HOME = "deepseek-v3-2048xh800"
FAILURES = (
    "run.failures=llama3-16k-h100",
    "run.restart=megascale",
    'run.checkpoint={"interval":"1 h","storage":"llama3-tectonic"}',
)


def predicted(*overrides: str) -> tuple[Scenario, Result]:
    """A scenario, and its priced result with the whole run, as the page computes them."""
    scenario = moesim.load(HOME, *overrides)
    plain = without_prices(scenario)
    result = moesim.simulate(plain.model_copy(update={"run": type(plain.run)(tokens=plain.run.tokens)}))
    report = predictions.run_report(plain, result.step.time_s)
    return scenario, repriced(
        result.model_copy(update={"run": result.run.model_copy(update={"report": report})}), scenario
    )


RUNS = {
    "no failures": (),
    "failures": FAILURES,
    "with spares": (*FAILURES, 'run.spares={"count": 4, "repair": "3 days"}'),
    "bought": (*FAILURES, "run.price.buy=h800-bought"),
    "phases": ("run=deepseek-v3",),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_stated_formulas_give_the_figures_shown(name: str) -> None:
    scenario, result = predicted(*RUNS[name])
    report = result.run.report
    assert report is not None
    found = run_derivations(scenario, result, report)
    assert set(found) == {"days", "goodput", "interruptions", "cost_usd", "energy_kwh", "co2_kg"}
    paths = [row.path for row in sources(scenario, result)]
    for figure, row in found.items():
        value = eval(row.formula, {"__builtins__": {}}, {i.symbol: i.value for i in row.inputs})
        shown = getattr(report, figure).predicted
        # A mean of shares is not quite the share of the means; all else is exact.
        assert value == pytest.approx(shown, rel=3e-3 if figure == "goodput" else 1e-9), figure
        for item in row.inputs:
            assert item.source and item.text
            if item.find != "run." or name != "no failures":
                assert any(item.find in path for path in paths), (figure, item.symbol)
    texts = explanations.texts(found, {"preset": HOME})
    assert "J7" in texts["cost_usd"] and "(evidence?" in texts["cost_usd"]


def test_a_cluster_without_price_and_site_has_no_formula_for_them() -> None:
    scenario, result = predicted("cluster.price_per_gpu_hour=null", "cluster.energy=null")
    assert result.run.report is not None
    assert set(run_derivations(scenario, result, result.run.report)) == {"days", "goodput", "interruptions"}
