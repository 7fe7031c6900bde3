"""The scenarios of every visitor, kept on disk beside the predictions: a reload or a restart loses none.

A row holds a scenario as the text of a link (`scenario_links.written`), which carries uploaded files where
they are short. It is untrusted like any link: whoever opens it builds the scenario under the usual limits.
What cannot be written now (a locked file, a full disk) waits in memory and is written later; a damaged file
is set aside, never deleted. No error of the file reaches a page: `problem` says what is wrong.
"""

from __future__ import annotations

import hashlib
import logging
import sqlite3
import threading
import time
from base64 import b32encode
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs

import streamlit as st
from msgspec import Struct

from moesim.app import scenario_links, state, visitors
from moesim.app.texts import escaped, money, written
from moesim.hwmodels.errors import InputError, MoesimError
from moesim.hwmodels.files import make_private_folder
from moesim.simulator.studies import result_cache
from moesim.simulator.studies.store import is_full_disk

FILE = "scenarios.sqlite"
MOST_PER_OWNER = 40
MOST_ROWS = 20_000
"""Limits on the scenarios of one visitor and of all; those changed longest ago are forgotten first."""
LINKS, MOST_LINKS = "short links", 5_000
"""Owner of the short links of everybody, and how many are kept."""
MOST_WAITING = 1_000
"""Most changes that wait in memory for a file that cannot be written; the oldest are given up."""
BUSY_S, PAUSE_S = 0.5, 5.0
"""Seconds to wait for another process that holds the file, and until it is tried again after an error."""
NOTICE_S = 600.0
"""Seconds for which it is said that a damaged file was set aside."""
DAMAGED = ("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_ERROR", "SQLITE_MISMATCH", "SQLITE_CONSTRAINT")
"""Errors that a sound file of ours does not give."""

TABLE = (
    "CREATE TABLE IF NOT EXISTS scenarios (owner TEXT, number TEXT, name TEXT, written TEXT, changed_s REAL, "
    "PRIMARY KEY (owner, number))"
)
COLUMNS = "number, name, written, changed_s"

T = TypeVar("T")

_lock = threading.RLock()
log = logging.getLogger("moesim.app")


class StoredScenario(Struct, frozen=True):
    """A scenario of a visitor: its id, name, the text of its link, and when it was changed (s since 1970).

    The first line of `name` is the name; the second has step and cost, where they were known.
    """

    number: str
    name: str
    written: str
    changed_s: float

    @property
    def title(self) -> str:
        """The name alone."""
        return self.name.partition("\n")[0]

    @property
    def figures(self) -> str:
        """Step and cost in words; empty where they were not known."""
        return self.name.partition("\n")[2]


_waiting: dict[tuple[str, str], StoredScenario | None] = {}
"""Changes that are not on disk yet, by visitor and id; None: removed."""
_connection: tuple[str, sqlite3.Connection] | None = None
"""The open database and its folder."""
_problem: str | None = None
"""What was wrong last."""
_failed_s: dict[str, float] = {}
"""When reading and when writing failed last (s of the monotonic clock)."""
_set_aside: tuple[str, float] | None = None
"""What was said when a damaged file was set aside, and when."""


def store_problem() -> str | None:
    """One sentence on why scenarios are not kept on disk now, or lists may miss some; None if all is well."""
    with _lock:
        if _problem is not None:
            return _problem
        recently = _set_aside is not None and time.monotonic() - _set_aside[1] < NOTICE_S
        return _set_aside[0] if _set_aside is not None and recently else None


def recent(owner: str) -> list[StoredScenario]:
    """The scenarios of a visitor, the one changed last first; those on disk only while it can be read."""

    def read(base: sqlite3.Connection) -> list[tuple[Any, ...]]:
        query = f"SELECT {COLUMNS} FROM scenarios WHERE owner = ? ORDER BY changed_s DESC LIMIT ?"
        return base.execute(query, (owner, MOST_PER_OWNER)).fetchall()

    with _lock:
        _flush()
        rows = _on_disk("read", read) or []
        found = {entry.number: entry for entry in map(_entry, rows) if entry is not None}
        for (of, number), entry in _waiting.items():
            if of == owner:
                found.pop(number, None)
                if entry is not None:
                    found[number] = entry
    return sorted(found.values(), key=lambda entry: -entry.changed_s)[:MOST_PER_OWNER]


