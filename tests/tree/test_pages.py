"""Pages and examples that show numbers show what the code predicts now."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_generated_pages_and_example_outputs_are_current() -> None:
    run = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "write_pages.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
