"""Stores that came from elsewhere: sound points are taken over, and nothing else of a file is trusted."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from moesim.hwmodels.errors import InputError
from moesim.simulator.studies.store import Key, PointOutcome, Store, Taken, copied, take_over
from moesim.version import __version__


def key(number: int) -> Key:
    return Key(f"{number:064d}", "c" * 64, __version__)


def outcome(number: int) -> PointOutcome:
    return PointOutcome("ok", "", {"step_time_s": float(number)}, f'{{"n": {number}}}')


def filled(path: Path, numbers: range) -> Path:
    with Store(path) as store:
        for number in numbers:
            store.put(key(number), "a scenario", outcome(number))
    return path


def changed(path: Path, *statements: str) -> Path:
    with closing(sqlite3.connect(path)) as db:
        for statement in statements:
            db.execute(statement)
        db.commit()
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return path


def test_new_points_are_taken_with_their_predictions_and_known_ones_stay(tmp_path: Path) -> None:
    copied(filled(tmp_path / "theirs", range(5)), tmp_path / "one file")
    with Store(filled(tmp_path / "mine", range(3, 4))) as mine:
        assert take_over(tmp_path / "one file", mine) == Taken(new=4, known=1, damaged=0)
        assert mine.count() == 5
        found = mine.get(key(0))
        assert found is not None and found.figures == {"step_time_s": 0.0}
        assert mine.result(key(0)) == '{"n": 0}'


def test_a_copy_is_one_whole_file_while_a_sweep_writes(tmp_path: Path) -> None:
    with Store(filled(tmp_path / "theirs", range(3))) as open_store:
        open_store.put(key(7), "a scenario", outcome(7))  # still in the log beside the file
        copied(tmp_path / "theirs", tmp_path / "copy")
    with Store(tmp_path / "copy") as copy:
        assert copy.count() == 4


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE results SET figures = '{\"step_time_s\": 1e-9}' WHERE key LIKE '%0001-%'",
        "UPDATE results SET status = 'splendid' WHERE key LIKE '%0001-%'",
        "UPDATE results SET result = zeroblob(100) WHERE key LIKE '%0001-%'",
        "UPDATE results SET key = 'another' WHERE key LIKE '%0001-%'",
        "UPDATE results SET version = '0.0.1' WHERE key LIKE '%0001-%'",
    ],
)
def test_damaged_points_are_left_out_and_counted(tmp_path: Path, statement: str) -> None:
    theirs = changed(filled(tmp_path / "theirs", range(3)), statement)
    with Store(tmp_path / "mine") as mine:
        assert take_over(theirs, mine) == Taken(new=2, known=0, damaged=1)


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TABLE more (a)",
        "CREATE VIEW v AS WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT n FROM r",
        "CREATE TRIGGER t AFTER INSERT ON results BEGIN DELETE FROM results; END",
        "CREATE INDEX i ON results (status)",
        "ALTER TABLE results ADD COLUMN more AS (zeroblob(1000000000))",
        "DROP TABLE meta",
        "UPDATE meta SET value = '0.0.1' WHERE name = 'version'",
        "UPDATE meta SET value = '99' WHERE name = 'schema'",
        "DELETE FROM meta",
    ],
)
def test_a_file_with_anything_else_in_it_is_refused(tmp_path: Path, statement: str) -> None:
    theirs = changed(filled(tmp_path / "theirs", range(2)), statement)
    with Store(tmp_path / "mine") as mine:
        with pytest.raises(InputError):
            take_over(theirs, mine)
        assert mine.count() == 0


@pytest.mark.parametrize("data", [b"", b"x" * 5000, b"SQLite format 3\x00" + b"\xff" * 5000])
def test_a_file_that_is_no_database_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "theirs").write_bytes(data)
    with Store(tmp_path / "mine") as mine, pytest.raises(InputError):
        take_over(tmp_path / "theirs", mine)
