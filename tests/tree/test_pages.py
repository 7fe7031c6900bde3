"""Pages and examples that show numbers show what the code predicts now."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_generated_pages_and_example_outputs_are_current() -> None:
    run = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "writers" / "pages.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


def test_the_limitations_state_the_errors_of_the_scoreboard() -> None:
    """A size that names a group of the open scoreboard is the group's median, or its worst row."""
    board = (ROOT / "docs" / "validation.md").read_text("utf-8")
    rows = re.findall(r"^\| ([\w-]+) \| \d+ \| \d* \| (\S+%) \| \S+% \| (\S+%) \|", board, re.MULTILINE)
    scored = {name: (median, worst) for name, median, worst in rows}
    page = (ROOT / "docs" / "limitations.md").read_text("utf-8")
    medians = dict(re.findall(r"`([a-z\d-]+)` (-\d+\.\d%)", page))
    worst = dict(re.findall(r"`([a-z\d-]+)`, worst row (\d+\.\d%)", page))
    assert len(medians) >= 8 and len(worst) == 2
    assert medians == {name: scored[name][0] for name in medians}
    assert worst == {name: scored[name][1] for name in worst}
