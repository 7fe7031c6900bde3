"""Pages and examples that show numbers show what the code predicts now."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from moesim.simulator.scoring.published import ContextRow, Row
from moesim.simulator.scoring.published_full_resolution import FullChecks

ROOT = Path(__file__).resolve().parents[2]


def test_generated_pages_and_example_outputs_are_current(
    monkeypatch: pytest.MonkeyPatch,
    published_rows: list[Row],
    full_checks: FullChecks,
    context_rows: list[ContextRow],
) -> None:
    pages = importlib.import_module("lab.writers.pages")
    computed = {"score": published_rows, "check_full": full_checks, "context_plans": context_rows}
    for name, value in computed.items():
        monkeypatch.setattr(pages, name, lambda value=value: value)
    assert pages.stale(pages.current_pages()) == []


def test_the_limitations_state_the_errors_of_the_scoreboard() -> None:
    """A size that names a group of the open scoreboard is the group's median, or its worst row."""
    families = (ROOT / "lab" / "docs" / "boards" / f"{name}.md" for name in ("hopper", "blackwell", "a100"))
    board = "\n".join(path.read_text("utf-8") for path in families)
    rows = re.findall(r"^\| ([\w-]+) \| \d+ \| \d* \| (\S+%) \| \S+% \| (\S+%) \|", board, re.MULTILINE)
    scored = {name: (median, worst) for name, median, worst in rows}
    page = (ROOT / "docs" / "limitations.md").read_text("utf-8")
    medians = dict(re.findall(r"`([a-z\d-]+)` (-\d+\.\d%)", page))
    worst = dict(re.findall(r"`([a-z\d-]+)`, worst row (\d+\.\d%)", page))
    assert len(medians) >= 8 and worst
    assert medians == {name: scored[name][0] for name in medians}
    assert worst == {name: scored[name][1] for name in worst}
