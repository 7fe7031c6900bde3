"""The choice of a model on the page Scenario: search, facts of the choice, and how an upload was read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("streamlit", reason="the dashboard extra is not installed")

from app_sessions import session, table
from streamlit.testing.v1 import AppTest

import moesim
from moesim.simulator.model.catalogue import shipped_models

GOLDEN = Path(__file__).parents[1] / "golden" / "models"


def captions(app: AppTest) -> str:
    return "\n".join(caption.value for caption in app.caption)


def test_the_chosen_model_is_described() -> None:
    text = captions(session("scenario", "batch.sequences=4096"))
    for fact in ("671 B parameters", "37.55 B activated", "61 layers", "61 mla", "8 of 256, 1 shared"):
        assert fact in text
    assert f"{len(shipped_models())} of {len(shipped_models())} shipped models" in text


def test_a_search_narrows_the_models_and_one_of_them_can_be_used() -> None:
    app = session("scenario", "batch.sequences=4096")
    app.text_input(key="model search").set_value("gqa qwen active<10B").run()
    found = app.selectbox(key="model found").options
    assert "qwen3-30b-a3b" in found
    assert not {"qwen3-235b-a22b", "deepseek-v3", "mixtral-8x7b"} & set(found)
    app.selectbox(key="model found").set_value("qwen3-30b-a3b").run()
    assert not app.exception
    assert app.selectbox(key="input model").value == "qwen3-30b-a3b"
    assert "30.53 B parameters" in captions(app)


def test_a_search_without_a_hit_says_so() -> None:
    app = session("scenario", "batch.sequences=4096")
    app.text_input(key="model search").set_value("nomodelhasthisname").run()
    assert not app.exception
    assert f"0 of {len(shipped_models())} shipped models" in captions(app)


def test_an_upload_shows_how_its_keys_were_read() -> None:
    app = session("scenario", "batch.sequences=4096")
    data = json.loads((GOLDEN / "qwen3-30b-a3b.json").read_text("utf-8"))
    data["a_key_of_nobody"] = 1
    file = ("my-qwen.json", json.dumps(data).encode(), "application/json")
    app.file_uploader(key="upload model").set_value(file).run()
    assert not app.exception
    shown = "\n".join(markdown.value for markdown in app.markdown)
    assert "a_key_of_nobody" in shown and "Ignored, as it affects neither time nor memory" in shown
    read = next(frame.value for frame in app.dataframe if "as" in frame.value.columns)
    assert "num_experts_per_tok" in set(read["key"])
    app.selectbox(key="input model").set_value("deepseek-v3").run()
    assert not any("as" in frame.value.columns for frame in app.dataframe)


@pytest.mark.long
def test_a_preset_of_few_lines_shows_its_defaults_and_chooses_them_anew() -> None:
    few = {"preset": ["mixtral-8x7b-64xh100"], "set": ["batch.sequences=128"]}
    app = session("scenario", **few)
    assert "deepseek-v3-1024xmi300x (published)" in app.selectbox(key="input preset").options
    assert app.selectbox(key="input profile").value == "h100-layers"
    assert app.selectbox(key="input cluster").value == "64xh100-sxm"
    result = session("result", **few)
    count = len(moesim.simulate("mixtral-8x7b-64xh100", "batch.sequences=128").defaults)
    assert any(f"{count} values that the scenario leaves to rules" in part.label for part in result.expander)
    assert "routing.expert_load_cv" in list(table(result, "why")["key"])
    app.selectbox(key="input cluster").set_value("mi300x-2048").run()
    assert app.selectbox(key="input profile").value == "generic-roofline"
    assert not any("profile" in text for text in app.query_params["set"])
