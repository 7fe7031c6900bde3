"""Takes the points of another sweep's store into one, and copies a store: for files that came from elsewhere.

Nothing of a foreign file is trusted: it is read without writing to it, its tables must be exactly those of a
store, and only rows whose digests fit go into the other store.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

from moesim.hwmodels.errors import InputError
from moesim.simulator.studies.outcome import Key
from moesim.simulator.studies.store import COLUMNS, SCHEMA, TABLES, Store, digest, outcome_of, unpacked
from moesim.version import __version__

MOST_ROWS = 100_000
"""Most points that are taken from one file."""
MOST_ROW_BYTES = 4_000_000
"""Largest compressed prediction of a row; the home case has 7 kB."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Numbers of points of a file: new ones that were taken, known ones, and damaged ones that were left."""

    new: int
    known: int
    damaged: int


def take_over(source: Path, into: Store) -> Taken:
    """Put the sound points of the store `source` into another one, which keeps those that it has.

    Raises InputError for a file that is not a store, that holds anything besides, or of another version.
    """
    new = known = damaged = 0
    with _opened(source) as db:
        _check(db, source)
        columns = ", ".join((*COLUMNS, "row_digest", "result", "result_digest"))
        rows = db.execute(
            f"SELECT {columns} FROM results WHERE length(result) <= {MOST_ROW_BYTES} LIMIT {MOST_ROWS}"
        )
        for row in rows:
            texts, (row_digest, packed, result_digest) = row[: len(COLUMNS)], row[len(COLUMNS) :]
            outcome = outcome_of(texts)
            key = Key(*map(str, texts[1:4]))
            sound = digest(*texts) == row_digest and digest(packed) == result_digest
            text = unpacked(packed) if sound else None
            if outcome is None or text is None or key.text != texts[0] or key.version != __version__:
                damaged += 1
            elif into.put(key, str(texts[4]), replace(outcome, result=text)):
                new += 1
            else:
                known += 1
    return Taken(new, known, damaged)


def copied(source: Path, to: Path) -> None:
    """Write a store as one file without a log beside it; sweeps may write to it meanwhile.

    Raises InputError where it cannot be read or the copy cannot be written.
    """
    with _opened(source, immutable=False) as db:
        db.execute("VACUUM INTO ?", (str(to),))


@contextmanager
def _opened(path: Path, immutable: bool = True) -> Iterator[sqlite3.Connection]:
    """The file, read only, with SQLite's errors as InputError."""
    address = f"file:{quote(str(path.resolve()))}?mode=ro{'&immutable=1' if immutable else ''}"
    try:
        with closing(sqlite3.connect(address, uri=True, timeout=30.0)) as db:
            db.text_factory = lambda data: data.decode(errors="replace")
            db.execute("PRAGMA trusted_schema = OFF")
            db.execute("PRAGMA cell_size_check = ON")
            yield db
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise InputError(f"store {path}: this is no sound store of a sweep ({error})") from None


def _check(db: sqlite3.Connection, path: Path) -> None:
    """Raise InputError unless the file has exactly the tables of a store of this version."""
    found = {
        str(name): " ".join(str(sql).split())
        for kind, name, sql in db.execute("SELECT type, name, sql FROM sqlite_master LIMIT 20")
        if not (kind == "index" and str(name).startswith("sqlite_autoindex_"))
    }
    wanted = {}
    for statement in filter(str.strip, TABLES.split(";")):
        sql = " ".join(statement.split()).replace("IF NOT EXISTS ", "")
        wanted[sql.split()[2]] = sql
    if found != wanted:
        raise InputError(
            f"store {path}: its tables are not those of a sweep's store; give a file that a sweep wrote"
        )
    meta = dict(db.execute("SELECT name, substr(value, 1, 20) FROM meta LIMIT 20"))
    schema, version = meta.get("schema"), meta.get("version")
    if schema != str(SCHEMA) or version != __version__:
        raise InputError(
            f"store {path}: written by moesim {version} (layout {schema}), this is {__version__} "
            f"(layout {SCHEMA}); results may differ between versions"
        )
