"""The durable store of a sweep: one SQLite file with one row for each point, written when it is known."""

from __future__ import annotations

import errno
import hashlib
import json
import sqlite3
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, cast, get_args
from urllib.parse import quote

from msgspec import Struct

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import check_writable
from moesim.version import __version__

# -- outcome -----------------------------------------------------------------------------------------
# The key and the outcome of a point of a sweep, as a store keeps them; imports nothing that predicts.

Status = Literal["ok", "does not fit", "infeasible", "illegal", "failed"]
"""`does not fit`: the prediction needs more memory than a GPU has. `infeasible` and `illegal`: the scenario
was refused with a reason. `failed`: the program or its process broke."""


class Key(Struct, frozen=True):
    """Hashes of everything that a prediction depends on; equal keys mean equal results."""

    scenario: str
    calibration: str
    version: str

    @property
    def text(self) -> str:
        """The key as one text."""
        return f"{self.scenario}-{self.calibration[:16]}-{self.version}"


@dataclass(frozen=True, slots=True)
class PointOutcome:
    """The outcome of a point; `result` is the prediction as JSON, empty if there is none.

    `work_s`: seconds of computing it, 0 if it was not computed here; they are no part of the result.
    """

    status: Status
    reason: str
    figures: dict[str, float | bool | None]
    result: str
    work_s: float = field(default=0.0, compare=False)


SCHEMA = 2
"""Version of the table layout; a store with another layout is refused."""

BUSY_S = 30.0
"""Seconds to wait for another process that writes to the same store."""

MOST_RESULT_BYTES = 64_000_000
"""Largest prediction as JSON; a compressed row that expands to more is damaged."""

TABLES = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS results (
    key TEXT PRIMARY KEY, scenario_hash TEXT NOT NULL, calibration_hash TEXT NOT NULL, version TEXT NOT NULL,
    scenario TEXT NOT NULL, status TEXT NOT NULL, reason TEXT NOT NULL, figures TEXT NOT NULL,
    result BLOB NOT NULL, row_digest TEXT NOT NULL, result_digest TEXT NOT NULL
);
"""


class Store:
    """Outcomes by key. Every `put` is one transaction that is on disk when it returns.

    A write-ahead log preserves committed rows even if a process is killed at any moment. If two sweeps
    compute the same point, the first outcome is kept. Every row carries digests of its content; a damaged row
    is removed when it is read, so that its point is computed again. Raises InputError for a file that is not
    a store, is of another version or cannot be written, and for a full disk.
    """

    def __init__(self, path: Path, *, durable: bool = True, busy_s: float = BUSY_S) -> None:
        """Open the store, or create it.

        `durable`: rows survive a power cut, not only the end of the process. `busy_s`: seconds to wait for
        another process.
        """
        self.path, self._durable, self._busy_s = path, durable, busy_s
        check_writable(path, "store")
        with self._told():
            self._db = sqlite3.connect(path, timeout=busy_s, isolation_level=None)
            self._db.text_factory = _text  # the digest detects damaged text
            try:
                self._open()
            except BaseException:
                self._db.close()
                raise

    def _open(self) -> None:
        known = {row[0] for row in self._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if known and not {"meta", "results"} <= known:
            raise InputError(
                f"store {self.path}: a database of something else (tables {', '.join(sorted(known))})"
            )
        if not known:
            self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute(f"PRAGMA synchronous = {'FULL' if self._durable else 'NORMAL'}")
        self._db.execute("BEGIN IMMEDIATE")  # two sweeps may create the store at the same time
        for statement in filter(str.strip, TABLES.split(";")):
            self._db.execute(statement)
        for name, value in (("schema", str(SCHEMA)), ("version", __version__)):
            self._db.execute("INSERT OR IGNORE INTO meta VALUES (?, ?)", (name, value))
        self._db.execute("COMMIT")
        meta = dict(self._db.execute("SELECT name, value FROM meta"))
        schema, version = str(meta.get("schema"))[:20], str(meta.get("version"))[:20]
        if schema != str(SCHEMA) or version != __version__:
            raise InputError(
                f"store {self.path}: written by moesim {version} (layout {schema}), this is "
                f"{__version__} (layout {SCHEMA}); results may differ between versions: use a new file"
            )

    def get(self, key: Key) -> PointOutcome | None:
        """The outcome of a key without the prediction itself (see `result`); None if the key is unknown."""
        columns = ", ".join(COLUMNS)
        with self._told():
            row = self._db.execute(
                f"SELECT {columns}, row_digest FROM results WHERE key = ?", (key.text,)
            ).fetchone()
        if row is None:
            return None
        found = outcome_of(row[:-1]) if digest(*row[:-1]) == row[-1] else None
        if found is None:
            self.forget(key)
        return found

    def result(self, key: Key) -> str:
        """The prediction of a key as JSON; empty if there is none."""
        with self._told():
            row = self._db.execute(
                "SELECT result, result_digest FROM results WHERE key = ?", (key.text,)
            ).fetchone()
        if row is None:
            return ""
        found = unpacked(row[0]) if digest(row[0]) == row[1] else None
        if found is None:
            self.forget(key)
        return found or ""

    def forget(self, key: Key) -> None:
        """Remove the row of a key."""
        with self._told():
            self._db.execute("DELETE FROM results WHERE key = ?", (key.text,))

    def put(self, key: Key, name: str, outcome: PointOutcome) -> bool:
        """Write an outcome; returns False, and changes nothing, if the key exists already."""
        texts = (
            key.text,
            key.scenario,
            key.calibration,
            key.version,
            name,
            outcome.status,
            outcome.reason,
            json.dumps(outcome.figures),
        )
        packed = zlib.compress(outcome.result.encode())
        row = (*texts, packed, digest(*texts), digest(packed))
        with self._told():
            marks = ", ".join("?" * len(row))
            return self._db.execute(f"INSERT OR IGNORE INTO results VALUES ({marks})", row).rowcount == 1

    def count(self) -> int:
        """Number of points in the store."""
        with self._told():
            return int(self._db.execute("SELECT count(*) FROM results").fetchone()[0])

    def shrink(self, most_bytes: int) -> None:
        """Remove the older half of the rows if they take more than `most_bytes`; their room is reused."""
        with self._told():
            size, pages, free = (
                self._db.execute(f"PRAGMA {name}").fetchone()[0]
                for name in ("page_size", "page_count", "freelist_count")
            )
            if size * (pages - free) > most_bytes:
                self._db.execute(
                    "DELETE FROM results WHERE rowid <= (SELECT rowid FROM results ORDER BY rowid "
                    "LIMIT 1 OFFSET (SELECT count(*) / 2 FROM results))"
                )

    def close(self) -> None:
        """Release the file."""
        self._db.close()

    def __enter__(self) -> Self:
        """The store itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self.close()

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Turn SQLite's errors into InputError."""
        try:
            yield
        except UnicodeDecodeError:  # Python reads names of tables and SQLite's messages strictly
            raise InputError(f"store {self.path}: the file is damaged; give another file name") from None
        except sqlite3.Error as error:
            name = getattr(error, "sqlite_errorname", "")
            if is_full_disk(error, self.path.parent):
                text = "the disk is full; what was written before is safe: make room and start again"
            elif name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
                text = (
                    f"another process has held it for {self._busy_s:.0f} s; try again when that one has ended"
                )
            elif name.startswith("SQLITE_NOTADB"):
                text = "this is no store of a sweep; give another file name"
            else:
                text = f"cannot be read or written: {error}"
            raise InputError(f"store {self.path}: {text}") from None