def put(owner: str, number: str, name: str, written: str) -> None:
    """Store a scenario, or its new state; rows beyond the limits are removed."""
    name, written = (text.encode(errors="replace").decode() for text in (name, written))
    _change(owner, number, StoredScenario(number, name, written, time.time()))


def remove(owner: str, number: str) -> None:
    """Forget a scenario; another visitor's stays."""
    _change(owner, number, None)


def _change(owner: str, number: str, entry: StoredScenario | None) -> None:
    with _lock:
        _waiting.pop((owner, number), None)
        _waiting[owner, number] = entry
        while len(_waiting) > MOST_WAITING:
            del _waiting[next(iter(_waiting))]
        _flush()


def _flush() -> None:
    """Write what waits; where that fails it waits on."""
    if _waiting:
        _on_disk("write", _write)


def _on_disk(what: str, work: Callable[[sqlite3.Connection], T]) -> T | None:
    """Do `work` in one transaction; None, with `problem`, where the file fails, and for a while after that.

    The database is in memory where the cache is off. A damaged file is set aside and a new one begun.
    """
    global _problem
    if time.monotonic() - _failed_s.get(what, -PAUSE_S) < PAUSE_S:
        return None
    folder = str(result_cache.folder() or "")
    for _ in range(2):
        try:
            base = _connected(folder)
            with base:
                found = work(base)
        except (sqlite3.Error, OSError, UnicodeDecodeError) as error:
            _disconnect()
            _failed_s[what] = time.monotonic()
            _problem = _sentence(folder, error)
            log.warning("%s", _problem)
            damaged = getattr(error, "sqlite_errorname", "").startswith(DAMAGED)
            damaged = damaged or isinstance(error, UnicodeDecodeError)  # of the names of tables
            if not (folder and damaged and _put_aside(Path(folder) / FILE)):
                return None
        else:
            _failed_s.pop(what, None)
            if what == "write":
                _waiting.clear()
            if not _waiting:
                _problem = None
            return found
    return None


def _write(base: sqlite3.Connection) -> None:
    for (owner, number), entry in _waiting.items():
        base.execute("DELETE FROM scenarios WHERE owner = ? AND number = ?", (owner, number))
        if entry is not None:
            row = (owner, number, entry.name, entry.written, entry.changed_s)
            base.execute("INSERT INTO scenarios VALUES (?, ?, ?, ?, ?)", row)
            base.execute(
                "DELETE FROM scenarios WHERE owner = ? AND number NOT IN (SELECT number FROM scenarios "
                "WHERE owner = ? ORDER BY changed_s DESC LIMIT ?)",
                (owner, owner, MOST_LINKS if owner == LINKS else MOST_PER_OWNER),
            )
    base.execute(
        "DELETE FROM scenarios WHERE rowid NOT IN (SELECT rowid FROM scenarios "
        "ORDER BY changed_s DESC LIMIT ?)",
        (MOST_ROWS,),
    )


def _entry(row: tuple[Any, ...]) -> StoredScenario | None:
    """The scenario of a row; None where a damaged file holds something else in it."""
    number, name, written, changed_s = row
    if not all(isinstance(text, str) for text in row[:3]) or not isinstance(changed_s, int | float):
        return None
    return StoredScenario(number, name, written, changed_s)


def _connected(folder: str) -> sqlite3.Connection:
    """The open database of a folder; raises OSError and sqlite3.Error."""
    global _connection
    if _connection is not None and _connection[0] == folder:
        return _connection[1]
    _disconnect()
    if folder:
        make_private_folder(Path(folder))
    path = Path(folder) / FILE if folder else ":memory:"
    base = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)
    base.text_factory = lambda data: data.decode(errors="replace")
    try:
        with base:
            base.execute(TABLE)
            (state,) = base.execute("PRAGMA integrity_check(1)").fetchone()
        if state != "ok":  # as where a row is missing from the index: it would never be found
            damage = sqlite3.DatabaseError(str(state).splitlines()[-1][:200] if state else "damaged")
            damage.sqlite_errorname = "SQLITE_CORRUPT"
            raise damage
    except BaseException:
        base.close()
        raise
    _connection = folder, base
    return base


