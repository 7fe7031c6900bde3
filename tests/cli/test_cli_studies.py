"""`compare`, `sweep` and `sensitivity`: thin layers over the public API, with errors in words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import moesim
from moesim.hwmodels.summary_text import short
from moesim.simulator.predict.result import Result
from moesim.simulator.run.report import RunReport
from moesim.simulator.scenario import Scenario, load_scenario
from moesim.simulator.scenario.run_plan import default_stops

Run = Callable[..., Any]
PAIR = "deepseek-v3-trace-pair"


def test_compare_prints_what_the_api_returns(run: Run) -> None:
    shown = run("compare", PAIR, "--with", "communication.sms=8", "--json")
    assert shown.code == 0
    few = moesim.load(PAIR, "communication.sms=8")
    expected = moesim.compare([PAIR, few], names=[PAIR, "communication.sms=8"])
    assert json.loads(shown.out) == expected.to_dict()
    table = run("compare", PAIR, PAIR, "--set", "2:communication.sms=8", "--set", "seed=4", "--uncertainty")
    assert table.code == 0
    # The lines of a side say all of its overrides; its title only what differs from the first side.
    heads = [line for line in table.out.splitlines() if line.startswith(("0: ", "1: "))]
    assert heads[0] == f"0: {PAIR}" and "communication.sms: 20 -> 8" in heads[1] and "seed" not in heads[1]
    assert "with    seed=4\n" in table.out and "with    seed=4, communication.sms=8\n" in table.out
    assert "P10" in table.out and "critical path, seconds" in table.out


def test_sweep_prints_json_and_a_table(run: Run, tmp_path: Path) -> None:
    arguments = ("sweep", PAIR, "--vary", "communication.sms=0,20", "--store", "s.sqlite", "--workers", "1")
    shown = run(*arguments, "--json")
    assert shown.code == 0
    found = json.loads(shown.out)
    assert [p["status"] for p in found["points"]] == ["illegal", "ok"]
    assert (tmp_path / "s.sqlite").is_file()
    table = run(*arguments)
    assert "2 points, 0 computed, 2 from s.sqlite" in table.out
    assert "at least 1 communication SM" in table.out and "why not" in table.out
    possible = run("sweep", PAIR, "--vary", "communication.sms=20", "--store", "s.sqlite", "--workers", "1")
    assert possible.code == 0 and "why not" not in possible.out


@pytest.mark.long
def test_sensitivity_prints_json_and_a_table(run: Run) -> None:
    shown = run("sensitivity", PAIR, "--range", "communication.sms=16,24", "--json")
    assert shown.code == 0
    expected = moesim.sensitivity(PAIR, ranges={"communication.sms": (16, 24)})
    assert json.loads(shown.out) == expected.to_dict()
    table = run("sensitivity", PAIR, "--top", "2")
    assert table.code == 0
    assert "model.left_out" in table.out and "smaller ones" in table.out


def test_simulate_adds_intervals_only_when_asked(run: Run) -> None:
    plain, with_bands = run("simulate", PAIR, "--json"), run("simulate", PAIR, "--uncertainty", "--json")
    bands = json.loads(with_bands.out)
    assert set(bands) - set(json.loads(plain.out)) == {"uncertainty"}
    del bands["uncertainty"]
    assert bands == json.loads(plain.out)
    assert "P90" in run("simulate", PAIR, "--uncertainty").out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("compare", PAIR), "2 to 4"),
        (("compare", PAIR, PAIR, "--set", "3:seed=1"), "there are 2 scenarios"),
        (("sweep", PAIR, "--vary", "communication.sms"), "write KEY=VALUES"),
        (("sweep", PAIR, "--vary", "seed=8..1"), "backwards"),
        (("sweep", PAIR, "--vary", "seed=1", "--vary", "seed=2"), "given twice"),
        (("sweep", PAIR, "--vary", "seed=1..9", "--design", "sobol"), "number of points"),
        (("sweep", PAIR, "--vary", "seed=1", "--workers", "0"), "workers=0"),
        (("sweep", PAIR, "--vary", "seed=1", "--store", "no/such/s.sqlite"), "does not exist"),
        (("sensitivity", PAIR, "--range", "communication.sms=8"), "KEY=LOW,HIGH"),
        (("sensitivity", PAIR, "--range", "no.such=1,2"), "no"),
    ],
)
def test_bad_arguments_are_told(run: Run, arguments: tuple[str, ...], said: str) -> None:
    shown = run(*arguments)
    assert shown.code == 2
    assert said in shown.err and "Traceback" not in shown.err


def test_a_sweep_over_a_misspelt_key_is_refused_before_anything_runs(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def computed(*_: object, **__: object) -> None:
        raise AssertionError("a point was computed")

    monkeypatch.setattr("moesim.simulator.studies.sweep.outcomes_here", computed)
    for key, near in (("communication.smss", "'sms'"), ("communicaton.sms", "'communication'")):
        shown = run("sweep", PAIR, "--vary", f"{key}=8,16", "--vary", "seed=0,1", "--workers", "1")
        assert shown.code == 2 and shown.out == "" and f"unknown key (nearest: {near})" in shown.err
    with pytest.raises(moesim.InputError, match="unknown key"):
        moesim.sweep(moesim.load(PAIR), [{"seed": 1}, {"communication.smss": 8}], design="list", workers=1)


def test_a_sweep_without_a_possible_point_ends_with_its_reasons(run: Run) -> None:
    shown = run("sweep", PAIR, "--vary", "communication.sms=0,500", "--vary", "seed=0,1", "--workers", "1")
    assert shown.code == 2 and "4 points, 4 computed" in shown.out
    assert "none of the 4 points is possible: 2 illegal: " in shown.err and "at most 131" in shown.err
    large = run("sweep", PAIR, "--vary", "batch.sequence_length=200000", "--workers", "1")
    assert large.code == 3 and "1 does not fit: " in large.err


GOLDEN = str(Path(__file__).parents[1] / "golden" / "scenario-small.yaml")
SMALL = (GOLDEN, "--set", "run.failures=none")


def test_the_same_label_is_the_same_statistic_in_simulate_and_run(run: Callable[..., Any]) -> None:
    run_result = Result.model_validate_json(run("simulate", *SMALL, "--json").out).run
    report = RunReport.model_validate_json(run("run", *SMALL, "--json").out)
    assert run_result.cost_usd is not None and report.cost_usd is not None
    assert report.cost_usd.predicted == pytest.approx(run_result.cost_usd)
    assert report.days.predicted == pytest.approx(run_result.days)
    assert sum(report.cost_parts_usd.values()) == pytest.approx(report.cost_usd.predicted)
    assert report.cost_usd.p50 != report.cost_usd.predicted  # the step is uncertain: two statistics
    lines = {line.split()[0]: line for line in run("run", *SMALL).out.splitlines() if line.strip()}
    assert f"predicted ${short(run_result.cost_usd, 4)} (P10 $" in lines["cost"]
    assert f"P50 ${short(report.cost_usd.p50, 4)}" in lines["cost"]
    assert f"predicted days {run_result.days:.1f} (P10" in lines["finish"]


def test_a_run_that_mentions_no_failures_assumes_published_ones_and_says_so(run: Callable[..., Any]) -> None:
    shown = run("run", GOLDEN)
    assert shown.code == 0 and "goodput     predicted 9" in shown.out
    assert (
        "run.failures   = llama3-16k-h100: assumed from the same architecture, arXiv 2407.21783" in shown.out
    )
    assert "defaults, stated by nobody (3)" in shown.out and "run.restart    = by-parts" in shown.out
    report = RunReport.model_validate_json(run("run", GOLDEN, "--json").out)
    assert report == moesim.run(GOLDEN), "Python and the command line assume the same"
    assert report.interruptions.predicted > 0.0 and report.goodput.predicted < 1.0
    assert {item.key: item.kind for item in report.defaults} == dict.fromkeys(
        ("run.failures", "run.restart", "run.checkpoint"), "assumed"
    )
    stated = moesim.run(GOLDEN, *(f"run.{key}" for key in ("failures=llama3-16k-h100", "restart=by-parts",
        "checkpoint={interval: optimal, storage: deepseek-3fs}")))  # fmt: skip
    assert stated.defaults == () and stated.days == report.days


def test_a_run_without_failures_claims_no_goodput(run: Callable[..., Any]) -> None:
    out = run("run", GOLDEN, "--set", "run.failures=none").out
    assert "goodput     not predicted: no failures are modelled; state run.failures" in out
    assert "100.0 %" not in out and "nothing interrupts" not in out
    assert "no failures are modelled" in str(moesim.run(GOLDEN, "run.failures=none"))
    assert "without failures" in run("simulate", GOLDEN).out
    optimal = run("run", GOLDEN, "--set", "run.failures=none", "--set",
        "run.checkpoint={interval: optimal, storage: deepseek-3fs}")  # fmt: skip
    assert optimal.code == 2 and "optimal needs run.failures" in optimal.err


@pytest.mark.parametrize(
    ("accelerator", "nodes", "rate", "why"),
    [
        ("a100-sxm", 8, 0.0065, "the same architecture"),
        ("h800-sxm", 8, 0.00379, "the same architecture"),
        ("b200-sxm", 8, 0.00379, "nobody published one on b200-sxm"),
        ("gb200", 1, 0.00379 * 8, "times 64/8"),
    ],
)
def test_the_rate_is_that_of_the_architecture_and_per_gpu(
    accelerator: str, nodes: int, rate: float, why: str
) -> None:
    scenario = Scenario.model_validate(
        {"model": "mixtral-8x7b", "cluster": {"accelerator": accelerator, "nodes": nodes},
         "parallel": {"ep": 8}, "batch": {"sequences": 512, "sequence_length": 4096}}
    )  # fmt: skip
    chosen = default_stops(scenario.run, scenario.machine)
    run = scenario.replace(run={key: one.value for key, one in chosen.items()}).run
    assert run.failures is not None and run.failures.interruptions.value == pytest.approx(rate, rel=1e-3)
    assert why in chosen["failures"].default.why
    kept = default_stops(scenario.replace(run={"restart": "meta-rsc"}).run, scenario.machine)
    assert "restart" not in kept  # what is stated stays


def test_a_run_on_spot_is_preempted_by_rule() -> None:
    scenario = load_scenario(GOLDEN, ["run.price={rent: {term: spot}}"])
    chosen = default_stops(scenario.run, scenario.machine)
    assert chosen["preemption"].default.kind == "assumed"
    run = scenario.replace(run={key: one.value for key, one in chosen.items()}).run
    assert run.preemption is not None and run.preemption.notice.value == 120.0
    stated = load_scenario(GOLDEN, ["run.price={rent: {term: on-demand}}"])
    assert "preemption" not in default_stops(stated.run, stated.machine)
