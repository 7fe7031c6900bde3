"""The page Hardware: the same job planned on several clusters, in one table."""

from __future__ import annotations

import json
import re

import pytest

pytest.importorskip("streamlit", reason="the dashboard extra is not installed")

from app_sessions import HOME, JOB, html_of, press, session, until
from streamlit.testing import v1 as testing

import moesim
from moesim.app import jobs
from moesim.app.views import hardware
from moesim.hwmodels.price import RentPrice
from moesim.simulator.planner.hardware import ClusterRow, HardwareComparison, hardware_comparison
from moesim.simulator.predict.work_size import Band
from moesim.simulator.scenario.inputs import inputs_of


def opened(*fields: str) -> testing.AppTest:
    return session("hardware", *JOB, fields=fields)


def planned(app: testing.AppTest) -> bool:
    return not any(button.label == "Stop" for button in app.button) and 'class="figures"' in html_of(app)


@pytest.mark.long
def test_clusters_are_planned_on_request_and_compared_in_one_table() -> None:
    app = opened()
    assert [info.value for info in app.info] == ["Choose at least two clusters."]
    app.multiselect(key="hardware clusters").set_value(["h100-1024", "b200-1024", "tpu-v5p-2048-slice"]).run()
    assert not app.get("html"), "nothing is computed before it is asked for"
    press(app, "hardware compare")
    until(app, planned)
    found = html_of(app)
    assert found.count('<th scope="col"') == 4
    assert "uncertain (" in found and 'class="better"' in found
    assert "are not a whole number of nodes" in found
    job, names = moesim.load(HOME, *JOB), ("h100-1024", "b200-1024")
    question = hardware.Question(job, names, dict.fromkeys(names, 16), {}, "narrow")
    plans = [jobs.cache.get(question.key(name)) for name in names]
    expected = hardware_comparison(job, plans, "as stated")
    for row in expected.clusters:
        step = row.figures["step_time_s"]
        assert f"{step.predicted:.3f} s" in found
        assert f"{step.p10:.3f} s to {step.p90:.3f} s" in found
        assert str(row.plan) in found
    assert [b.key for b in app.button if str(b.key).startswith("hardware open")] == [
        "hardware open h100-1024",
        "hardware open b200-1024",
    ]
    press(app, "hardware open b200-1024")
    current = app.query_params["set"]
    assert any("b200-1024" in text for text in current), current
    assert not app.exception


@pytest.mark.long
def test_other_terms_need_no_other_search() -> None:
    app = opened('hardware.clusters=["h100-1024","b200-1024"]')
    if not planned(app):
        press(app, "hardware compare")
        until(app, planned)
    app.selectbox(key="hardware payment").set_value("purchase").run()
    assert planned(app)
    assert "no purchase of b200-sxm is known" in html_of(app)
    assert "bought: " in html_of(app)


@pytest.mark.long
def test_a_budget_sets_the_numbers_of_gpus_and_says_who_has_no_price() -> None:
    names = ["h100-1024", "b200-1024", "tpu-v5p-2048-slice"]
    app = opened(
        f"hardware.clusters={json.dumps(names, separators=(',', ':'))}",
        'hardware.size="same dollars an hour"',
    )
    assert app.number_input[0].value == 40.0, "what the scenario's own cluster costs"
    press(app, "hardware compare")
    until(app, planned)
    found = re.sub(r"<[^>]+>", " ", html_of(app))
    assert "16 h100-sxm" in found and "8 b200-sxm" in found
    assert "no price of tpu-v5p is known" in found


def test_fields_of_a_link_that_are_illegal_are_their_defaults() -> None:
    app = opened(
        'hardware.clusters=["<b>"]', 'hardware.size="huge"', "hardware.gpus=1e99", "hardware.payment=7"
    )
    assert not app.exception and not app.error
    assert app.multiselect(key="hardware clusters").value == ["h100-1024"]
    assert app.selectbox(key="hardware size").value == "same number of GPUs"


def band(value: float, low: float, high: float) -> Band:
    return Band(predicted=value, p10=low, p50=value, p90=high)


def row(name: str, **more: object) -> ClusterRow:
    return ClusterRow.model_validate(
        {"cluster": name, "accelerator": "h20", "n_gpus": 8, "nodes": 1, "search": "narrow", **more}
    )


def test_a_table_escapes_what_it_shows_mutes_a_roofline_and_greys_what_is_uncertain() -> None:
    figures = {"days": band(10.0, 9.0, 11.0)}
    price = RentPrice(value=2.0, kind="assumed", source="<script>alert(1)</script>", date="2026-01")
    first = row("a<b>", plan="TP1", confidence="measured", figures=figures, price=price, considered=5)
    sure = row(
        "b", plan="TP1", confidence="peak-only", figures=figures, differences={"days": band(-2.0, -3.0, -1.0)}
    )
    unsure = row(
        "c", plan="TP1", confidence="published", figures=figures, differences={"days": band(-1.0, -3.0, 1.0)}
    )
    found = hardware.text(
        HardwareComparison(
            scenario="s",
            inputs=inputs_of(moesim.load(HOME)),
            payment="as stated",
            clusters=(first, sure, unsure),
        )
    )
    assert "a&lt;b&gt;" in found and "<script>" not in found
    assert "class=roofline" in found and ">roofline</span>" in found
    assert '<small class="better">-20% (-30% to -10%)</small>' in found
    assert "uncertain (-30% to +10%)</small>" in found
