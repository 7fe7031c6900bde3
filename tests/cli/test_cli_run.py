"""`moesim run`: its figures are those of `moesim simulate` wherever they have the same name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from moesim.cli.console import short
from moesim.simulator.predict.result import Result
from moesim.simulator.run.report import RunReport

SMALL = ("deepseek-v3-2048xh800", "--set", "batch.sequences=4096")


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
