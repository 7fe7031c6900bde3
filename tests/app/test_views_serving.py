"""The pages Serving and Serving sizing: figures, intervals, requests, refusals, and adopting a plan."""

from __future__ import annotations

import json
import struct

import pytest

pytest.importorskip("streamlit", reason="the dashboard extra is not installed")

from app_sessions import address, metrics, press, session, table, until, words

import moesim
from moesim.app import serving_jobs, state, uploads
from moesim.app.charts import serving as charts
from moesim.app.components.timeline.packing import packed_lives
from moesim.app.pages import SERVED_HOME
from moesim.app.views import serving as page
from moesim.hwmodels.errors import InputError
from moesim.simulator.serving.trace import LifePhase

PRESET = "serve-qwen3-30b-a3b-h100"
FEW = "serving.load.requests=60"


def test_the_page_shows_what_the_command_line_computes() -> None:
    app = session("serving", preset=PRESET, set=[FEW])
    until(app, lambda shown: bool(shown.metric) and "being computed" not in words(shown))
    result = moesim.serve(PRESET, FEW)
    shown = metrics(app)
    assert shown["Output tokens/s/GPU"] == f"{result.output_tokens_per_s_per_gpu:,.0f}"
    assert shown["Goodput"].startswith(f"{result.goodput.requests_per_s:.3g}" if result.goodput else "-")
    assert shown["TPOT, all tokens"] and shown["J per output token"] and shown["$ per M tokens"][0] == "$"
    assert (
        sum(caption.value.count("80 %: ") for caption in app.caption) >= 8
    )  # an interval a figure, and the step's
    times = table(app, "P90")
    assert (
        list(times["latency"])[:2] == ["TTFT", "TPOT, by request"]
        and "to" in times["80 % interval of P90"][0]
    )
    parts = table(app, "entries and assumptions")
    assert {"attention", "linear", "experts", "host"} <= set(parts["kind"])
    assert all(parts["entries and assumptions"].iloc[:5])
    app.number_input(key="input serving.replicas").set_value(2).run()
    assert "serving.replicas=2" in address(app)["set"]
    app.number_input(key="input serving.ep").set_value(3).run()  # which does not divide one GPU
    assert not app.exception and any("ep=3 does not divide" in error.value for error in app.error)
    assert app.number_input(key="input serving.ep").value == 3


def test_a_training_scenario_is_served_on_the_fewest_gpus_that_hold_it() -> None:
    app = session("serving", "name=x")
    assert "does not describe serving" in words(app) and app.button(key=f"serve {PRESET}")
    press(app, "serve own")
    scenario = state.build(address(app)["preset"][0], tuple(address(app)["set"]))
    assert scenario.serving is not None and scenario.serving.tp == 16 and scenario.trains


def test_too_large_a_load_is_refused_with_the_limit() -> None:
    for text in ("serving.load.requests=30000", "serving.replicas=5000"):
        with pytest.raises(InputError, match=r"more than the .* that the dashboard serves"):
            serving_jobs.admitted(moesim.load(PRESET, text))


def test_a_load_that_never_drains_is_said_before_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("streamlit.error", lambda text, **more: said.append(text))
    page.infeasible(moesim.serve(PRESET, "serving.load.requests=300", "serving.load.rate_per_s=2000"))
    assert said and "never drains" in said[0] and "highest stable rate" in said[0]


def test_an_uploaded_log_is_checked_and_named_by_its_content() -> None:
    kept = uploads.accept("load", "day.csv", b"arrival_s,input_tokens,output_tokens\n0,100,5\n0.5,200,6\n")
    scenario = uploads.scenario_of(PRESET, [f"serving.load={json.dumps({'log': kept.token})}"])
    assert len(serving_jobs.admitted(scenario).requests) == 2
    with pytest.raises(InputError):
        uploads.accept("load", "day.csv", b"a,b\n1,2\n")
    with pytest.raises(InputError, match="path of a file"):
        uploads.scenario_of(PRESET, ['serving.load={"log": "day.jsonl"}'])


def test_a_scenario_that_is_only_served_is_opened_as_changes_of_one_that_is() -> None:
    own = moesim.load(PRESET, "model=gpt-oss-120b", "serving.tp=4", "serving.prefill={tp: 2}", "name=own")
    texts = state.overrides_of(own, SERVED_HOME)
    found = uploads.scenario_of(SERVED_HOME, list(texts))
    assert not found.trains and found.to_dict() == own.to_dict()


def test_a_row_a_request_in_its_phases() -> None:
    lives = {
        "request 0": (LifePhase("prefill", 0, 5), LifePhase("decode", 5, 50)),
        "request 1": (LifePhase("queue", 2, 10), LifePhase("prefill", 10, 30)),
    }
    packed = packed_lives(lives)
    (size,) = struct.unpack_from("<I", packed.data)
    header = json.loads(packed.data[4 : 4 + size])
    assert [(row["title"], row["count"]) for row in header["rows"]] == [("request 0", 2), ("request 1", 2)]
    assert header["end_ns"] == 50 and header["span"] == "whole load" and header["sides"] == [""]
    assert [name["name"] for name in header["names"]] == ["queue", "prefill", "transfer", "decode"]
    assert len({name["colour"] for name in header["names"]}) == 4


def test_the_bar_of_a_step_adds_up_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_jobs, "read_below", lambda folder: None)  # this process reads on
    step = serving_jobs.served(str(uploads.folder()), moesim.load(PRESET, FEW)).step
    assert step is not None
    chart = charts.decode_step(step.cost.parts)
    assert sum(bar.x[0] for bar in chart.data) == pytest.approx(1e3 * step.cost.seconds)


def test_a_plan_is_found_and_adopted_with_its_command_lines() -> None:
    fields = ["serving_sizing.most=8", 'serving_sizing.modes=["aggregated"]']
    app = session("serving_sizing", preset=PRESET, set=[FEW, "serving.load.rate_per_s=20"], form=fields)
    press(app, "start serving plan")
    until(app, lambda shown: bool(shown.metric))
    plans = table(app, "limited by")
    assert len(plans) and plans["GPUs"][0] <= 8 and all("to" in text for text in plans["TPOT, 80 %"])
    assert any("vllm serve" in code.value for code in app.code)
    assert app.button(key="adopt serving plan")
