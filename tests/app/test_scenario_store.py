"""Whatever happens to the file of kept scenarios, pages work, nothing is lost, and one sentence says so."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("streamlit", reason="streamlit is not installed")

from streamlit.testing import v1 as testing

from moesim.app import pages, scenario_store

PAGE = """
from moesim.app import scenario_store, state
from moesim.app.views import scenario_header
state.synchronise()
scenario_header.show()
state.publish()
scenario_store.remember()
scenario_store.notice()
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a server, with one scenario in it."""
    monkeypatch.setenv("MOESIM_CACHE", str(tmp_path))
    monkeypatch.setattr(scenario_store, "PAUSE_S", 0.0)
    monkeypatch.setattr(scenario_store, "BUSY_S", 0.05)
    restart()
    scenario_store.put("one", "1", "first", "[]")
    yield tmp_path / scenario_store.FILE
    restart()


def restart() -> None:
    """What a new process begins with."""
    scenario_store._disconnect()
    scenario_store._waiting.clear()
    scenario_store._failed_s.clear()
    scenario_store._problem = scenario_store._set_aside = None


def names(owner: str = "one") -> list[str]:
    return [entry.name for entry in scenario_store.recent(owner)]


def page_works() -> list[str]:
    """Draw a page with a change that is to be kept; what it warns of."""
    app = testing.AppTest.from_string(PAGE, default_timeout=120)
    app.query_params["preset"], app.query_params["set"] = pages.HOME, ["communication.sms=8"]
    app.run()
    assert not app.exception
    return [warning.value for warning in app.warning]


@pytest.mark.long
def test_a_locked_file_delays_and_loses_nothing(file: Path) -> None:
    holder = sqlite3.connect(file, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    scenario_store.put("one", "2", "second", "[]")
    scenario_store.remove("one", "1")
    assert names() == ["second"]
    assert "another process holds it" in (scenario_store.store_problem() or "")
    assert any("kept in memory only" in text and "another process" in text for text in page_works())
    holder.execute("ROLLBACK")
    holder.close()
    assert names() == ["second"] and scenario_store.store_problem() is None
    restart()
    assert names() == ["second"], "what waited is on disk"
    assert not page_works()


def test_a_full_disk_delays_and_loses_nothing(file: Path) -> None:
    """SQLite's own limit on pages gives the same error as a full disk."""
    assert scenario_store._connection is not None
    base, before = scenario_store._connection[1], scenario_store._connected
    limit = "PRAGMA max_page_count = "
    base.execute(f"{limit}{base.execute('PRAGMA page_count').fetchone()[0]}")

    def limited(folder: str) -> sqlite3.Connection:
        found = before(folder)
        found.execute(f"{limit}1")  # which SQLite raises to what the file has
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scenario_store, "_connected", limited)
        for number in range(9):
            scenario_store.put("one", f"large {number}", "large", "x" * 4_000)
        assert len(names()) == 10
        assert "the disk is full: make room" in (scenario_store.store_problem() or "")
        assert any("the disk is full" in text for text in page_works())
    assert len(names()) == 10 and scenario_store.store_problem() is None
    restart()
    assert len(names()) == 10


def no_database(file: Path) -> None:
    file.write_bytes(b"no database " * 1_000)


def damaged_pages(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[4_096:] = b"\xff" * (len(data) - 4_096)
    file.write_bytes(data)


def another_table(file: Path) -> None:
    with sqlite3.connect(file) as base:
        base.execute("DROP TABLE scenarios")
        base.execute("CREATE TABLE scenarios (something TEXT)")
    base.close()


@pytest.mark.parametrize("harm", [no_database, damaged_pages, another_table])
def test_a_damaged_file_is_set_aside(file: Path, harm: Callable[[Path], None]) -> None:
    restart()
    harm(file)
    bad = file.read_bytes()
    scenario_store.put("one", "2", "second", "[]")
    assert "second" in names()
    (kept,) = file.parent.glob(f"{file.name}.damaged-*")
    assert kept.read_bytes() == bad, "nothing of it is deleted"
    assert str(kept) in (scenario_store.store_problem() or "")
    assert any("was damaged" in text for text in page_works())
    restart()
    assert "second" in names() and scenario_store.store_problem() is None


def test_sound_rows_of_a_damaged_file_are_taken_over(file: Path) -> None:
    restart()
    with sqlite3.connect(file) as base:
        base.execute("CREATE TRIGGER harm BEFORE INSERT ON scenarios BEGIN SELECT missing(); END")
    base.close()
    scenario_store.put("one", "2", "second", "[]")
    assert names() == ["second", "first"]


@pytest.mark.parametrize("column", ["number", "name", "written", "changed_s"])
@pytest.mark.parametrize("value", [None, b"\xff\x00", 7])
def test_a_damaged_row_is_left_out(file: Path, column: str, value: object) -> None:
    with sqlite3.connect(file) as base:
        base.execute(f"UPDATE scenarios SET {column} = ?", (value,))
    base.close()
    scenario_store.put("one", "2", "second", "[]")
    assert names()[0] == "second" or "second" in names()
    assert all(isinstance(entry.changed_s, int | float) for entry in scenario_store.recent("one"))


def test_a_folder_that_cannot_be_written_to_keeps_them_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MOESIM_CACHE", str(tmp_path / "file" / "below"))
    restart()
    scenario_store.put("one", "1", "first", "[]")
    assert names() == ["first"] and "kept in memory only" in (scenario_store.store_problem() or "")
    restart()


def test_half_of_a_pair_of_characters_holds_nothing_up(file: Path) -> None:
    scenario_store.put("one", "2", "\ud800", "\ud800")
    scenario_store.put("one", "3", "third", "[]")
    assert names() == ["third", "?", "first"] and scenario_store.store_problem() is None


def test_waiting_changes_are_bounded(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenario_store, "_on_disk", lambda what, work: None)
    for number in range(scenario_store.MOST_WAITING + 5):
        scenario_store.put(str(number), "1", "name", "[]")
    assert len(scenario_store._waiting) == scenario_store.MOST_WAITING and names("0") == []


def test_a_row_that_the_index_lacks_is_damage(file: Path) -> None:
    restart()
    with sqlite3.connect(file) as base:
        base.execute("PRAGMA writable_schema = ON")
        root = base.execute("SELECT rootpage FROM sqlite_master WHERE type = 'index'").fetchone()[0]
    base.close()
    data, page = bytearray(file.read_bytes()), 4_096 * (root - 1)
    data[page + 3 : page + 5] = b"\x00\x00"  # no cells on the page of the index
    file.write_bytes(data)
    scenario_store.put("one", "2", "second", "[]")
    assert names() == ["second", "first"] and "was damaged" in (scenario_store.store_problem() or "")
