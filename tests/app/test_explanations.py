"""How each headline figure comes about (app/explanations.py): the stated formula gives the figure shown."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import pytest

import moesim
from moesim.app import explanations, predictions
from moesim.app.explanations import Derivation, derivations, in_words, run_derivations, sources
from moesim.simulator.predict.result import Result
from moesim.simulator.scenario import Scenario
from moesim.simulator.studies.reprice import repriced, without_prices

HOME = "deepseek-v3-2048xh800"


@lru_cache(maxsize=16)
def solved(preset: str) -> tuple[Scenario, Result]:
    scenario = moesim.load(preset)
    return scenario, moesim.simulate(scenario)


def evaluated(row: Derivation) -> float:
    """The formula as it is stated, with the inputs as they are stated."""
    found = eval(
        row.formula, {"__builtins__": {}, "ceil": math.ceil}, {i.symbol: i.value for i in row.inputs}
    )
    return float(found)


def shown(result: Result) -> dict[str, float | None]:
    step, run = result.step, result.run
    return {
        "step_time_s": step.time_s,
        "tokens_per_s_per_gpu": step.tokens_per_s_per_gpu,
        "mfu_causal": step.mfu_causal,
        "mfu_noncausal": step.mfu_noncausal,
        "days": run.days,
        "gpu_hours": run.gpu_hours,
        "cost_usd": run.cost_usd,
        "tokens_per_day": step.tokens_per_day,
        "memory_bytes": result.memory.total_bytes,
    }


@pytest.mark.long
@pytest.mark.parametrize("preset", moesim.presets())
def test_the_stated_formulas_give_the_figures_shown(preset: str) -> None:
    scenario, result = solved(preset)
    found, wanted = derivations(scenario, result), shown(result)
    paths = [row.path for row in sources(scenario, result)]
    assert len(paths) == len(set(paths))
    assert set(found) == {name for name, value in wanted.items() if value is not None}
    for name, row in found.items():
        assert evaluated(row) == pytest.approx(wanted[name], rel=1e-9), name
        assert "eq" in row.equations
        for item in row.inputs:  # each has a source, and a row of the page Evidence
            assert item.source and item.text and item.meaning
            assert any(item.find in path for path in paths), (name, item.symbol)


def test_a_wrong_input_is_noticed() -> None:
    scenario, result = solved(HOME)
    row = derivations(scenario, result)["mfu_causal"]
    symbols = {item.symbol: item.value for item in row.inputs}
    assert set(symbols) == {"φ", "T_tok", "t_step", "N", "peak"}
    assert symbols["φ"] == pytest.approx(249.8e9, rel=1e-3)  # docs/model/01-work.md
    symbols["peak"] *= 2.0
    assert eval(row.formula, {}, symbols) != pytest.approx(result.step.mfu_causal, rel=1e-3)


def test_dropped_rows_do_not_count_and_the_formula_says_so() -> None:
    scenario = moesim.load("mixtral-8x7b-64xh100", "routing.capacity.factor=1.0")
    result = moesim.simulate(scenario)
    row = derivations(scenario, result)["mfu_causal"]
    assert [item.symbol for item in row.inputs] == ["rate", "peak"]
    assert evaluated(row) == pytest.approx(result.step.mfu_causal, rel=1e-9)


def test_a_price_of_your_own_is_stated_by_you() -> None:
    scenario = moesim.load(HOME, "cluster.price_per_gpu_hour=$3/h", "batch.sequences=7680")
    result = moesim.simulate(scenario)
    found = derivations(scenario, result, ["cluster.price_per_gpu_hour", "batch.sequences"])
    inputs = {item.symbol: item for item in found["cost_usd"].inputs}
    assert inputs["price"].text == "$3" and "you" in inputs["price"].source
    assert inputs["T_tok"].source == "stated by you"
    assert evaluated(found["cost_usd"]) == pytest.approx(result.run.cost_usd)


def test_a_help_text_holds_formula_values_and_links_that_keep_the_scenario() -> None:
    scenario, result = solved(HOME)
    query: Mapping[str, list[str] | str] = {"preset": HOME, "set": ["communication.sms=20"]}
    text = explanations.text(derivations(scenario, result)["gpu_hours"], query)
    assert "⌈T_run / T_tok⌉ · t_step · N / 3600" in text and "eq. F6" in text
    assert "62\\.9 M" in text and "**2,048" in text and f"{result.step.time_s:.3f} s".split(".")[1] in text
    assert text.count("(evidence?preset=") == 4
    assert "set=communication.sms%3D20" in text and "evidence.find%3D%22run.tokens%22" in text


def test_words_of_a_link_are_not_markup_in_a_help_text() -> None:
    scenario = moesim.load(HOME).replace(name="![x](http://host/p.png)")
    text = explanations.text(derivations(scenario, solved(HOME)[1])["days"], {"preset": "![x](http://h/)"})
    assert "![x]" not in text and "http://h/)" not in text.replace("%29", ")").split("evidence?")[0]
    assert "\\!" in text or "!\\[x" in text


def test_formulas_read_as_people_write_them() -> None:
    assert in_words("ceil(T_run / T_tok) * t_step") == "⌈T_run / T_tok⌉ · t_step"


# -- the whole run ------------------------------------------------------------------------------------

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


@pytest.mark.long
@pytest.mark.parametrize("name", RUNS)
def test_the_formulas_of_a_whole_run_give_the_figures_shown(name: str) -> None:
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


@pytest.mark.long
def test_a_cluster_without_price_and_site_has_no_formula_for_them() -> None:
    scenario, result = predicted("cluster.price_per_gpu_hour=null", "cluster.energy=null")
    assert result.run.report is not None
    assert set(run_derivations(scenario, result, result.run.report)) == {"days", "goodput", "interruptions"}