def _disconnect() -> None:
    global _connection
    if _connection is not None:
        with suppress(sqlite3.Error):
            _connection[1].close()
    _connection = None


def _put_aside(path: Path) -> bool:
    """Give a damaged file another name, so that a new one can be begun; its sound rows are taken over."""
    global _set_aside
    rows = _sound_rows(path)
    kept = path.with_name(f"{path.name}.damaged-{time.time_ns()}")
    try:
        path.replace(kept)
        for end in ("-journal", "-wal", "-shm"):
            path.with_name(f"{path.name}{end}").unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s cannot be set aside: %s", path, error)
        return False
    for owner, entry in rows:
        _waiting.setdefault((owner, entry.number), entry)
    _set_aside = (
        f"the file of kept scenarios was damaged; it is now {kept}. {len(rows)} scenarios could be read "
        "from it; lists may miss others",
        time.monotonic(),
    )
    log.warning("%s", _set_aside[0])
    return True


def _sound_rows(path: Path) -> list[tuple[str, StoredScenario]]:
    """(visitor, scenario) of the rows that can be read before the damage."""
    found: list[tuple[str, StoredScenario]] = []
    with suppress(sqlite3.Error, UnicodeDecodeError), closing(sqlite3.connect(path, timeout=BUSY_S)) as base:
        base.text_factory = lambda data: data.decode(errors="replace")
        for owner, *row in base.execute(f"SELECT owner, {COLUMNS} FROM scenarios LIMIT {MOST_ROWS}"):
            entry = _entry(tuple(row))
            if entry is not None and isinstance(owner, str):
                found.append((owner, entry))
    return found


def _sentence(folder: str, error: Exception) -> str:
    """What is wrong and what helps, for a page."""
    where = Path(folder) / FILE
    if is_full_disk(error, where.parent):
        why = "the disk is full: make room"
    elif getattr(error, "sqlite_errorname", "").startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        why = "another process holds it"
    else:
        why = str(getattr(error, "strerror", None) or error)
    return f"your scenarios are kept in memory only for now, and lists may miss some: {where}: {why}"


# -- scenario list -----------------------------------------------------------------------------------
# A visitor's scenarios as objects: the current one is stored as it changes; others can be opened again.


def remember() -> None:
    """Store the current scenario, if it or its figures changed since; a preset as shipped is not stored."""
    number, preset, texts = state.object_id(), state.preset(), state.overrides()
    if not texts and not preset.startswith("upload-"):
        return
    name = "\n".join(filter(None, (state.title(), figures())))
    shown = (number, preset, texts, name)
    if st.session_state.get("remembered") != shown:
        st.session_state["remembered"] = shown
        put(visitors.current(), number, name, scenario_links.written(preset, texts))


def figures() -> str:
    """Step and cost of the current scenario in words; empty where they are not known."""
    with suppress(MoesimError):
        result = state.known_result(state.current())
        if result is not None:
            fit = "" if result.memory.fits else ", does not fit"
            step = written("step_time_s", result.step.time_s)
            return f"{step} a step, {money(result.run.cost_usd)}{fit}"
    return ""


def notice() -> None:
    """Say in one sentence where the visitor's scenarios cannot be kept; the page works all the same."""
    problem = store_problem()
    if problem is not None:
        st.warning(escaped(problem), icon=":material/warning:")


# -- short links -------------------------------------------------------------------------------------
# The server keeps a page's address under a short code; the long address needs no server.

SHORT = "link"
"""Query parameter with the code of a short link."""


def short_link(query: str) -> str | None:
    """The code under which an address is kept, the same for equal addresses; None where nothing is kept."""
    digest = hashlib.sha256(query.encode()).digest()
    code = b32encode(digest)[:10].decode().lower()
    put(LINKS, code, "", query)
    with _lock:
        return None if (LINKS, code) in _waiting else code


