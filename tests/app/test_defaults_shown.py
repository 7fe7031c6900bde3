"""A preset that leaves keys out: the dashboard shows what rules chose, and chooses anew."""

from __future__ import annotations

import pytest

pytest.importorskip("streamlit", reason="the dashboard extra is not installed")

from streamlit.testing import v1 as testing


def page(name: str) -> testing.AppTest:
    """A visitor who opens one page of a small step of the preset."""
    script = f"""
from moesim.app import state, widgets
from moesim.app.views import {name}
state.synchronise()
widgets.guard({name}.show)
state.publish()
"""
    app = testing.AppTest.from_string(script, default_timeout=120)
    app.query_params["preset"], app.query_params["set"] = "mixtral-8x7b-64xh100", ["batch.sequences=128"]
    return app.run()


def test_a_preset_of_few_lines_shows_its_defaults_and_chooses_them_anew() -> None:
    app = page("scenario")
    assert "deepseek-v3-1024xmi300x (published)" in app.selectbox(key="input preset").options
    assert app.selectbox(key="input profile").value == "h100-layers"
    assert app.selectbox(key="input cluster").value == "64xh100-sxm"
    app.selectbox(key="input cluster").set_value("mi300x-2048").run()
    assert app.selectbox(key="input profile").value == "generic-roofline"
    assert not any("profile" in text for text in app.query_params["set"])
    result = page("result")
    assert not result.exception
    assert "Defaults: 10 keys that nobody stated" in [part.label for part in result.expander]
    rows = next(frame.value for frame in result.dataframe if "why" in frame.value)
    assert "routing.expert_load_cv" in list(rows["key"])
