"""The planner's page: what it searches, offers and refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("streamlit", reason="the dashboard extra is not installed")

from app_sessions import JOB, metrics, press, session, until
from streamlit.testing import v1 as testing

from moesim.app.views import planner
from moesim.simulator.predict.work_size import Band


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "TOP", 1)


def searched(*job: str, **choices: Any) -> testing.AppTest:
    """The page after a search of a small job over some schedules."""
    app = session("planner", *job)
    app.multiselect(key="schedules").set_value(["1f1b", "dualpipe"])
    app.multiselect(key="kept keys").set_value(["precision", "recompute", "microbatch", "zero_stage", "sms"])
    for key, value in choices.items():
        app.selectbox(key=key).set_value(value)
    app.run()
    press(app, "start plan")
    until(app, lambda page: "Plans considered" in metrics(page))
    return app


@pytest.mark.long
def test_the_planner_searches_offers_and_says_what_it_refused() -> None:
    app = searched(*JOB)
    assert int(metrics(app)["Plans considered"].replace(",", "")) > 10
    assert len(app.dataframe) >= 3
    ranked = app.dataframe[0].value
    assert (ranked["P10 to P90"] != "").tolist() == [False] + [True] * (len(ranked) - 1)
    assert sum(caption.value.startswith("P10 to P90") for caption in app.caption) == 3


@pytest.mark.long
def test_the_planner_searches_what_a_framework_can_run() -> None:
    small = ("cluster.nodes=16", "parallel.pp=8", "parallel.ep=8", "batch.sequences=512", "schedule=1f1b")
    job = (*small, "model=qwen3-30b-a3b", "precision=bf16", "recompute=full")
    captions = " ".join(caption.value for caption in searched(*job, framework="megatron").caption)
    assert "software.loss=compiled" in captions
    assert "schedule=dualpipe is not searched" in captions


def _row(place: int, label: str, margin: float, behind: Band | None) -> Any:
    return SimpleNamespace(
        place=place, behind=behind, label=label, time_s=10.0 * (1.0 + margin), source="simulated",
        margin=margin, memory_bytes=6e10, cost_usd=1e6,
        precision="bf16", recompute="none", zero_stage=1, sms=20, verdict="fits",
    )  # fmt: skip


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_only_distances_that_may_be_none_are_grey(theme: str) -> None:
    rows = [
        _row(1, "best", 0.0, None),
        _row(1, "perhaps behind", 0.004, Band(predicted=0.004, p10=-0.01, p50=0.004, p90=0.02)),
        _row(3, "surely behind", 0.05, Band(predicted=0.05, p10=0.03, p50=0.05, p90=0.07)),
    ]
    styled = planner.styled(rows, theme)._compute()
    shown = styled.data
    grey = {
        (shown["plan"][row], shown.columns[column]) for (row, column), style in styled.ctx.items() if style
    }
    assert grey == {("perhaps behind", "behind best"), ("perhaps behind", "P10 to P90")}
    colours = {value for style in styled.ctx.values() for _, value in style}
    assert colours == {planner.GREY[theme].removeprefix("color: ")}
    assert shown["P10 to P90"].tolist() == ["", "uncertain, -1.0% to +2.0%", "+3.0% to +7.0%"]
    assert shown["place"].tolist() == ["1=", "1=", "3"]