def open_short_link() -> None:
    """Replace the code of a short link in the address by the address that it stands for."""
    code = st.query_params.get(SHORT)
    if code is None:
        return
    del st.query_params[SHORT]

    def read(base: sqlite3.Connection) -> Any:
        query = "SELECT written FROM scenarios WHERE owner = ? AND number = ?"
        return base.execute(query, (LINKS, code[:40])).fetchone() or ("",)

    with _lock:
        waits = _waiting.get((LINKS, code))
        found = (waits.written,) if waits is not None else _on_disk("read", read)
    if found is None or not found[0]:
        why = "it cannot be read now" if found is None else "this server no longer knows it"
        st.session_state[state.LINK_PROBLEM] = f"The short link {code[:40]} cannot be opened: {why}."
        return
    st.query_params.from_dict(parse_qs(str(found[0])))


def open_recent(number: str) -> None:
    """Make a stored scenario the current one; one that cannot be read is forgotten, and that is said."""
    found = next((entry for entry in recent(visitors.current()) if entry.number == number), None)
    if found is None:
        return
    try:
        preset, texts = scenario_links.read(found.written)
    except InputError as error:
        remove(visitors.current(), number)
        st.session_state[state.LINK_PROBLEM] = f"{found.title} cannot be opened any more: {error}"
        return
    st.session_state["scenario id"] = number
    state.open_scenario(preset, texts)


def duplicate() -> None:
    """Make a copy of the current scenario the current one, under a name of its own."""
    name = state.title()
    state.open_scenario(state.preset(), state.overrides(), new=True)
    state.rename(f"{name} copy")


def forget(number: str) -> None:
    """Remove a scenario from the list; the current one stays open."""
    remove(visitors.current(), number)


# -- pinned ------------------------------------------------------------------------------------------
# Scenarios that a visitor pinned to compare with, held in the session and in the address.

MOST = 4
"""Scenarios that are compared at most: the pinned ones and the current one."""

PARAMETER = "with"
"""Query parameter of a pinned scenario, as `scenario_links.written` writes it."""

_WRITTEN = "pins written"
"""Session key with what the address was given last, which may come back once more after an unpin."""

Kept = tuple[str, str, tuple[str, ...]]
"""A pinned scenario: name, preset, changes."""


def pinned() -> list[Kept]:
    """The pinned scenarios, in the order of pinning; the first is A."""
    found: list[Kept] = st.session_state.setdefault("kept", [])
    return found


def synchronise() -> None:
    """Take the pinned scenarios of a shared link over, and write a changed list back into the address."""
    given = st.query_params.get_all(PARAMETER)
    if given and not pinned() and given != st.session_state.get(_WRITTEN):
        for text in given[: MOST - 1]:
            try:
                preset, texts = scenario_links.read(text)
            except InputError as error:
                st.error(escaped(f"The link's parameter {PARAMETER} {error}."))
                return
            pinned().append((state.title_of(preset, texts), preset, texts))
    wanted = [scenario_links.written(preset, texts) for _, preset, texts in pinned()]
    st.session_state[_WRITTEN] = wanted
    if wanted != given:
        if wanted:
            st.query_params[PARAMETER] = wanted
        else:
            del st.query_params[PARAMETER]


def current() -> Kept:
    """The current scenario as it would be pinned."""
    return state.title(), state.preset(), state.overrides()


def pin() -> None:
    """Pin the current scenario."""
    mine = current()
    if len(pinned()) < MOST - 1 and all(kept[1:] != mine[1:] for kept in pinned()):
        pinned().append(mine)


def pin_all(texts: Sequence[str]) -> None:
    """Pin exactly these scenarios, each as `scenario_links.written` writes it."""
    pinned().clear()
    for text in texts[: MOST - 1]:
        preset, changes = scenario_links.read(text)
        pinned().append((state.title_of(preset, changes), preset, changes))


def unpin(number: int) -> None:
    """Remove a pinned scenario."""
    del pinned()[number]
