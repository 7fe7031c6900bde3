"""What tests of the command line share: a scenario file in the folder of the command."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

SMALL_SCENARIO = Path(__file__).parents[1] / "golden" / "scenario-small.yaml"


@pytest.fixture
def small(tmp_path: Path) -> str:
    """A small scenario that is fine, as `small.yaml` in the folder of the command."""
    shutil.copy(SMALL_SCENARIO, tmp_path / "small.yaml")
    return "small.yaml"
