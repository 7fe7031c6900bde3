"""The pages Run & cost, Calibration and Evidence, without a browser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("streamlit", reason="the dashboard extra is not installed")

from app_sessions import metrics, session, table, words
from streamlit.testing.v1 import AppTest

import moesim
from moesim.app import jobs, pages, predictions, uploads
from moesim.app.tray import tray
from moesim.app.views import evidence as page
from moesim.hwmodels.calibration import PROFILE_DIRECTORY, list_profiles
from moesim.simulator.scoring.published import Row
from moesim.simulator.scoring.published_collectives import CollectiveRow
from moesim.simulator.scoring.scoreboard import open_rows
from moesim.simulator.scoring.scoreboard.rows import kept_board


def metric(app: AppTest, label: str) -> str:
    return metrics(app)[label]


def cost_of(app: AppTest) -> float:
    return float(table(app, "cost ($)")["cost ($)"].sum())


def box(app: AppTest, kind: str, label: str) -> Any:
    return next(widget for widget in getattr(app, kind) if widget.label == label)


# -- run & cost -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_page() -> AppTest:
    return session("run_cost", "run.failures=none")


@pytest.mark.long
def test_a_failure_rate_brings_what_it_needs_and_costs_days(run_page: AppTest) -> None:
    before = float(metric(run_page, "Days, whole run"))
    assert "No failures are modelled" in words(run_page) and not run_page.error
    box(run_page, "selectbox", "Failure rate from").select("llama3-16k-h100").run()
    assert not run_page.exception and not run_page.error, words(run_page)
    assert float(metric(run_page, "Days, whole run")) > before
    assert float(metric(run_page, "Goodput, whole run").rstrip("%")) < 100.0
    assert "P10" in words(run_page) and "Best interval" in words(run_page)
    box(run_page, "selectbox", "Failure rate from").select("none").run()
    box(run_page, "selectbox", "Checkpoint storage").select("none").run()
    assert not run_page.error and float(metric(run_page, "Days, whole run")) == before


@pytest.mark.long
def test_failures_assumed_by_rule_are_shown_and_can_be_changed() -> None:
    page = session("run_cost")
    assert box(page, "selectbox", "Failure rate from").value == "llama3-16k-h100"
    assert "Assumed by rule: run.failures" in words(page).replace("\\", "")
    assumed = float(metric(page, "Days, whole run"))
    box(page, "selectbox", "Checkpoint storage").select("bloom-jean-zay").run()  # slower: more days
    assert not page.error and not page.exception, words(page)
    assert float(metric(page, "Days, whole run")) > assumed
    assert "Assumed by rule" not in words(page), "all of it is part of the scenario now"


def test_another_price_changes_the_cost_and_simulates_nothing(
    run_page: AppTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    cost = cost_of(run_page)

    runs = jobs._run

    def no_simulation(job: jobs.Job, *arguments: Any) -> Any:
        assert job.key.startswith("scenario/"), "a price made a simulation start"
        return runs(job, *arguments)

    monkeypatch.setattr(jobs, "_run", no_simulation)
    slider = box(run_page, "slider", "US dollars per GPU-hour")
    slider.set_value(slider.value * 2).run()
    assert not run_page.exception and not run_page.error, words(run_page)
    assert cost_of(run_page) == pytest.approx(2 * cost, rel=1e-4)


def test_one_label_is_one_statistic_on_every_page_and_a_price_of_ones_own_is_the_visitors() -> None:
    price = "cluster.price_per_gpu_hour=$3/h"
    result, run = session("result", price), session("run_cost", price, "run.failures=none")
    cost, days = metric(run, "Cost, whole run"), metric(run, "Days, whole run")
    assert metric(result, "Cost") == cost and metric(result, "Duration") == f"{days} days"
    assert cost_of(run) == pytest.approx(moesim.simulate(pages.HOME, price).run.cost_usd, rel=1e-6)
    assert re.search(r"P10 .* M, P50 .* M, P90 .* M", words(run))  # the others are named
    said = words(run).replace("\\", "")  # as Markdown shows it
    assert "rented at $3/h (undated, stated by you)" in said and "arXiv" not in said


@pytest.mark.long
def test_a_plan_that_does_not_fit_is_said_before_any_price() -> None:
    app = session("run_cost", "recompute=none", "run.failures=none")
    kinds = [type(element).__name__ for element in app.main if type(element).__name__ in ("Error", "Metric")]
    assert "does not fit" in app.error[0].value and "GiB" in app.error[0].value
    assert any("of a plan that does not fit" in caption.value for caption in app.caption)
    assert kinds[0] == "Error"


@pytest.mark.long
def test_tokens_are_entered_in_trillions(run_page: AppTest) -> None:
    tokens = box(run_page, "number_input", "Tokens of the main phase (T: 10¹²)")
    assert tokens.value == 14.8 and tokens.proto.format == "%g"
    tokens.set_value(2.5).run()
    assert "run.tokens=2500000000000" in run_page.session_state["overrides"]
    box(run_page, "number_input", "Tokens of the main phase (T: 10¹²)").set_value(14.8).run()
    assert not any("tokens" in text for text in run_page.session_state["overrides"])


def test_only_purchases_of_the_own_accelerator_are_offered(run_page: AppTest) -> None:
    ways = box(run_page, "radio", "Pay").options
    assert [way for way in ways if way.startswith("buy")] == ["buy: h800-bought"]


def test_a_run_that_never_ends_is_said_in_one_sentence() -> None:
    app = session(
        "run_cost",
        "run.failures={interruptions: 100000 /node-day}",
        "run.restart=megascale",
        "run.checkpoint={interval: 4 h, storage: bloom-jean-zay}",
    )
    assert len(app.error) == 1 and "\n" not in app.error[0].value and "Traceback" not in app.error[0].value


# -- calibration ------------------------------------------------------------------------------------------


def test_the_profile_of_the_scenario_is_shown_with_its_sources() -> None:
    app = session("calibration")
    assert "**h800-trace**" in words(app) and len(app.get("plotly_chart")) == 3
    rows = table(app, "stated error")
    profile = uploads.profile_of("h800-trace")
    assert list(rows["entry"]) == [entry.id for entry in profile.entries()]
    assert list(rows["source"]) == [entry.source for entry in profile.entries()]


def test_two_profiles_are_compared() -> None:
    app = session("calibration")
    box(app, "selectbox", "Profile").select("h200-8gpu").run()
    box(app, "selectbox", "Compare with").select("h200-4gpu").run()
    assert not app.exception and "common entries changed" in words(app)
    rows = table(app, "median change")
    changed = [text for text in rows[""] if " changed: " in text]
    assert changed and all(f": {text}" in words(app) for text in changed)  # in words, by shape
    points = table(app, "change / error")
    assert list(points["change / error"]) == sorted(points["change / error"], reverse=True)
    beyond = sum(abs(points["change"]) > points["old error"] + points["new error"])
    assert f"{beyond} of {len(points)} shapes and points" in words(app) and "Holm" in words(app)
    app.checkbox(key="drift beyond").check().run()
    assert len(table(app, "change / error")) == beyond


@pytest.mark.long
def test_every_shipped_profile_can_be_shown() -> None:
    app = session("calibration")
    for name in list_profiles():
        box(app, "selectbox", "Profile").select(name).run()
        assert not app.exception and not app.error, (name, words(app))


def test_an_uploaded_profile_joins_the_list_and_the_scenario() -> None:
    app = session("calibration")
    data = (PROFILE_DIRECTORY / "h800-published.yaml").read_bytes()
    app.file_uploader[0].upload("mine.yaml", data).run()
    assert not app.exception and "mine.yaml is in the list" in words(app), words(app)
    token = uploads.accept("profile", "mine.yaml", data).token
    box(app, "selectbox", "Profile").select("mine.yaml").run()
    next(b for b in app.button if "Use this profile" in b.label).click().run()
    assert not app.exception and not app.error
    assert app.session_state["overrides"] == (f"profile={token}",)


@pytest.mark.parametrize("data", [b"", b"a: &a [1]\nb: *a\n"])
def test_a_hostile_profile_is_refused_and_the_page_stays(data: bytes) -> None:
    app = session("calibration")
    app.file_uploader[0].upload("evil.yaml", data).run()
    assert not app.exception
    assert len(app.error) == 1 and "evil.yaml" in app.error[0].value and "\n" not in app.error[0].value
    assert len(app.get("plotly_chart")) == 3


# -- evidence -----------------------------------------------------------------------------------------------


ROWS = (
    Row(id="a@p1", source="s1", quantity="step", unit="s", published=2.0, predicted=2.2, relative_error=0.1,
        used_for_calibration=False),
    Row(id="b@p2", source="s2", quantity="MFU", unit="1", published=0.4, predicted=0.4, relative_error=0.0,
        used_for_calibration=True),
    Row(id="c", source="=cmd()", quantity="dispatch", unit="GB/s", published=50.0, predicted=40.0,
        relative_error=-0.2, used_for_calibration=False),
)  # fmt: skip
COLLECTIVES = (
    CollectiveRow(id="r", use="scored", group="g", source="s", unit="s", measured=1e-3, predicted=2e-3,
                  relative_error=1.0, how="ring LL"),
)  # fmt: skip


def test_the_scoreboard_is_filtered_and_holds_every_error(monkeypatch: pytest.MonkeyPatch) -> None:
    board = predictions.Scoreboards(ROWS, COLLECTIVES)
    monkeypatch.setattr(
        jobs.cache, "get", lambda key, get=jobs.cache.get: board if key == page.KEY else get(key)
    )
    app = session("evidence", fields=['evidence.part="home"'])
    assert "2 of 3 figures" in words(app)
    rows = table(app, "predicted")
    assert list(rows["error"]) == ["-20.0%", "+10.0%"]  # the largest first
    assert list(rows["figure"]) == ["dispatch", "step, p1"] and list(rows["row"]) == ["c", "a@p1"]
    box(app, "checkbox", "Leave out what a profile was calibrated on").uncheck().run()
    assert "3 of 3 figures" in words(app)
    next(w for w in app.text_input if w.key == "score words").set_value("DISPATCH").run()
    assert "1 of 3 figures" in words(app) and not app.exception


def test_evidence_opens_on_its_headline() -> None:
    app = session("evidence")
    board, shown = kept_board(), {tile.label: tile.value for tile in app.metric}
    home = moesim.published(moesim.load(pages.HOME), moesim.simulate(pages.HOME))[0]
    assert home.quantity == "time per step"
    assert shown["Home case, time per step"] == f"{home.relative_error:+.1%}"
    every = board.named("all rows, complete")
    assert shown["Median error, published steps"] == f"{every.median_absolute_error:.1%}"
    assert shown["Inside the 80 % interval"] == f"{every.covered:.0%}"
    assert f"the table of {board.computed}" in words(app)  # and says so
    assert len(app.get("plotly_chart")) == 2
    rows = app.dataframe[0].value
    assert len(rows) == len(open_rows()) and rows["measurement"].str.contains(" on ").all()


def test_published_steps_are_found_by_words_and_by_a_link() -> None:
    app = session(
        "evidence", fields=['evidence.words="megatron bridge deepseek-v3"', 'evidence.model=["moe"]']
    )
    rows = app.dataframe[0].value
    assert 0 < len(rows) < 30 and rows["measurement"].str.startswith("deepseek-v3 on ").all()
    next(w for w in app.text_input if w.key == "step words").set_value("no such words").run()
    assert "0 of 543 published measurements" in words(app) and not app.exception
    wrong = session("evidence", fields=['evidence.words=["![x](http://h/p.png)"]', 'evidence.part="nothing"'])
    assert len(wrong.dataframe[0].value) == len(open_rows())  # illegal fields count as their defaults


def test_where_every_number_comes_from() -> None:
    app = session("evidence", fields=['evidence.part="numbers"'])
    rows = table(app, "number")
    assert (rows["source"].str.len() > 2).all() and len(rows) > 20
    assert {"model", "batch.sequences", "cluster.nodes", "run.tokens"} <= set(rows["number"])
    next(w for w in app.text_input if w.key == "number words").set_value("no such words").run()
    assert "0 of" in words(app) and not app.exception


def test_a_link_opens_evidence_at_a_number_and_says_who_stated_it() -> None:
    fields = ['evidence.part="numbers"', 'evidence.find="cluster.nodes"']
    app = session("evidence", "cluster.nodes=128", fields=fields)
    rows = table(app, "number")
    assert list(rows["number"]) == ["cluster.nodes"] and list(rows["value"]) == ["128"]
    assert list(rows["source"]) == ["stated by you"]


def test_the_scoreboard_is_computed_on_request_beside_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "KEY", "evidence/test")
    app = session("evidence", fields=['evidence.part="home"'])
    visitor = app.session_state["visitor"]
    assert tray.find(visitor, "evidence/test") is None
    assert any(b.label == "Compute the scoreboard" for b in app.button)
    app.button(key="start evidence").click().run()
    entry = tray.find(visitor, "evidence/test")
    assert not app.exception and entry is not None and entry.origin.title == "Scoreboard"
    tray.stop(visitor, entry.number)


def test_the_work_function_reports_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    def short_score(say: Any) -> list[Row]:
        for what in ("one", "two"):
            say(what)
        return list(ROWS)

    monkeypatch.setattr(predictions, "score", short_score)
    monkeypatch.setattr(predictions, "score_collectives", lambda: list(COLLECTIVES))
    said: list[tuple[float | None, str]] = []
    found = predictions.evidence(lambda share, text: said.append((share, text)))
    assert found.rows == ROWS and [text for _, text in said] == ["one", "two", "collectives"]
    shares = [share for share, _ in said if share is not None]
    assert shares == sorted(shares) and all(0.0 <= share <= 1.0 for share in shares)


def test_no_formula_of_the_library_is_copied_into_the_pages() -> None:
    """Prices, rates and unit factors live in the library; a page only divides for the eye."""
    for name in ("run_cost", "calibration", "evidence"):
        text = (Path(__file__).parents[2] / "app" / "views" / f"{name}.py").read_text("utf-8")
        assert " ** " not in text and "3600" not in text
