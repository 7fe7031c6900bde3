"""A visitor's own model, profile and cluster: named, adopted everywhere, saved whole; refusals that stay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("streamlit", reason="the dashboard extra is not installed")

from app_sessions import HOME, session
from streamlit.testing import v1 as testing
from typer.testing import CliRunner

import moesim
from moesim.app import exports, scenario_links, state, uploads
from moesim.cli import app as command_line
from moesim.hwmodels.calibration import PROFILE_DIRECTORY, load_profile
from moesim.hwmodels.errors import InputError
from moesim.simulator.scenario import Scenario, load_scenario

GOLDEN = Path(__file__).parents[1] / "golden" / "models"
SMALL = ("cluster.nodes=16", "parallel.pp=8", "parallel.ep=8", "batch.sequences=512", "schedule=1f1b")
QWEN = (*SMALL, "precision=bf16", "recompute=full")
PROFILE = PROFILE_DIRECTORY / "h800-published.yaml"


def link_of(app: testing.AppTest) -> list[str]:
    packed = app.query_params.get("packed")
    if packed:  # the uploaded files are in the link
        return list(scenario_links.unpack(packed if isinstance(packed, str) else packed[0])[1])
    texts = app.query_params.get("set", [])
    return [texts] if isinstance(texts, str) else list(texts)


def own_files() -> tuple[str, str]:
    """Tokens of an uploaded model and an uploaded profile."""
    model = uploads.accept("model", "my-qwen.json", (GOLDEN / "qwen3-30b-a3b.json").read_bytes())
    profile = uploads.accept("profile", "mine.yaml", PROFILE.read_bytes())
    return f"model={model.token}", f"profile={profile.token}"


def works(app: testing.AppTest) -> None:
    assert not app.exception
    assert [error.value for error in app.error] == []
    folder = str(uploads.folder())
    assert not any(folder in text for text in link_of(app)), "a path of the server is in the link"


# -- adopting ---------------------------------------------------------------------------------------


def test_a_plan_that_was_found_is_adopted_with_uploads() -> None:
    texts = json.dumps([*QWEN, *own_files()])
    script = f"""
