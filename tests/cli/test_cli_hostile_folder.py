"""A folder of scenarios is data: no command and no process of a command runs the modules that lie in it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from moesim.simulator.engine.compiled import engine, loader

ROOT = Path(__file__).parents[2]
HOSTILE = (
    "json", "logging", "moesim", "multiprocessing", "numba", "numpy", "pandas", "pickle", "plotly",
    "pydantic", "runpy", "simpy", "sitecustomize", "socket", "streamlit", "subprocess", "threading", "typing",
    "usercustomize", "yaml",
)  # fmt: skip
PROGRAM = Path(sys.executable).with_name("moesim")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A scenario among modules of which each leaves a mark when it is imported."""
    place = tmp_path / "scenarios"
    place.mkdir()
    for name in HOSTILE:
        mark = f"open({str(tmp_path / 'marks')!r}, 'a').write('{name} ')\n"
        (place / f"{name}.py").write_text(mark)
    (place / "scenario-small.yaml").write_bytes((ROOT / "tests/golden/scenario-small.yaml").read_bytes())
    return place


def ran(folder: Path) -> str:
    """The modules of the folder that ran, by name."""
    marks = folder.parent / "marks"
    return marks.read_text() if marks.exists() else ""


def run(folder: Path, *command: str, environment: Mapping[str, str] | None = None) -> str:
    """Standard output of a command that is given in the folder."""
    path = {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **path, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_modules_would_run(folder: Path) -> None:
    run(folder, sys.executable, "-c", "import simpy")
    assert ran(folder) == "simpy "


@pytest.mark.long
def test_a_command_and_its_workers(folder: Path) -> None:
    command = ("sweep", "scenario-small.yaml", "--vary", "communication.sms=8,16", "--workers", "2")
    assert "failed" not in run(folder, str(PROGRAM), *command, environment={"MOESIM_CACHE": "off"})
    assert not ran(folder)


@pytest.mark.usefixtures("compiled_code")
def test_the_compiler_in_the_background(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not loader.is_ready():
        pytest.skip("there is no compiled code here")
    started: list[subprocess.Popen[Any]] = []
    popen = subprocess.Popen

    def noted(*arguments: Any, **options: Any) -> None:
        started.append(popen(*arguments, **options))

    monkeypatch.setattr(subprocess, "Popen", noted)
    monkeypatch.setattr(engine, "problem", lambda: None)
    monkeypatch.chdir(folder)
    engine.start_in_background()
    assert [process.wait() for process in started] == [0]
    assert not ran(folder)
