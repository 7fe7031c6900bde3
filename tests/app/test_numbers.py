"""Figures of every page are those of the command line, to the last printed digit."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("streamlit", reason="the dashboard extra is not installed")
pytest.importorskip("click", reason="the command line needs click")

from app_sessions import HOME, JOB, figures, metrics, press, session, table, until

from moesim.app.texts import compact, money, written
from moesim.cli import main

FEWER = (*JOB, "communication.sms=8")


def told(capsys: pytest.CaptureFixture[str], command: str, *words: str) -> Any:
    """What a command prints with `--json`."""
    with pytest.raises(SystemExit) as ended:
        main([command, *words, "--json"])
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