from types import SimpleNamespace
from moesim.app import state, widgets
from moesim.app.views import planner
state.synchronise()
found = state.build({HOME!r}, {texts}).replace(parallel={{"pp": 4}})
row = SimpleNamespace(label="a plan", time_s=1.0, source="simulated", scenario=found)
widgets.guard(lambda: planner._offer(row, "ranked"))
state.publish()
"""
    app = testing.AppTest.from_string(script, default_timeout=120).run()
    app.button(key="open ranked").click().run()
    works(app)
    assert "parallel.pp=4" in link_of(app)
    assert state.build(HOME, tuple(link_of(app))).parallel.pp == 4


# -- names, titles and tokens -----------------------------------------------------------------------


@pytest.mark.long
def test_an_uploaded_model_gives_its_name_and_takes_deepseeks_tokens_away() -> None:
    app = session("scenario", *QWEN)
    data = (GOLDEN / "qwen3-30b-a3b.json").read_bytes()
    app.file_uploader(key="upload model").set_value(("my-qwen.json", data, "application/json")).run()
    works(app)
    assert app.selectbox(key="input model").options[0] == "my-qwen (uploaded)"
    texts = link_of(app)
    assert "name=my-qwen-128xh800-sxm" in texts
    scenario = state.build(HOME, tuple(texts))
    assert "DeepSeek" not in scenario.description
    assert scenario.run.tokens == 1e12  # nobody said how many: the rule's round figure
    assert any("my-qwen, trained on 1.00 T tokens (assumed" in caption.value for caption in app.caption)
    # The shipped model brings everything of the preset back.
    app.selectbox(key="input model").set_value("deepseek-v3").run()
    assert not any(text.startswith(("run", "model")) for text in link_of(app))


def test_a_config_json_is_called_like_its_family() -> None:
    kept = uploads.accept("model", "config.json", (GOLDEN / "qwen3-30b-a3b.json").read_bytes())
    assert uploads.name_of(kept.token) == "qwen3_moe"
    assert scenario_links.readable(f"model={kept.token}") == "model=qwen3_moe (uploaded)"


def test_what_stands_beside_the_pages_names_no_token() -> None:
    calls = "state.synchronise()\nscenario_header.show()\nstate.publish()"
    script = f"from moesim.app import state\nfrom moesim.app.views import scenario_header\n{calls}"
    app = testing.AppTest.from_string(script, default_timeout=60)
    app.query_params["preset"] = HOME
    app.query_params["set"] = [*own_files(), 'routing.load={"kind":"zipf","exponent":0.3}']
    app.run()
    shown = "\n".join([*(b.label for b in app.button), *(m.value for m in app.markdown)])
    assert "my-qwen (uploaded) ✕" in shown
    assert "upload-" not in shown
    assert "{" not in shown


@pytest.mark.long
def test_a_refusal_stays_until_the_next_upload() -> None:
    app = session("scenario", *QWEN)
    bad = json.dumps({"model_type": "gpt_of_nobody"}).encode()
    app.file_uploader(key="upload model").set_value(("strange.json", bad, "application/json")).run()
    for _ in range(2):
        assert any("gpt_of_nobody" in error.value for error in app.error)
        app.run()
    app.number_input(key="input communication.sms").set_value(8).run()
    assert any("strange.json" in error.value for error in app.error)
    data = (GOLDEN / "qwen3-30b-a3b.json").read_bytes()
    app.file_uploader(key="upload model").set_value(("my-qwen.json", data, "application/json")).run()
    assert not app.error


# -- saving -----------------------------------------------------------------------------------------


def test_a_saved_scenario_runs_on_the_command_line_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = state.build(HOME, (*QWEN, *own_files()))
    text, ending = exports.scenario_file(scenario)
    assert "upload-" not in text and str(uploads.folder()) not in text
    path = tmp_path / f"saved{ending}"
    path.write_text(text)
    monkeypatch.setattr(uploads, "folder", lambda: tmp_path / "another server")
    done = CliRunner().invoke(command_line, ["simulate", str(path), "--json"])
    assert done.exit_code == 0, done.output
    expected = moesim.simulate(HOME, *QWEN, f"profile={PROFILE}", f"model={GOLDEN / 'qwen3-30b-a3b.json'}")
    assert json.loads(done.stdout)["step"]["time_s"] == expected.step.time_s


def test_an_uploaded_cluster_is_written_into_the_saved_scenario(tmp_path: Path) -> None:
    edges = "\n".join(f"gpu:{i} switch:0 50GB/s 1us" for i in range(8))
    kept = uploads.accept("topology", "machine.txt", edges.encode(), like="hgx-h100")
    texts = [f"cluster={kept.token}", "profile=h100-layers"]
    scenario = uploads.scenario_of("deepseek-v3-trace-pair", texts)
    again = tmp_path / "saved.yaml"
    again.write_text(exports.scenario_yaml(scenario))
    assert load_scenario(str(again)).machine.topology().n_gpus == 8


def test_a_large_profile_is_saved_as_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(exports, "MAX_YAML_BYTES", 10_000)
    scenario = state.build(HOME, own_files())
    text, ending = exports.scenario_file(scenario)
    assert ending == ".json"
    (tmp_path / "saved.json").write_text(text)
    assert load_scenario(str(tmp_path / "saved.json")).calibration.entries()


@pytest.mark.long
def test_an_inline_profile_predicts_what_the_file_predicts() -> None:
    named = moesim.load(HOME, "profile=h800-published", "batch.sequences=4096")
    inside = named.replace(profile=load_profile("h800-published").model_dump(mode="json"))
    a, b = moesim.simulate(named), moesim.simulate(inside)
    assert a.step.time_s == b.step.time_s
    assert {r.path for r in a.provenance} == {r.path for r in b.provenance}


def test_a_profile_inside_an_uploaded_scenario_opens_no_file() -> None:
    data: dict[str, Any] = moesim.load(HOME).to_dict()
    data["profile"] = load_profile("h800-published").model_dump(mode="json", exclude_none=True)
    kept = uploads.accept("scenario", "mine.json", json.dumps(data).encode())
    assert isinstance(kept.content, Scenario)
    for wrong in ("../../etc/x.yaml", "unheard-of"):
        data["profile"]["include"] = [wrong]
        with pytest.raises(InputError, match="not a shipped profile"):
            uploads.accept("scenario", "mine.json", json.dumps(data).encode())
