"""The scenarios of every visitor, kept on disk beside the predictions: a reload or a restart loses none.

A row holds a scenario as the text of a link (`scenario_links.written`), which carries uploaded files where
they are short. It is untrusted like any link: whoever opens it builds the scenario under the usual limits.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from moesim.simulator.studies import result_cache

FILE = "scenarios.sqlite"
MOST_PER_OWNER = 40
MOST_ROWS = 20_000
"""Limits on the scenarios of one visitor and of all; those changed longest ago are forgotten first."""

_lock = threading.Lock()
log = logging.getLogger("moesim.app")


@dataclass(frozen=True, slots=True)
class StoredScenario:
    """A scenario of a visitor: its id, name, the text of its link, and when it was changed (s since 1970)."""

    number: str
    name: str
    written: str
    changed_s: float


def recent(owner: str) -> list[StoredScenario]:
    """The scenarios of a visitor, the one changed last first."""
    with _opened() as base:
        rows = base.execute(
            "SELECT number, name, written, changed_s FROM scenarios WHERE owner = ? "
            "ORDER BY changed_s DESC LIMIT ?",
            (owner, MOST_PER_OWNER),
        ).fetchall()
    return [StoredScenario(*row) for row in rows]


def put(owner: str, number: str, name: str, written: str) -> None:
    """Store a scenario, or its new state; rows beyond the limits are removed."""
    with _opened() as base:
        base.execute(
            "INSERT OR REPLACE INTO scenarios VALUES (?, ?, ?, ?, ?)",
            (owner, number, name, written, time.time()),
        )
        base.execute(
            "DELETE FROM scenarios WHERE owner = ? AND number NOT IN (SELECT number FROM scenarios "
            "WHERE owner = ? ORDER BY changed_s DESC LIMIT ?)",
            (owner, owner, MOST_PER_OWNER),
        )
        base.execute(
            "DELETE FROM scenarios WHERE rowid NOT IN (SELECT rowid FROM scenarios "
            "ORDER BY changed_s DESC LIMIT ?)",
            (MOST_ROWS,),
        )


def remove(owner: str, number: str) -> None:
    """Forget a scenario; another visitor's stays."""
    with _opened() as base:
        base.execute("DELETE FROM scenarios WHERE owner = ? AND number = ?", (owner, number))


@contextmanager
def _opened() -> Iterator[sqlite3.Connection]:
    """The database, in one transaction; in memory where the cache is off or its folder cannot be written."""
    with _lock:
        base = _base(str(result_cache.folder() or ""))
        with base:
            yield base


@lru_cache(maxsize=4)
def _base(folder: str) -> sqlite3.Connection:
    try:
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            return _prepared(sqlite3.connect(Path(folder) / FILE, timeout=2.0, check_same_thread=False))
    except (OSError, sqlite3.Error) as error:
        log.warning("scenarios are kept in memory only: %s", error)
    return _prepared(sqlite3.connect(":memory:", check_same_thread=False))


def _prepared(base: sqlite3.Connection) -> sqlite3.Connection:
    with closing(base.cursor()) as cursor:
        cursor.execute(
            "CREATE TABLE IF NOT EXISTS scenarios (owner TEXT, number TEXT, name TEXT, written TEXT, "
            "changed_s REAL, PRIMARY KEY (owner, number))"
        )
    return base
