"""The page Sweep: its form, its store over stops and uploads, what it refuses, and its answer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("streamlit", reason="the dashboard extra is not installed")

from app_sessions import HOME, JOB, metrics, press, session, until
from streamlit.testing import v1 as testing

import moesim
from moesim.app import jobs, state, sweeps, uploads, visitors
from moesim.app.tray import tray
from moesim.hwmodels.errors import InputError
from moesim.simulator.studies.store import Store


@pytest.fixture(autouse=True)
def visitor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """One visitor with an empty folder on the server."""
    token = visitors.issued()
    monkeypatch.setattr(visitors, "_cookies", lambda: [token])
    monkeypatch.setattr(uploads, "folder", lambda: tmp_path)
    yield visitors.of(token)
    for everybody in list(tray._entries):
        for entry in tray.of(everybody):
            tray.close(everybody, entry.number)


def opened(values: str = "8,20", *changes: str) -> testing.AppTest:
    return session("sweep", *JOB, *changes, fields=[f'sweep.1.communication.sms="{values}"'])


def finished(app: testing.AppTest) -> testing.AppTest:
    press(app, "start sweep")
    until(app, lambda page: metrics(page).get("To compute") == "0")
    return app


def store() -> Path:
    (found,) = (uploads.folder() / "sweeps").glob("*.sqlite")
    return found


@pytest.mark.long
def test_a_link_says_what_a_sweep_would_take_and_does_not_start_it(visitor: str) -> None:
    app = opened()
    assert not app.exception
    assert metrics(app) == {"Points": "2", "Known": "0", "Refused": "0", "To compute": "2"}
    assert any("s a point, timed on 2 of them" in caption.value for caption in app.caption)
    assert tray.of(visitor) == []
    assert not list((uploads.folder() / "sweeps").glob("*.sqlite"))


@pytest.mark.long
def test_a_sweep_lists_illegal_points_and_shows_its_best_which_opens_as_the_scenario() -> None:
    app = finished(opened("8,20,500"))
    assert metrics(app) == {"Points": "3", "Known": "2", "Refused": "1", "To compute": "0"}
    table = app.dataframe[0].value
    home = moesim.load(HOME, *JOB)
    steps = {sms: moesim.simulate(home.replace(**{"communication.sms": sms})).step.time_s for sms in (8, 20)}
    ranked = sorted(steps, key=lambda sms: steps[sms])
    assert list(table["communication.sms"]) == [*ranked, 500] and "500" in str(table["reason"][2])
    assert list(table["place"])[:2] == [1, 2] and table["place"].isna()[2], "a refused point has no place"
    assert table["step time (s)"][0] == pytest.approx(steps[ranked[0]])
    until(app, lambda page: any("P10 to P90" in m.value for m in page.markdown))
    (text,) = (m.value for m in app.markdown if m.value.startswith("Best:"))
    assert f"communication.sms = {ranked[0]}" in text
    assert " s to " in app.dataframe[0].value["step time (s), P10 to P90"][0]
    app.button(key="open sweep best").click().run()
    assert f"communication.sms={ranked[0]}" in app.query_params["set"]


@pytest.mark.long
def test_known_points_are_free_for_a_wider_sweep_and_for_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finished(opened())
    app = opened("8,20,24")
    assert metrics(app) == {"Points": "3", "Known": "2", "Refused": "0", "To compute": "1"}
    assert app.button(key="start sweep").label == "Continue"
    finished(app)
    with Store(store()) as kept:
        assert kept.count() == 3
    token = visitors.issued()
    monkeypatch.setattr(visitors, "_cookies", lambda: [token])
    assert metrics(opened())["Known"] == "0"


@pytest.mark.long
def test_a_stopped_sweep_keeps_its_points_and_goes_on(visitor: str) -> None:
    app = opened("4..28:2")
    press(app, "start sweep")
    until(app, lambda page: bool(list((uploads.folder() / "sweeps").glob("*.sqlite"))))
    (entry,) = tray.of(visitor)
    assert entry.origin.title == "Sweep of sms"
    until(app, lambda page: (entry.progress.share or 0.0) > 0.0 or not entry.is_open)
    tray.stop(entry.visitor, entry.number)
    app = opened("4..28:2")
    assert int(metrics(app)["Known"]) > 0
    if metrics(app)["To compute"] != "0":
        finished(app)
    assert metrics(app)["Known"] == "13"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ("1..2000", "2,000 points"),
        ("8,,9", "empty part"),
        ("/etc/passwd", "path of a file"),
        ("{a: /etc/passwd}", "path of a file"),
    ],
)
def test_too_much_or_forbidden_is_refused_in_place(values: str, says: str) -> None:
    app = opened(values)
    assert not app.exception
    assert any(says in error.value.replace("\\", "") for error in app.error), [e.value for e in app.error]
    assert app.text_input(key="sweep values 1 communication.sms").value == values, "the form stays"
    assert not any(button.key == "start sweep" for button in app.button)


def test_a_sweep_that_would_take_too_long_is_refused_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps, "MOST_S", 0.001)
    app = opened()
    assert any("more than the 0 s" in error.value for error in app.error)
    assert not any(button.key == "start sweep" for button in app.button)


def test_a_key_with_markup_is_no_key() -> None:
    app = opened()
    app.selectbox(key="sweep key 1").set_value("another key").run()
    app.text_input(key="sweep name 1").set_value("![x](http://host/p.png)").run()
    app.text_input(key="sweep values 1 another key").set_value("1").run()
    assert any("is no key" in error.value and "\\!" not in error.value for error in app.error)
    assert not app.exception


def test_a_store_is_taken_over_and_a_hostile_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeps, "read_below", lambda folder: None)
    job, texts, told = moesim.load(HOME, *JOB), {"communication.sms": "8,20"}, []
    sweeps.swept("", job, texts, tmp_path / "swept.sqlite", lambda share, text: told.append(share))
    assert told[-1] == 1.0
    data = sweeps.contents(tmp_path / "swept.sqlite")
    with Store(tmp_path / "copy.sqlite", durable=False) as other:
        assert other.count() == 0
    taken = sweeps.taken_over(data, tmp_path / "copy.sqlite")
    assert (taken.new, taken.known, taken.damaged) == (2, 0, 0)
    with pytest.raises(InputError) as refused:
        sweeps.taken_over(b"<script>" * 1000, tmp_path / "copy.sqlite")
    assert str(tmp_path) not in str(refused.value).replace(str(tmp_path / "copy.sqlite"), "")
    assert not list(tmp_path.glob("*.upload"))


def test_stores_of_all_visitors_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps, "ALL_BYTES", 2500)
    paths = [tmp_path / f"{number}.sqlite" for number in range(4)]
    for age, path in enumerate(reversed(paths)):
        path.write_bytes(b"x" * 1000)
        os.utime(path, (1e9 - age, 1e9 - age))  # files written at once may have the same time
    sweeps.make_room(paths[0])
    assert paths[0].exists() and not paths[1].exists() and not paths[2].exists() and paths[3].exists()


@pytest.mark.long
def test_a_sweep_with_two_keys_is_a_map_and_with_three_a_slice_of_one() -> None:
    app = opened()
    app.selectbox(key="sweep key 2").set_value("parallel.microbatch").run()
    app.text_input(key="sweep values 2 parallel.microbatch").set_value("1,2").run()
    finished(app)
    assert len(app.dataframe[0].value) == 4
    app.selectbox(key="sweep key 3").set_value("precision").run()
    finished(app)
    assert len(app.dataframe[0].value) == 8 and not app.exception
    assert jobs.known(f"result/{state.cache_key(moesim.load(HOME, *JOB))}") is False
