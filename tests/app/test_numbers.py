"""Figures of every page are those of the command line, to the last printed digit.

Two pages have no command: Hardware shows what `moesim.compare_hardware` returns, and Calibration what a
profile's file holds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("streamlit", reason="the dashboard extra is not installed")
pytest.importorskip("click", reason="the command line needs click")

from app_sessions import HOME, JOB, figures, html_of, metrics, press, session, table, until, words
from test_views_fleet import TEXTS
from test_views_trace import given, trace_bytes

import moesim
from moesim.app.charts.step import NAMES
from moesim.app.pages import SERVED_HOME
from moesim.app.texts import compact, money, plain, span, written
from moesim.cli import main
from moesim.hwmodels.calibration import load_profile
from moesim.hwmodels.units import in_unit

FEWER = (*JOB, "communication.sms=8")


def told(capsys: pytest.CaptureFixture[str], *command: str) -> Any:
    """What a command prints with `--json`."""
    with pytest.raises(SystemExit) as ended:
        main([*command, "--json"])
    assert not ended.value.code
    return json.loads(capsys.readouterr().out)


def sets(texts: tuple[str, ...]) -> list[str]:
    return [word for text in texts for word in ("--set", text)]


def main_figures(result: Any) -> dict[str, str]:
    """The tiles of a result, from what `moesim simulate --json` printed."""
    step, run = result["step"], result["run"]
    return {
        "Step time": written("step_time_s", step["time_s"]),
        "Tokens/s/GPU": written("tokens_per_s_per_gpu", step["tokens_per_s_per_gpu"]),
        "MFU, causal": written("mfu_causal", step["mfu_causal"]),
        "MFU, non-causal": written("mfu_noncausal", step["mfu_noncausal"]),
        "Duration": written("days", run["days"]),
        "GPU-hours": compact(run["gpu_hours"]),
        "Cost": money(run["cost_usd"]),
        "Tokens a day": compact(step["tokens_per_day"]),
    }


@pytest.mark.long
def test_fifty_figures_of_all_pages_are_those_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    seen = 0

    def same(shown: dict[str, str], expected: dict[str, str]) -> None:
        nonlocal seen
        assert {name: shown[name] for name in expected} == expected
        seen += len(expected)

    own, fewer = (told(capsys, "simulate", HOME, *sets(texts)) for texts in (JOB, FEWER))
    for page, result, texts in (("result", own, JOB), ("result", fewer, FEWER), ("scenario", own, JOB)):
        same(metrics(session(page, *texts)), main_figures(result))
    tiles = {name: main_figures(fewer)[name] for name in ("Step time", "Tokens/s/GPU", "Duration", "Cost")}
    app = session("what_if", *JOB, fields=["what-if.sms=8"])
    same(metrics(app), tiles)
    app = session("compare", *FEWER, **{"with": [json.dumps([HOME, *JOB])]})
    cells = figures(app)
    for label, value in main_figures(own).items():
        assert cells[label][0].startswith(value) and cells[label][1].startswith(main_figures(fewer)[label])
        seen += 2
    waits = [rank["exposed_communication"] for rank in own["breakdown_by_rank_s"]]
    bubbles = [rank["bubble"] for rank in own["breakdown_by_rank_s"]]
    pages = metrics(session("timeline", *JOB))
    same(
        pages,
        {
            "Longest wait for communication": f"{max(waits):.3f} s",
            "Longest bubble": f"{max(bubbles):.3f} s",
            "Gradients and optimizer": f"{own['breakdown_s']['optimizer']:.3f} s",
        },
    )
    run = told(capsys, "run", HOME, *sets(JOB))
    report = run["run"]["report"] if "run" in run else run
    shown = metrics(session("run_cost", *JOB))
    same(
        shown,
        {
            "Days, whole run": f"{report['days']['predicted']:,.1f}",
            "Goodput, whole run": f"{report['goodput']['predicted']:.1%}",
            "Interruptions, whole run": f"{report['interruptions']['predicted']:,.1f}",
            "Cost, whole run": f"${compact(report['cost_usd']['predicted'])}",
        },
    )
    sweep = told(capsys, "sweep", HOME, *sets(JOB), "--vary", "communication.sms=8,20")
    app = session("sweep", *JOB, fields=['sweep.1.communication.sms="8,20"'])
    press(app, "start sweep")
    until(app, lambda page: metrics(page).get("To compute") == "0")
    steps = dict(
        zip(table(app, "place")["communication.sms"], table(app, "place")["step time (s)"], strict=True)
    )
    for point in sweep["points"]:
        assert steps[point["values"]["communication.sms"]] == point["figures"]["step_time_s"]
        seen += 1
    assert seen >= 50


PLAN = {"schedule": "1f1b,dualpipe", "microbatch": "1", "zero_stage": "1", "sms": "20"}
"""Space of a search of a second."""


@pytest.mark.long
def test_figures_of_pages_about_the_home_case_are_those_of_the_command_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    own = told(capsys, "simulate", HOME)
    published = next(row for row in told(capsys, "validate") if row["quantity"] == "time per step")
    error = f"{published['relative_error']:+.1%}"
    shown = metrics(session("start"))
    assert shown["Predicted step"] == written("step_time_s", own["step"]["time_s"])
    assert shown["Published step"] == written("step_time_s", published["published"])
    page = session("evidence")
    assert shown["Error"] == error == metrics(page)["Home case, time per step"]
    assert f"{own['step']['time_s']:.3f} s, published {published['published']:.3f} s" in words(page)
    count = told(capsys, "topology", "deepseek-h800-2048")
    said, cables = words(session("topology", preset=HOME)), count["cables"]["leaf-spine"]
    for name in ("leaf", "spine", "nvswitch"):
        assert f"{count['switches'][name]:,} {NAMES[name]}" in said
    assert f"{count['gpus']:,} GPUs" in said and f"{cables:,} cables leaf to spine" in said
    fleet = told(capsys, "simulate", HOME, *sets(TEXTS))
    names = ("Step time", "Tokens/s/GPU", "Duration", "Cost")
    shown = metrics(session("fleet"))
    assert {name: shown[name] for name in names} == {name: main_figures(fleet)[name] for name in names}
    page = session("calibration")
    entries = {entry.id: entry for entry in load_profile("h800-trace").entries()}
    rows = table(page, "stated error")
    assert len(rows) == len(entries) > 5
    for name, residual, source in zip(rows["entry"], rows["stated error"], rows["source"], strict=True):
        assert residual == f"{entries[name].residual.relative:.1%}" and source == entries[name].source
    page = given(session("trace"), ("rank0.json", trace_bytes(tmp_path)))
    until(page, lambda one: "Step" in metrics(one))
    (tmp_path / "rank0.json").write_bytes(trace_bytes(tmp_path))
    read = told(capsys, "trace", "read", str(tmp_path / "rank0.json"))
    step = read["ranks"][0]["steps"][0]
    keys = {"Step": "wall_ns", "Busy": "busy_ns", "Computing": "compute_ns", "Idle": "idle_ns"}
    for label, key in keys.items():
        assert metrics(page)[label] == f"{in_unit(step[key] / 1e9, 'ms', 's'):,.2f} ms"


@pytest.mark.long
def test_figures_of_pages_that_search_are_those_of_the_command_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    app = session("planner", *JOB)
    app.multiselect(key="schedules").set_value(["1f1b", "dualpipe"])
    app.multiselect(key="kept keys").set_value(["precision", "recompute", "microbatch", "zero_stage", "sms"])
    app.run()
    press(app, "start plan")
    until(app, lambda page: "Plans considered" in metrics(page))
    space = [word for key, values in PLAN.items() for word in ("--vary", f"{key}={values}")]
    fixed = ("--vary", "precision=bf16", "--vary", "recompute=none", "--top", "6")
    found, shown = told(capsys, "plan", HOME, *sets(JOB), *space, *fixed), metrics(app)
    best = found["ranked"][0]
    assert shown["Step time"] == written("step_time_s", best["time_s"])
    assert (shown["Duration"], shown["Cost"]) == (written("days", best["days"]), money(best["cost_usd"]))
    assert shown["Memory"] == f"{best['memory_bytes'] / 2**30:.1f} GiB"
    assert shown["Plans considered"] == f"{found['considered']:,}"
    assert shown["Legal and fits"] == f"{found['fitting']:,}"
    app = session(
        "training_sizing", *JOB, fields=["training_sizing.days=36000.0", 'training_sizing.gpus="8,16"']
    )
    press(app, "start training sizing")
    until(app, lambda page: bool(page.metric))
    words_of = ("--vary", "cluster.gpus=8,16", "--deadline-days", "36000")
    sizing = told(capsys, "plan", HOME, *sets(JOB), *words_of)
    captions = [caption.value.replace("\\", "") for caption in app.caption]
    for tile, key in zip(app.metric, ("gpus", "cost", "time"), strict=True):
        row = sizing["winners"][key]
        assert tile.value == f"{row['n_gpus']:,} x {row['accelerator']}"
        assert any(f"{row['days']:.1f} days" in text for text in captions)
        assert any(money(row["cost_usd"]).replace("$", "") in text for text in captions)
    app = session("curves", *JOB)
    until(app, lambda page: "P10 to P90 of each point" in words(page), 300.0)
    rows = table(app, "value")
    at = {row["value"]: row for _, row in rows[rows["input"] == "Communication SMs"].iterrows()}
    for sms in ("8", "20", "24"):
        point = told(capsys, "simulate", HOME, *sets((*JOB, f"communication.sms={sms}")))
        assert at[sms]["Step time"] == written("step_time_s", point["step"]["time_s"])
    job, names = moesim.load(HOME, *JOB), ["h100-1024", "h200-1024"]
    app = session("hardware", *JOB, fields=[f"hardware.clusters={json.dumps(names, separators=(',', ':'))}"])
    press(app, "hardware compare")
    until(
        app,
        lambda page: 'class="figures"' in html_of(page) and not any(b.label == "Stop" for b in page.button),
    )
    for row in moesim.compare_hardware(job, names, gpus=16, search="narrow").clusters:
        assert written("step_time_s", row.figures["step_time_s"].predicted) in html_of(app)


@pytest.mark.long
def test_figures_of_the_pages_about_serving_are_those_of_the_command_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    few = ["serving.load.requests=60"]
    app = session("serving", preset=SERVED_HOME, set=few)
    until(app, lambda page: bool(page.metric) and "being computed" not in words(page))
    served, shown = told(capsys, "serve", "simulate", SERVED_HOME, *sets(tuple(few))), metrics(app)
    assert shown["Goodput"] == f"{plain(served['goodput']['requests_per_s'])}/s"
    for label, key in (("Output tokens/s/GPU", "output"), ("Input tokens/s/GPU", "input")):
        assert shown[label] == f"{served[f'{key}_tokens_per_s_per_gpu']:,.0f}"
    assert shown["$ per M tokens"] == money(served["cost"]["usd_per_million_tokens"])
    assert shown["TPOT, all tokens"] == span(served["tpot_token_s"])
    times = table(app, "P90")
    for place, key in enumerate(("ttft_s", "tpot_request_s", "end_to_end_s")):
        assert times["P90"][place] == span(served[key]["p90"]) and times["P50"][place] == span(
            served[key]["p50"]
        )
    slow = ("serving.load.requests=60", "serving.load.rate_per_s=20")
    fields = ["serving_sizing.most=8", 'serving_sizing.modes=["aggregated"]']
    app = session("serving_sizing", preset=SERVED_HOME, set=list(slow), form=fields)
    press(app, "start serving plan")
    until(app, lambda page: bool(page.metric))
    limits = ("--max-gpus", "8", "--modes", "aggregated")
    best, shown = told(capsys, "serve", "plan", SERVED_HOME, *sets(slow), *limits)["plans"][0], metrics(app)
    assert shown["GPUs"] == f"{best['gpus']:,} x {best['accelerator']}"
    assert shown["Price"] == f"{money(best['usd_per_hour'])} an hour"
    assert shown["TTFT"] == span(best["ttft_s"]["value"]) and shown["TPOT"] == span(best["tpot_s"]["value"])
