"""Every page of the main part in a simulated browser session: what it shows, what it does, how it refuses."""

from __future__ import annotations

import json
import pickle
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("streamlit", reason="the dashboard extra is not installed")

from app_sessions import HOME, JOB, figures, html_of, metrics, press, session, table, until
from streamlit.testing import v1 as testing

import moesim
from moesim.app import jobs, long_work, predictions, server_command, uploads
from moesim.app.texts import money
from moesim.simulator.predict.work_size import EngineBands

MAIN = str(Path(__file__).resolve().parents[2] / "app" / "main.py")
SMALL = ("batch.sequences=4096",)
"""The home case with fewer micro-batches: quicker, and legal."""


def test_the_dashboard_opens_with_the_home_case_solved() -> None:
    app = testing.AppTest.from_file(MAIN, default_timeout=120).run()
    assert not app.exception
    expected = moesim.simulate(HOME)
    published = next(
        row for row in moesim.published(moesim.load(HOME), expected) if row.quantity == "time per step"
    )
    assert metrics(app) == {
        "Predicted step": f"{expected.step.time_s:.3f} s",
        "Published step": f"{published.published:.3f} s",
        "Error": f"{expected.step.time_s / published.published - 1.0:+.1%}",
    }
    assert any("at risk, 66.9 of 80.0 GiB" in text.value for text in app.markdown)


