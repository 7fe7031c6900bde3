"""What every test shares: hypothesis without time limits, the command line in this process.

Nothing of the simulator is imported here: tests of the kernels run on machines that have no SimPy.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import settings

# Time limits per example make tests fail on a loaded machine; nothing here asserts wall time.
settings.register_profile("moesim", deadline=None)
# In CI the same examples every time: a red build is about the change, not about luck.
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "moesim")


class Outcome(NamedTuple):
    """What one call of the command line did."""

    code: int
    out: str
    err: str


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Outcome]:
    """The command line in an empty folder, in this process."""
    from moesim.cli import main

    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Outcome:
        with pytest.raises(SystemExit) as end:
            main(list(arguments))
        assert isinstance(end.value.code, int)
        return Outcome(end.value.code, *capsys.readouterr())

    return call
