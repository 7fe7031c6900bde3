"""The page Start: its headline, the way from a config.json to a search, and the scenarios it opens."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("streamlit", reason="streamlit is not installed")

from streamlit.testing import v1 as testing

import moesim
from moesim.app.tray import tray
from moesim.app.views import start

MAIN = str(Path(__file__).resolve().parents[2] / "app" / "main.py")
CONFIG = Path(__file__).resolve().parents[1] / "golden" / "models" / "qwen3-30b-a3b.json"


@pytest.fixture(autouse=True)
def _own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESIM_CACHE", str(tmp_path))


def opened() -> testing.AppTest:
    app = testing.AppTest.from_file(MAIN, default_timeout=120).run()
    assert not app.exception
    return app


@pytest.mark.long
def test_every_shipped_scenario_has_a_card_that_opens_it() -> None:
    app = opened()
    cards = {
        str(button.key).removeprefix("preset ")
        for button in app.button
        if str(button.key).startswith("preset ")
    }
    assert cards == set(moesim.presets())
    app.button(key="preset mixtral-8x7b-64xh100").click().run()
    assert not app.exception
    assert app.session_state["preset"] == "mixtral-8x7b-64xh100"


def test_three_steps_lead_from_a_config_json_to_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    app = opened()
    assert app.button(key="find a plan").disabled
    app.file_uploader(key="start upload").set_value(
        ("my-qwen.json", CONFIG.read_bytes(), "application/json")
    ).run()
    assert any("my-qwen (uploaded)" in option for option in app.selectbox(key="start model").options)
    app.number_input(key="start gpus").set_value(64).run()
    app.button(key="find a plan").click().run()
    assert not app.exception
    assert app.session_state["preset"].startswith("upload-")
    assert any("my-qwen" in mark.value and "64 x h100-sxm" in mark.value for mark in app.markdown)
    visitor = app.session_state["visitor"]
    entries = tray.of(visitor)
    assert [(entry.origin.title, entry.origin.page) for entry in entries] == [("Plan search", "planner")]
    tray.stop(visitor, entries[0].number)


def test_gpus_that_are_no_whole_nodes_are_said_in_place_with_the_nearest() -> None:
    app = opened()
    app.selectbox(key="start model").set_value("mixtral-8x7b").run()
    app.number_input(key="start gpus").set_value(60).run()
    app.button(key="find a plan").click().run()
    assert any("60 GPUs are no whole number of nodes" in error.value for error in app.error)
    assert {"nearest 56", "nearest 64"} <= {str(button.key) for button in app.button}
    assert any("2,048 x h800-sxm" in mark.value for mark in app.markdown), "the scenario stays"


def test_a_refused_config_json_is_said_and_the_form_stays() -> None:
    app = opened()
    app.file_uploader(key="start upload").set_value(("config.json", b"[1, 2]", "application/json")).run()
    assert not app.exception
    assert any("config.json" in error.value for error in app.error)
    assert app.button(key="find a plan").disabled


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(5, "just now"), (60, "1 minute ago"), (7_300, "2 hours ago"), (200_000, "2 days ago")],
)
def test_ages_are_in_words(seconds: float, words: str) -> None:
    assert start._ago(seconds) == words