@pytest.mark.long
def test_no_click_on_a_download_is_lost_to_the_redraw_that_intervals_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A redraw forgets what would be made on request; files that are there already survive it."""

    def offered() -> dict[str, Any]:
        return {button.proto.label: button.proto for button in app.get("download_button")}

    with monkeypatch.context() as patch:
        patch.setattr(long_work, "value", lambda *_: None)  # the intervals are still being computed
        app = session("result", *SMALL)
        waiting = offered()
    assert [label for label, button in waiting.items() if button.disabled] == ["Trace (Perfetto)"]
    assert all(button.url for button in waiting.values() if not button.disabled)
    until(app, lambda _: not any(button.disabled for button in offered().values()))
    assert offered()["Trace (Perfetto)"].deferred_file_id


# -- Scenario ----------------------------------------------------------------------------------------


def test_changing_an_input_changes_the_number_and_the_address() -> None:
    app = session("scenario", *SMALL)
    before = metrics(app)["Step time"]
    app.number_input(key="input communication.sms").set_value(8).run()
    assert metrics(app)["Step time"] != before
    assert "communication.sms=8" in app.query_params["set"]
    app.number_input(key="input communication.sms").set_value(20).run()
    assert metrics(app)["Step time"] == before
    assert app.query_params["set"] == SMALL[0]  # the session writes a list of one as its text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("parallel.ep", "write key=value"),
        ("parallel.epp=3", "unknown key"),
        ("model=/etc/passwd.json", "file"),
        ("seed=[[[[", "not valid YAML"),
        ("../../secret", "no file of the server"),
    ],
)
def test_a_broken_link_is_one_sentence_and_a_way_back(text: str, says: str) -> None:
    app = session("scenario", text) if "=" in text or text[0] != "." else session("scenario", preset=text)
    assert any(says in error.value for error in app.error), [error.value for error in app.error]
    assert "Traceback" not in app.error[0].value
    press(app, "reset")
    assert not app.error
    assert "Step time" in metrics(app)


def test_the_size_that_an_upload_may_have_is_the_one_it_is_held_to() -> None:
    shown = {u.label: u.proto.max_upload_size_mb for u in session("scenario").file_uploader}
    kinds = {"Open a scenario": "scenario", "Use a model's": "model", "Use a calibration": "profile"}
    for label, size in shown.items():
        kind = next(kind for words, kind in kinds.items() if label.startswith(words))
        assert size * 10**6 == uploads.MAX_BYTES[kind]
    settings = tomllib.loads((Path(MAIN).parent / ".streamlit" / "config.toml").read_text("utf-8"))
    assert settings["server"]["maxUploadSize"] == server_command.MAX_UPLOAD_MB
    assert max(uploads.MAX_BYTES.values()) <= server_command.MAX_UPLOAD_MB * 10**6


# -- Result ------------------------------------------------------------------------------------------


def test_the_result_says_how_far_it_is_from_what_was_published() -> None:
    app = session("result")
    captions = [caption.value for caption in app.caption]
    assert any("from the published 19.926 s" in text for text in captions)
    assert any("from the published 38.9%" in text for text in captions)


def test_intervals_come_when_they_are_known() -> None:
    app = session("result", *JOB)
    bands = moesim.simulate(HOME, *JOB, uncertainty=True).uncertainty
    assert bands is not None
    days = bands.bands["days"]
    shown = f"{days.p10:.1f} days to {days.p90:.1f} days"
    until(app, lambda page: any(shown in caption.value for caption in page.caption))
    assert any("$" in text for text in metrics(app).values())
    assert app.button(key="start interval by engine").label == "Simulate 200 steps"
    kept = {name: jobs.cache.get(name) for name in list(jobs.cache._values) if name.startswith("interval/")}
    step = bands.bands["step_time_s"]
    keys = [name for name, one in kept.items() if one.uncertainty.bands["step_time_s"] == step]
    known = kept[keys[-1]]
    by_engine = EngineBands(
        bands=known.uncertainty.bands, draws=200, seed=0, first_order_mean=-0.0084, first_order_rms=0.0205
    )
    more = known.model_copy(
        update={"uncertainty": known.uncertainty.model_copy(update={"by_engine": by_engine})}
    )
    for key in keys:  # tests before this one may have kept others
        jobs.cache.put(key.replace("interval/", "interval by engine/"), pickle.dumps(more))
    app.run()
    shown = table(app, "simulated P90")
    assert list(shown["simulated P90"]) == list(shown["estimated P90"])
    assert "cost" in set(shown["figure"])
    assert any("-0.84% in the mean and 2.05% rms" in caption.value for caption in app.caption)


def test_the_interval_by_the_engine_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictions, "DRAWS", 20)
    small = moesim.load(HOME, *JOB)
    heard: list[tuple[float | None, str]] = []
    found = predictions.interval_by_engine(small, lambda share, text: heard.append((share, text)))
    assert found.uncertainty is not None
    assert found.uncertainty.by_engine is not None
    assert found.uncertainty.by_engine.draws == 20
    assert heard[-1] == (1.0, "20 of 20 engine runs")
    again = predictions.interval_by_engine(small, lambda share, text: heard.append((share, text)))
    assert again == found
    assert heard.count((1.0, "20 of 20 engine runs")) == 1, "the second one comes from the result cache"


def test_the_tornado_comes_when_asked_for() -> None:
    app = session("what_if", *JOB)
    press(app, "start tornado")
    until(app, lambda page: len(page.get("plotly_chart")) > 0)


def test_other_prices_do_not_simulate_again(monkeypatch: pytest.MonkeyPatch) -> None:
    session("result", *JOB)
    asked: list[str] = []
    submit = jobs.submit

    def counting(key: str, *args: object, **options: object) -> object:
        if jobs.cache.get(key) is None:
            asked.append(key)
        return submit(key, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(jobs, "submit", counting)
    app = session("result", *JOB, 'cluster.price_per_gpu_hour="$4/h"')
    assert [key for key in asked if key.startswith("result/")] == []
    expected = moesim.simulate(HOME, *JOB, 'cluster.price_per_gpu_hour="$4/h"')
    assert expected.run.cost_usd is not None
    assert metrics(app)["Cost"] == money(expected.run.cost_usd)


def test_a_part_of_a_model_has_no_throughput() -> None:
    app = session("result", preset="deepseek-v3-trace-pair")
    assert "Step time" in metrics(app) and "Cost" not in metrics(app)


# -- the other pages ---------------------------------------------------------------------------------


def test_compare_splits_the_difference_by_cause() -> None:
    app = session("compare", *JOB)
    app.query_params["preset"], app.query_params["set"] = HOME, [*JOB, "recompute=full"]
    app.query_params["with"] = [json.dumps([HOME, *JOB])]
    app.run()
    assert not app.exception
    a, b = (moesim.simulate(HOME, *JOB, *more) for more in ((), ("recompute=full",)))
    delta = b.step.time_s - a.step.time_s
    assert any(f"{delta:+.3f} s" in text.value for text in app.markdown)
    until(app, lambda page: f"{delta:+.3f} s (" in figures(page)["Step time"][1])
    assert len(figures(app)["Step time"]) == 2
    assert figures(app)["Step time"][0].startswith(f"{a.step.time_s:.3f} s")
    assert f'<small class="{"better" if delta < 0.0 else "worse"}">{delta:+.3f} s (' in html_of(app)
    assert app.query_params["with"]


@pytest.mark.long
def test_compare_says_what_two_scenarios_do_not_share() -> None:
    app = session("compare", *SMALL, "cluster.nodes=128", "profile=generic-roofline", "recompute=none")
    app.query_params["with"] = [json.dumps([HOME, *SMALL])]
    app.run()
    assert not app.exception
    said = " ".join(warning.value for warning in app.warning)
    assert "number of GPUs: A has 2,048, B has 1,024" in said
    assert "kind of profile: A has" in said and "(profile generic-roofline)" in said
    assert any(error.value.startswith("B does not fit") for error in app.error)
    until(app, lambda page: " s to " in figures(page)["Step time"][0], errors=1)
    cells = figures(app)
    assert cells["GPUs"] == ["2,048", "1,024"]
    assert [cell.split()[0] for cell in cells["Price of a GPU-hour"]] == ["$2/h", "$2/h"]
    assert [cell.split()[0] for cell in cells["Profile"]] == ["h800-trace", "generic-roofline"]
    assert [cell.split(" GiB")[0].rsplit(" ", 1)[0] for cell in cells["Memory"]] == [
        "at risk",
        "does not fit",
    ]
    assert {"Tokens per $", "Cost per B tokens", "GPU-hours per B tokens"} <= set(cells)
    result = moesim.simulate(HOME, *SMALL, uncertainty=True)
    assert result.uncertainty is not None
    band = result.uncertainty.bands["step_time_s"]
    assert f"{band.p10:.3f} s to {band.p90:.3f} s" in cells["Step time"][0]
    body = html_of(app)
    assert 'class="badge measured">measured' in body and 'class="badge peak-only">roofline' in body
    assert body.count("<td class=roofline>") > 10, "all that stands on a roofline is muted"


def test_compare_offers_presets_and_begins_with_the_scenarios_own() -> None:
    app = session("compare", *JOB, "recompute=full")
    heads = next(element.proto.body for element in app.get("html")).split("</thead>")[0]
    assert f"A: {HOME}" in heads and "B: " in heads, "a changed scenario stands beside its preset"
    (chosen,) = app.multiselect
    assert "preset: mixtral-8x7b-64xh100" in chosen.options
    chosen.set_value([json.dumps(["mixtral-8x7b-64xh100"])]).run()
    assert not app.exception
    assert figures(app)["GPUs"] == ["64", "16"]
    assert json.loads(app.query_params["with"]) == ["mixtral-8x7b-64xh100"], "what is chosen is pinned"


def test_a_scenario_is_not_compared_with_itself() -> None:
    app = session("compare", *JOB)
    app.query_params["with"] = [json.dumps([HOME, *JOB])]
    app.run()
    assert not app.exception
    assert len(figures(app)["Step time"]) == 1 and len(app.get("plotly_chart")) == 1
    assert any("Nothing else is chosen" in caption.value for caption in app.caption)


@pytest.mark.long
def test_a_difference_within_its_uncertainty_is_said_and_grey() -> None:
    app = session("compare", *SMALL)
    app.query_params["preset"], app.query_params["set"] = HOME, [*SMALL, "seed=1"]
    app.query_params["with"] = [json.dumps([HOME, *SMALL])]
    app.run()
    until(app, lambda page: any("P10 to P90: " in text.value for text in page.markdown))
    first, other = (moesim.load(HOME, *SMALL, *more) for more in ((), ("seed=1",)))
    delta = moesim.compare([first, other], uncertainty=True).sides[1].delta_s
    assert delta is not None and not delta.has_sign  # another draw of the loads: -0.02 s, give or take 0.02
    assert any("not known" in info.value for info in app.info)
    (table,) = (element.proto.body for element in app.get("html"))
    assert f"<small>{delta.predicted:+.3f} s, uncertain (" in table
    assert not any(kind in table.split("</style>")[1] for kind in ('class="better"', 'class="worse"'))


def test_a_comparison_is_a_link_too() -> None:
    app = session("compare")
    app.query_params["with"] = ['["deepseek-v3-2048xh800", "batch.sequences=4096"]', "[1, 2", "{}"]
    app.run()
    assert not app.exception
    assert any("not a list" in error.value for error in app.error)


def test_what_if_moves_the_number_and_the_price_only_the_cost() -> None:
    app = session("what_if", *JOB)
    before = metrics(app)
    app.slider(key="what if sms 20").set_value(8).run()
    after = metrics(app)
    assert after["Step time"] != before["Step time"]
    app.slider(key="what if price 2.5").set_value(4.0).run()
    dear = metrics(app)
    assert dear["Step time"] == after["Step time"]
    assert dear["Cost"] != after["Cost"]
    assert "communication.sms=8" in app.code[0].value


@pytest.mark.long
def test_a_what_if_is_coloured_only_where_it_goes_beyond_its_uncertainty() -> None:
    app = session("what_if", *JOB)
    app.slider(key="what if sms 20").set_value(8).run()
    tile = next(metric for metric in app.metric if metric.label == "Step time")
    first, other = (moesim.load(HOME, *JOB, *more) for more in ((), ("communication.sms=8",)))
    delta = moesim.compare([first, other], uncertainty=True).sides[1].delta_s
    assert delta is not None and delta.has_sign
    until(app, lambda page: any("P10 to P90: -" in caption.value for caption in page.caption))
    tile = next(metric for metric in app.metric if metric.label == "Step time")
    assert tile.color != "gray"
    assert any(f"{delta.p10:+.3f} s to {delta.p90:+.3f} s" in caption.value for caption in app.caption)


def test_faster_links_are_a_change_that_can_be_kept() -> None:
    app = session("what_if", *SMALL)
    bandwidths: Any = app.get("button_group")
    bandwidths[0].set_value(2.0).run()
    assert "cluster.node.nic_bandwidth=100 GB/s" in app.code[0].value
    app.button(key="adopt").click().run()
    assert not app.exception
    assert any("nic_bandwidth" in text for text in app.query_params["set"])


@pytest.mark.long
def test_a_failed_part_is_chosen_and_its_cost_is_told() -> None:
    small = ("cluster.nodes=64", "batch.sequences=1024", "parallel.ep=32")
    app = session("topology", *small)
    app.selectbox(key="fault").set_value("a GPU computes slower").run()
    assert not app.exception
    assert '"kind": "slow-gpu", "gpu": 0, "speed": 0.8' in app.code[0].value
    app.button(key="start whole").click().run()
    until(app, lambda page: any("fault" in table.value.columns for table in page.dataframe))
    costs = next(table.value for table in app.dataframe if "fault" in table.value.columns)
    assert max(costs["longer by (s)"]) > 0.0
    app.selectbox(key="fault").set_value("a node is lost").run()
    app.number_input(key="fault node").set_value(63).run()
    assert not app.exception
