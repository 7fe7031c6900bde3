"""The store: durable, first outcome kept, and every bad file refused in words."""

from __future__ import annotations

import sqlite3
import zlib
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import moesim
from moesim.hwmodels.errors import InputError
from moesim.simulator.studies import store as store_module
from moesim.simulator.studies.store import Key, PointOutcome, Store, Taken, copied, is_full_disk, take_over
from moesim.version import __version__

KEY = Key("a" * 64, "b" * 64, moesim.__version__)
OTHER = Key("c" * 64, "b" * 64, moesim.__version__)
OUTCOME = PointOutcome("ok", "", {"step_time_s": 0.1, "fits": True, "pair_s": None}, '{"x": 1}')


def test_an_outcome_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    with Store(path) as store:
        assert store.get(KEY) is None
        assert store.put(KEY, "name", OUTCOME)
    with Store(path) as store:
        found = store.get(KEY)
        assert found is not None
        assert (found.status, found.figures, store.result(KEY)) == ("ok", OUTCOME.figures, OUTCOME.result)
        assert store.get(OTHER) is None
        assert store.result(OTHER) == ""


def test_two_writers_count_a_point_once(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    with Store(path) as first, Store(path) as second:
        assert first.put(KEY, "one", OUTCOME)
        assert not second.put(KEY, "two", PointOutcome("illegal", "later", {}, ""))
        assert first.count() == second.count() == 1
        found = second.get(KEY)
        assert found is not None and found.status == "ok"


def test_a_store_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.sqlite"
    Store(path).close()
    monkeypatch.setattr("moesim.simulator.studies.store.__version__", "9.9")
    with pytest.raises(InputError, match=r"written by moesim .* this is 9\.9 .* use a new file"):
        Store(path)


@pytest.mark.parametrize(("value", "said"), [("'99'", "layout 99"), ("x'ff'", "layout")])
def test_a_store_of_another_layout_is_refused(tmp_path: Path, value: str, said: str) -> None:
    path = tmp_path / "s.sqlite"
    Store(path).close()
    with sqlite3.connect(path) as db:
        db.execute(f"UPDATE meta SET value = {value} WHERE name = 'schema'")
    db.close()
    with pytest.raises(InputError, match=said):
        Store(path)


def test_files_that_are_no_store_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.sqlite"
    text.write_text("hello, this is no database at all, but a text of some length\n" * 30)
    with pytest.raises(InputError, match="no store of a sweep"):
        Store(text)
    foreign = tmp_path / "foreign.sqlite"
    with sqlite3.connect(foreign) as db:
        db.execute("CREATE TABLE birds (name TEXT)")
    db.close()
    with pytest.raises(InputError, match="birds"):
        Store(foreign)
    with pytest.raises(InputError, match="does not exist"):
        Store(tmp_path / "nowhere" / "s.sqlite")
    with pytest.raises(InputError, match="folder"):
        Store(tmp_path)


def test_a_full_disk_is_told_and_loses_nothing(tmp_path: Path) -> None:
    """SQLite's own limit on pages gives the same error as a full disk."""
    path = tmp_path / "s.sqlite"
    with Store(path) as store:
        store.put(KEY, "kept", OUTCOME)
        pages = store._db.execute("PRAGMA page_count").fetchone()[0]
        store._db.execute(f"PRAGMA max_page_count = {pages}")
        noise = np.random.default_rng(0).bytes(200_000).hex()
        with pytest.raises(InputError, match="disk is full; what was written before is safe"):
            store.put(OTHER, "too much", PointOutcome("ok", "", {}, noise))
    with Store(path) as store:
        assert store.count() == 1
        assert store.get(KEY) is not None
        assert store.put(OTHER, "now there is room", OUTCOME)


def test_a_store_that_somebody_holds_is_told(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    with Store(path, busy_s=0.05) as store:
        holder = sqlite3.connect(path, isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        with pytest.raises(InputError, match="another process has held it"):
            store.put(KEY, "x", OUTCOME)
        holder.execute("ROLLBACK")
        holder.close()
        assert store.put(KEY, "x", OUTCOME)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("figures", "not JSON"),
        ("figures", "[1]"),
        ("figures", '{"step_time_s": 0.2}'),
        ("figures", b"\xff\xfe"),
        ("status", "fine"),
        ("status", 7),
        ("reason", b"\x00"),
        ("row_digest", ""),
    ],
)
def test_a_damaged_row_is_computed_again(tmp_path: Path, column: str, value: object) -> None:
    path = tmp_path / "s.sqlite"
    with Store(path) as store:
        store.put(KEY, "name", OUTCOME)
    with sqlite3.connect(path) as db:
        db.execute(f"UPDATE results SET {column} = ?", (value,))
    db.close()
    with Store(path) as store:
        assert store.get(KEY) is None
        assert store.put(KEY, "name", OUTCOME)  # the damaged row is not in the way
        found = store.get(KEY)
        assert found is not None and found.figures == OUTCOME.figures


@pytest.mark.parametrize(
    "value", [b"", b"no zlib", "text", 7, zlib.compress(b'{"x": 2}'), zlib.compress(b"\xff"), b"x\x9c"]
)
def test_a_damaged_prediction_is_none(tmp_path: Path, value: object) -> None:
    path = tmp_path / "s.sqlite"
    with Store(path) as store:
        store.put(KEY, "name", OUTCOME)
    with sqlite3.connect(path) as db:
        db.execute("UPDATE results SET result = ?", (value,))
    db.close()
    with Store(path) as store:
        assert store.result(KEY) == ""
        assert store.get(KEY) is None


def test_a_compressed_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MOST_RESULT_BYTES", 1000)
    path = tmp_path / "s.sqlite"
    with Store(path) as store:
        store.put(KEY, "name", PointOutcome("ok", "", {}, "x" * 1001))  # its digests are right
        assert store.result(KEY) == ""
        store.put(OTHER, "name", PointOutcome("ok", "", {}, "x" * 1000))
        assert store.result(OTHER) == "x" * 1000


def test_a_damaged_name_inside_the_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    Store(path).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    data = path.read_bytes()
    assert data.count(b"sqlite_autoindex_meta_1") == 1
    path.write_bytes(data.replace(b"sqlite_autoindex_meta_1", b"\x81qlite_autoindex_meta_1"))
    with pytest.raises(InputError, match=r"s\.sqlite: the file is damaged"):
        Store(path)


@pytest.mark.parametrize(("number", "full"), [(28, True), (122, True), (5, False), (13, False)])
def test_an_io_error_is_a_full_disk_where_a_file_cannot_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, full: bool
) -> None:
    """SQLite says "disk I/O error" where the shared memory of its log has no room."""

    def tried(**_: object) -> None:
        raise OSError(number, "why")

    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorname = "SQLITE_IOERR_SHMSIZE"
    monkeypatch.setattr("tempfile.TemporaryFile", tried)
    assert is_full_disk(error, tmp_path) == full
    with Store(tmp_path / "s.sqlite") as store, pytest.raises(InputError) as refused, store._told():
        raise error
    assert ("the disk is full" in str(refused.value)) == full


def test_an_io_error_of_a_disk_with_room_is_none(tmp_path: Path) -> None:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorname = "SQLITE_IOERR_READ"
    assert not is_full_disk(error, tmp_path) and not is_full_disk(ValueError(), tmp_path)
    assert is_full_disk(OSError(28, "No space left on device"), tmp_path)


# -- stores that came from elsewhere: sound points are taken over ----------------------------------


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