def is_full_disk(error: Exception, folder: Path) -> bool:
    """Whether an error of SQLite or of a file in `folder` means that its disk, or a quota, is full.

    SQLite says "disk I/O error" where the log beside a database cannot grow: a file that is tried says why.
    """
    full = (errno.ENOSPC, errno.EDQUOT)
    if getattr(error, "errno", None) in full:
        return True
    name = getattr(error, "sqlite_errorname", "")
    if not name.startswith("SQLITE_IOERR"):
        return bool(name.startswith("SQLITE_FULL"))
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 16))
            file.flush()
    except OSError as tried:
        return tried.errno in full
    return False


COLUMNS = ("key", "scenario_hash", "calibration_hash", "version", "scenario", "status", "reason", "figures")
"""The columns of a row that its first digest covers."""


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def digest(*values: object) -> str:
    """Digest of texts and bytes, which includes their types, so that any other value changes it."""
    found = hashlib.blake2b(digest_size=16)
    for value in values:
        data = value if isinstance(value, bytes) else str(value).encode(errors="replace")
        found.update(f"{type(value).__name__} {len(data)}\n".encode() + data)
    return found.hexdigest()


def outcome_of(row: Sequence[object]) -> PointOutcome | None:
    """The outcome that a row's texts hold; None if they are malformed."""
    status, reason, text = row[-3:]
    try:
        figures = json.loads(str(text))
    except (ValueError, RecursionError):
        return None
    if status not in get_args(Status) or not isinstance(figures, dict):
        return None
    return PointOutcome(cast("Status", status), str(reason), figures, "")


def unpacked(data: object) -> str | None:
    """Decompress a text of at most MOST_RESULT_BYTES; None for anything else."""
    if not isinstance(data, bytes):
        return None
    unzip = zlib.decompressobj()
    try:
        text = unzip.decompress(data, MOST_RESULT_BYTES)
        return text.decode() if unzip.eof else None
    except (zlib.error, UnicodeDecodeError):
        return None


# -- store transfer ----------------------------------------------------------------------------------
# Takes the points of another sweep's store into one, and copies a store: for files that came from
# elsewhere.
#
# Nothing of a foreign file is trusted: it is read without writing to it, its tables must be exactly
# those of a store, and only rows whose digests fit go into the other store.

MOST_ROWS = 100_000
"""Most points that are taken from one file."""
MOST_ROW_BYTES = 4_000_000
"""Largest compressed prediction of a row; the home case has 7 kB."""


class Taken(Struct, frozen=True):
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
        # The file must have exactly the tables of a store of this version.
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
                f"store {source}: its tables are not those of a sweep's store; give a file that a sweep wrote"
            )
        meta = dict(db.execute("SELECT name, substr(value, 1, 20) FROM meta LIMIT 20"))
        schema, version = meta.get("schema"), meta.get("version")
        if schema != str(SCHEMA) or version != __version__:
            raise InputError(
                f"store {source}: written by moesim {version} (layout {schema}), this is {__version__} "
                f"(layout {SCHEMA}); results may differ between versions"
            )
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
