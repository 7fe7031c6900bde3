"""The command `explain`: the critical path covers the step, and runs without each cause say what it costs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]

SMALL_SCENARIO = Path(__file__).parents[1] / "golden" / "scenario-small.yaml"


@pytest.fixture
def small(tmp_path: Path) -> str:
    shutil.copy(SMALL_SCENARIO, tmp_path / "small.yaml")
    return "small.yaml"


def test_explain(run: Run, small: str) -> None:
    code, out, _ = run("explain", small)
    assert code == 0
    for word in (
        "critical path",
        "mean*",
        "bounds",
        "stage 0:",
        "assumed: ",
        "extrapolated",
        "scenario.variation.clock_cv = 0.01",
    ):
        assert word in out
    assert "\n  stages 1 to 2: 14 moe\n" in out, "equal stages share a line"
    path, costs = out.split("what each cause costs")
    shares = [
        float(line.split()[-2]) for line in path.splitlines() if line.endswith(" %") and line.count("  ")
    ]
    assert sum(shares) == pytest.approx(100.0, abs=1.0), "the critical path covers the step"
    for word in ("payloads of dispatch and combine", "all of them", "do not add up"):
        assert word in costs
    without = run("explain", small, "--no-counterfactuals")
    assert without.code == 0 and "what each cause costs" not in without.out
