"""An answer that `simulate` kept: the same text, which loads next to nothing and goes when a file changes."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from moesim.hwmodels.yaml_io import dump_mapping
from moesim.simulator.model.catalogue import load_model

SMALL = Path(__file__).parents[1] / "golden" / "scenario-small.yaml"
Run = Callable[..., Any]

LOADED = """
import sys
from moesim.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    heavy = "numpy networkx simpy rich yaml moesim.hwmodels.calibration moesim.simulator."
    heavy += "scenario moesim.simulator.predict"
    names = [name for name in heavy.split() if name in sys.modules]
    sys.exit(f"loaded {names}" if names else end.code)
"""
"""Runs a command, and fails where it loads a module that a kept answer does not need."""


@pytest.fixture
def kept(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command line with a cache of its own, in a folder with the scenario small.yaml and its model."""
    monkeypatch.setenv("MOESIM_CACHE", str(tmp_path / "cache"))
    shape = load_model("mixtral-8x22b").model_dump(mode="json", exclude_none=True)
    (tmp_path / "model.yaml").write_text(dump_mapping(shape))
    text = SMALL.read_text().replace("model: mixtral-8x22b", "model: model.yaml")
    assert "model.yaml" in text
    (tmp_path / "small.yaml").write_text(text)
    return run


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that grows by one whenever a scenario is loaded."""
    from moesim.simulator import scenario

    loads: list[str] = []
    load = scenario.load_scenario

    def counting(name: str, overrides: Sequence[str] = ()) -> scenario.Scenario:
        loads.append(name)
        return load(name, overrides)

    monkeypatch.setattr(scenario, "load_scenario", counting)
    return loads


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_kept_answer_is_the_same_text_and_loads_no_scenario(
    kept: Run, form: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = counted(monkeypatch)
    first = kept("simulate", "small.yaml", *form)
    assert first.code == 0 and len(loads) == 1
    assert kept("simulate", "small.yaml", *form) == first and len(loads) == 1
    monkeypatch.setenv("MOESIM_CACHE", "off")
    assert kept("simulate", "small.yaml", *form) == first and len(loads) == 2
    monkeypatch.undo()


def test_a_kept_answer_imports_no_simulator(kept: Run, tmp_path: Path) -> None:
    first = kept("simulate", "small.yaml")
    command = [sys.executable, "-c", LOADED, "simulate", "small.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, first.out, "")


def test_a_changed_file_and_other_options_give_a_new_answer(
    kept: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = kept("simulate", "small.yaml", "--json")
    loads = counted(monkeypatch)
    for file, old, new in (
        ("small.yaml", "name: small", "name: other"),
        ("model.yaml", "n_layers: 56", "n_layers: 48"),
    ):
        path = tmp_path / file
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))
        second = kept("simulate", "small.yaml", "--json")
        assert second.code == 0 and second.out != first.out
        first = second
    assert len(loads) == 2
    assert kept("simulate", "small.yaml", "--json", "--seed", "5").out != first.out and len(loads) == 3


def test_a_file_that_appears_where_a_name_was_looked_for_gives_a_new_answer(
    kept: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jobs").mkdir()
    shutil.copy(SMALL, tmp_path / "jobs" / "small.yaml")
    assert kept("simulate", "jobs/small.yaml").code == 0
    loads = counted(monkeypatch)
    assert kept("simulate", "jobs/small.yaml").code == 0 and loads == []
    (tmp_path / "jobs" / "mixtral-8x22b").write_text("no model, but beside the scenario it is read as one")
    assert kept("simulate", "jobs/small.yaml").code == 2 and len(loads) == 1


def test_a_kept_plan_that_does_not_fit_exits_with_3_again(kept: Run) -> None:
    plan = ("simulate", "small.yaml", "--set", "parallel.zero_stage=0", "--set", "recompute=none")
    first = kept(*plan)
    assert first.code == 3 and "does not fit" in first.err
    assert kept(*plan) == first


def test_a_damaged_answer_is_computed_again(kept: Run, tmp_path: Path) -> None:
    first = kept("simulate", "small.yaml")
    (store,) = (tmp_path / "cache").glob("predictions-*.sqlite")
    with sqlite3.connect(store) as database:
        database.execute("UPDATE results SET result = x'00' WHERE calibration_hash = ''")
        assert database.total_changes == 1
    assert kept("simulate", "small.yaml") == first
