"""The planner's page: what it searches, offers and refuses."""

from __future__ import annotations

import pytest

pytest.importorskip("streamlit", reason="the dashboard extra is not installed")

from app_sessions import metrics, session, until


def test_the_planner_searches_offers_and_says_what_it_refused() -> None:
    small = ("cluster.nodes=16", "parallel.pp=8", "parallel.ep=8", "batch.sequences=512", "schedule=1f1b")
    app = session("planner", *small, "model=qwen3-30b-a3b", "precision=bf16", "recompute=full")
    assert not app.exception
    app.multiselect(key="schedules").set_value(["1f1b", "dualpipe"])
    app.multiselect(key="kept keys").set_value(["precision", "recompute", "microbatch", "zero_stage", "sms"])
    app.run()
    app.button(key="start plan").click().run()
    until(app, lambda page: "Plans considered" in metrics(page) or bool(page.error))
    assert [error.value for error in app.error] == []
    assert int(metrics(app)["Plans considered"].replace(",", "")) > 100
    assert len(app.dataframe) >= 3
    until(app, lambda page: not any("how sure this is" in caption.value for caption in page.caption))
    ranked = app.dataframe[0].value
    assert (ranked["P10 to P90"] != "").tolist() == [False] + [True] * (len(ranked) - 1)
    assert sum(caption.value.startswith("P10 to P90") for caption in app.caption) == 3


def test_the_planner_searches_what_a_framework_can_run() -> None:
    small = ("cluster.nodes=16", "parallel.pp=8", "parallel.ep=8", "batch.sequences=512", "schedule=1f1b")
    app = session("planner", *small, "model=qwen3-30b-a3b", "precision=bf16", "recompute=full")
    app.multiselect(key="schedules").set_value(["1f1b", "dualpipe"])
    app.multiselect(key="kept keys").set_value(["precision", "recompute", "microbatch", "zero_stage", "sms"])
    app.selectbox(key="framework").set_value("megatron").run()
    app.button(key="start plan").click().run()
    until(app, lambda page: "Plans considered" in metrics(page) or bool(page.error))
    captions = " ".join(caption.value for caption in app.caption)
    assert "software.loss=compiled" in captions
    assert "schedule=dualpipe is not searched" in captions
