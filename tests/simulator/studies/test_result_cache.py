"""Predictions kept on disk: found by both sides, never of another program, and never in the way."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import moesim
from moesim.cli import app
from moesim.simulator.predict.result import Result
from moesim.simulator.studies import result_cache
from moesim.simulator.studies.reprice import without_prices
from moesim.simulator.studies.space import key_of
from moesim.simulator.studies.store import PointOutcome, Store

PAIR = "deepseek-v3-trace-pair"
"""A part of a model: simulated in some 50 ms."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of its own for every test."""
    monkeypatch.setenv(result_cache.FOLDER, str(tmp_path / "kept"))
    monkeypatch.setattr(result_cache, "_problem", None)
    yield tmp_path / "kept"


@pytest.fixture
def nothing_simulates(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("simulated")

    monkeypatch.setattr("moesim.simulator.engine.simpy.execute.SimpyEngine.execute", refuse)


def command(*words: str) -> str:
    answer = CliRunner().invoke(app, list(words))
    assert answer.exit_code == 0, answer.output
    return answer.stdout


def test_the_commands_second_answer_is_the_first_one_byte_for_byte(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    # Without another run for each cause, which explain makes anew.
    wanted = [("simulate", PAIR), ("simulate", PAIR, "--json"), ("explain", PAIR, "--no-counterfactuals")]
    monkeypatch.setenv(result_cache.FOLDER, "off")
    fresh = [command(*words) for words in wanted]
    monkeypatch.delenv(result_cache.FOLDER)
    monkeypatch.setenv("XDG_CACHE_HOME", str(request.getfixturevalue("tmp_path")))
    command("simulate", PAIR)
    request.getfixturevalue("nothing_simulates")
    assert [command(*words) for words in wanted] == fresh


def test_what_the_dashboard_simulated_the_command_finds(nothing_simulates: None, folder: Path) -> None:
    load = f"moesim.load('{PAIR}', 'seed=7')"
    code = (
        "from moesim.app import jobs, predictions; import moesim; "
        f"predictions.simulate({load}); jobs.finish_job()"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pytest.importorskip("streamlit", reason="the dashboard extra is not installed")
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    found = Result.model_validate_json(command("simulate", PAIR, "--set", "seed=7", "--json"))
    assert found.seed == 7


def test_what_the_command_simulated_is_there_at_other_prices_too(
    request: pytest.FixtureRequest, folder: Path
) -> None:
    command("simulate", PAIR)
    request.getfixturevalue("nothing_simulates")
    other = moesim.load(PAIR, "cluster.price_per_gpu_hour=$9/h")
    found = result_cache.predict_unpriced(other)
    assert found.model_dump_json() == result_cache.predict_unpriced(moesim.load(PAIR)).model_dump_json()
    assert result_cache.find(other) is None  # the command must answer with these very prices
    assert result_cache.find(moesim.load(PAIR, "seed=1")) is None


def test_another_program_does_not_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = moesim.load(PAIR)
    result_cache.keep(scenario, moesim.simulate(scenario))
    assert result_cache.find(scenario) is not None
    monkeypatch.setattr(result_cache, "program_hash", lambda: "0" * 64)
    assert result_cache.find(scenario) is None


@pytest.mark.parametrize("kind", ["no folder", "no store", "full", "locked"])
def test_trouble_with_the_file_costs_the_keeping_only(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = moesim.load(PAIR)
    path = folder / f"predictions-{moesim.__version__}-{result_cache.program_hash()[:12]}.sqlite"
    monkeypatch.setattr(result_cache, "BUSY_S", 0.01)
    other: sqlite3.Connection | None = None
    if kind == "no folder":
        folder.write_text("a file where the folder should be")
    elif kind == "no store":
        folder.mkdir()
        path.write_text("not a database" * 100)
    elif kind == "locked":
        result_cache.keep(scenario, moesim.simulate(scenario))
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
    else:
        result_cache.find(scenario)  # the file is made
        monkeypatch.setattr(Store, "put", _with_no_page_left(Store.put))
    try:
        answer = CliRunner().invoke(app, ["simulate", PAIR])
    finally:
        if other is not None:
            other.close()
    assert answer.exit_code == 0, answer.output
    assert "step time" in answer.stdout
    said = [line for line in answer.stderr.splitlines() if "predictions are not kept" in line]
    assert len(said) == 1, answer.stderr
    assert result_cache.FOLDER in said[0]


def _with_no_page_left(put: Callable[..., bool]) -> Callable[..., bool]:
    """The database may not grow: SQLite then says what it says on a full disk."""

    def full(store: Store, *row: object) -> bool:
        store._db.execute("PRAGMA max_page_count = 1")
        return put(store, *row)

    return full


def test_two_processes_keep_at_the_same_time(folder: Path) -> None:
    code = (
        "import sys, moesim; from moesim.simulator.studies import result_cache\n"
        "r = moesim.simulate(sys.argv[1])\n"
        "for n in range(5): result_cache.keep(moesim.load(sys.argv[1], f'seed={n}'), r)\n"
        "assert result_cache.problem() is None, result_cache.problem()"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    both = [subprocess.Popen([sys.executable, "-c", code, PAIR], env=environment) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert all(result_cache.find(moesim.load(PAIR, f"seed={n}")) is not None for n in range(5))


def test_the_file_stays_below_its_limit(tmp_path: Path) -> None:
    scenario = moesim.load(PAIR)
    with Store(tmp_path / "s.sqlite", durable=False) as store:
        for number in range(40):
            key = key_of(without_prices(scenario.replace(seed=number)))
            store.put(key, "x", PointOutcome("ok", "", {}, os.urandom(4000).hex()))
            store.shrink(100_000)
        assert 5 < store.count() < 30
        assert store.result(key)  # the newest is still there


@pytest.mark.parametrize("value", [None, 7, 1.5, "text", b"\x00", zlib.compress(b"{}")])
def test_a_kept_prediction_of_another_kind_is_none(folder: Path, value: object) -> None:
    scenario = moesim.load(PAIR)
    result_cache.keep(scenario, moesim.simulate(scenario))
    assert result_cache.find(scenario) is not None
    (path,) = folder.glob("*.sqlite")
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE other AS SELECT * FROM results")  # as a stranger's table, which allows NULL
        db.execute("DROP TABLE results")
        db.execute("ALTER TABLE other RENAME TO results")
        db.execute("UPDATE results SET result = ?", (value,))
    db.close()
    assert result_cache.find(scenario) is None
    assert result_cache.problem() is None
