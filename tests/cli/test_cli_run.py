"""`moesim run`: failures by rule, and without them the figures that `moesim simulate` has under that name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import moesim
from moesim.hwmodels.summary_text import short
from moesim.simulator.predict.result import Result
from moesim.simulator.run.report import RunReport
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.run_plan import default_stops

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
    assert "defaults, stated by nobody (3)" in shown.out and "run.restart    = megascale" in shown.out
    report = RunReport.model_validate_json(run("run", GOLDEN, "--json").out)
    assert report == moesim.run(GOLDEN), "Python and the command line assume the same"
    assert report.interruptions.predicted > 0.0 and report.goodput.predicted < 1.0
    assert {item.key: item.kind for item in report.defaults} == dict.fromkeys(
        ("run.failures", "run.restart", "run.checkpoint"), "assumed"
    )
    stated = moesim.run(GOLDEN, *(f"run.{key}" for key in ("failures=llama3-16k-h100", "restart=megascale",
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
