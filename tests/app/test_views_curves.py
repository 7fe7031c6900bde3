"""The page Curves: points that appear as they are computed, the present value, a value taken over."""

from __future__ import annotations

import pickle

import pytest

pytest.importorskip("streamlit", reason="the dashboard extra is not installed")

from app_sessions import HOME, session, until
from streamlit.testing import v1 as testing

import moesim
from moesim.app import curve_points, jobs, predictions
from moesim.app.charts.sweep import Mark, curve
from moesim.simulator.studies.curves import axes

SMALL = (
    "cluster.nodes=8",
    "parallel.pp=4",
    "parallel.ep=16",
    "batch.sequences=256",
    "stages={blocks: [moe*2, moe*2, moe*2, moe*2]}",
    "communication.sms=16",
)
"""Eight blocks on 64 H800: a point takes some milliseconds."""


def captions(app: testing.AppTest) -> str:
    return " ".join(caption.value for caption in app.caption)


def whole(app: testing.AppTest) -> bool:
    return "P10 to P90 of each point; the" in captions(app)


@pytest.mark.long
def test_the_page_is_drawn_before_anything_is_computed_and_every_point_comes() -> None:
    app = session("curves", *SMALL)
    assert len(app.get("plotly_chart")) == 8, "all charts are there from the beginning"
    assert not whole(app)
    until(app, whole)
    scenario = moesim.load(HOME, *SMALL)
    table = app.dataframe[0].value
    for axis in axes(scenario):
        rows = table[table["input"] == axis.label]
        assert list(rows["value"]) == list(axis.words)
        assert list(rows[""])[axis.own] == "now"
    sms = table[table["input"] == "Communication SMs"].set_index("value")
    expected = moesim.simulate(scenario.overridden("communication.sms=8"))
    assert sms.loc["8", "Step time"] == f"{expected.step.time_s:.3f} s"
    sure = moesim.simulate(scenario.overridden("communication.sms=8"), uncertainty=True).uncertainty
    assert sure is not None
    band = sure.bands["step_time_s"]
    assert sms.loc["8", "P10 to P90"] == f"{band.p10:.3f} s to {band.p90:.3f} s"
    assert not app.exception


@pytest.mark.long
def test_a_second_session_finds_the_points_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    first = session("curves", *SMALL)
    until(first, whole)
    asked: list[str] = []
    submit = jobs.submit

    def counting(key: str, *args: object, **options: object) -> object:
        asked.append(key)
        return submit(key, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(jobs, "submit", counting)
    other = session("curves", *SMALL)
    assert [key for key in asked if key.startswith("curve/")] == []
    assert len(other.dataframe[0].value) == len(first.dataframe[0].value)


def test_only_two_jobs_are_asked_for_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = moesim.load(HOME, *SMALL)
    asked: list[tuple[str, jobs.Job]] = []

    def submit(key: str, *_: object, **__: object) -> jobs.Job:
        asked.append((key, jobs.Job(key, 60.0)))
        return asked[-1][1]

    monkeypatch.setattr(jobs, "submit", submit)
    found = axes(scenario)
    run = curve_points.curve_run("never computed", scenario, found)
    assert run.total == sum(len(axis.values) for axis in found)
    for _ in range(3):
        run.step()
    assert len(asked) == 2
    first = run.parts[0]
    assert first.values[0] == found[0].values[found[0].own], "the present value is the first"
    assert run.parts[1].axis is found[1], "every chart has its middle before one has its ends"
    asked[0][1]._finish(pickle.dumps(predictions.points(scenario, first.axis.name, first.values)), None)
    run.step()
    assert len(asked) == 3 and len(run.points) == len(first.places)
    run.stop()
    assert asked[1][1].cancelled and asked[2][1].cancelled


def test_a_job_that_failed_is_said_and_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = moesim.load(HOME, *SMALL)

    def submit(key: str, *_: object, **__: object) -> jobs.Job:
        job = jobs.Job(key, 60.0)
        job._finish(None, jobs.JobError("the computation took longer than its 600 s"))
        return job

    monkeypatch.setattr(jobs, "submit", submit)
    run = curve_points.curve_run("failing", scenario, axes(scenario)[:1])
    for _ in range(10):
        run.step()
    assert run.done and run.whole and not any(run.bands.values())
    assert {point.status for point in run.points.values()} == {"failed"}
    assert "600 s" in next(iter(run.points.values())).reason


def test_a_scenario_too_large_for_the_dashboard_is_a_point_with_the_reason() -> None:
    found = predictions.points(moesim.load(HOME), "batch", (15360.0 * 512,))
    assert found[0].status == "illegal" and "the dashboard" in found[0].reason


def marks() -> tuple[Mark, ...]:
    return (
        Mark(0, "2", None, "illegal", "parallel.ep=<3> does not divide", True),
        Mark(1, "4", 10.0, "10 s", "", True, (8.0, 13.0)),
        Mark(2, "8", 9.0, "9 s", "does not fit: 90 GiB", False, (8.5, 9.5)),
    )


def test_a_chart_marks_the_present_value_what_does_not_fit_and_what_is_illegal() -> None:
    chart = curve(marks(), ("2", "4", "8"), 1, "step time (s)")
    line, others, full, illegal, now = chart.data
    assert list(line.y) == [None, 10.0, 9.0], "an illegal value is a gap in the line"
    assert list(others.x) == []
    assert list(full.x) == [2] and "does not fit" in full.customdata[0][2]
    assert list(illegal.x) == [0] and "does not divide" in illegal.customdata[0][2]
    assert "<3>" not in illegal.customdata[0][2]
    assert list(full.error_y.array) == [0.5] and list(full.error_y.arrayminus) == [0.5]
    assert list(now.x) == [1] and list(now.error_y.array) == [3.0] and list(now.error_y.arrayminus) == [2.0]
    assert list(chart.layout.xaxis.ticktext) == ["2", "4", "8"]


def test_ticks_leave_out_a_unit_that_all_share() -> None:
    chart = curve(marks(), ("25 GB/s", "50 GB/s", "100 GB/s"), 1, "s")
    assert list(chart.layout.xaxis.ticktext) == ["25", "50", "100"]
