"""The list of every visitor's searches, sweeps and simulations: running ones, and results until closed.

An entry belongs to one visitor, and nobody else can see or stop it; two visitors who ask for the same share
one job, which ends when both have stopped it. Everything here may be called from any thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import count
from typing import Any, Literal

from msgspec import Struct, field

from moesim.app import jobs
from moesim.app.jobs import Job, JobError, JobProgress
from moesim.hwmodels.errors import MoesimError

MOST_ENTRIES = 12
"""Most entries of one visitor; the oldest finished one makes room."""
MOST_OF_ALL = 400
"""Most entries of all visitors together."""
MOST_RUNNING = 8
"""Most jobs of one visitor that run or wait."""
GONE_S = 900.0
"""A visitor of whom nothing was heard for this long has left; then running jobs are stopped."""
KEPT_S = 24 * 3600.0
"""Finished entries of a visitor who left are forgotten after this."""
SHOWN_AFTER_S = 1.0
"""Work beside a page is listed where it takes longer than this."""

State = Literal["waiting", "running", "done", "stopped", "failed"]


class JobOrigin(Struct, frozen=True):
    """Where a job was started, so that its page can be opened again as it was."""

    title: str
    scenario: str = ""
    page: str = ""
    preset: str = ""
    changes: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    """The form fields of the page, as in the address."""


class TrayEntry(Struct):
    """One job of a visitor."""

    number: int
    visitor: str
    key: str
    origin: JobOrigin
    passing: bool = False
    """Whether the page shows the result by itself, so that the entry goes when the job is done."""
    began: float = field(default_factory=time.monotonic)
    took_s: float = 0.0
    error: MoesimError | None = None
    told: bool = False
    """Whether the page has shown the error."""
    job: Job | None = None
    """The job until its end was seen; the result is then in the cache alone."""
    ended: State | None = None

    @property
    def state(self) -> State:
        """What the job does, or how it ended."""
        if self.ended is not None:
            return self.ended
        assert self.job is not None
        if self.job.done:
            return "done" if self.job.error is None else "failed"
        return "waiting" if self.job.started is None else "running"

    @property
    def is_open(self) -> bool:
        """Whether the job still waits or runs."""
        return self.state in ("waiting", "running")

    @property
    def progress(self) -> JobProgress:
        """The progress of a job that is not yet over."""
        return JobProgress() if self.job is None else self.job.progress

    @property
    def elapsed_s(self) -> float:
        """Seconds that the job has computed."""
        return self.took_s if self.job is None else self.job.elapsed_s

    @property
    def left_s(self) -> float | None:
        """Seconds that are left if the rest goes on as before; None where that is not known."""
        share = self.progress.share
        if self.state != "running" or share is None or share < 0.02 or self.elapsed_s < 1.0:
            return None
        return self.elapsed_s * (1.0 - share) / share


class Tray:
    """All entries, by visitor."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start empty; `clock` gives seconds."""
        self._clock, self._lock, self._numbers = clock, threading.RLock(), count(1)
        self._entries: dict[str, list[TrayEntry]] = {}
        self._seen: dict[str, float] = {}
        self._watcher: threading.Thread | None = None

    def start(
        self,
        visitor: str,
        origin: JobOrigin,
        key: str,
        function: Callable[..., Any],
        *args: Any,
        budget_s: float | None = None,
    ) -> TrayEntry:
        """Start a job in the long lane, or take up the visitor's own one of the same key.

        Raises JobError where the visitor or the server has too many jobs already.
        """
        with self._lock:
            self.seen(visitor)
            before = self.find(visitor, key)
            if before is not None and before.is_open:
                return before
            running = sum(entry.is_open for entry in self._entries.get(visitor, ()))
            if running >= MOST_RUNNING:
                raise JobError(
                    f"{running} of your computations run or wait already, and {MOST_RUNNING} may: stop one "
                    "of them, or wait until one is done"
                )
            job = jobs.submit(key, function, *args, lane="long", budget_s=budget_s)
            if before is not None:
                self._remove(before)
            return self._add(TrayEntry(next(self._numbers), visitor, key, origin, job=job))

    def beside(
        self, visitor: str, origin: JobOrigin, key: str, function: Callable[..., Any], *args: Any
    ) -> TrayEntry:
        """Start work that a page shows by itself once it is done; it is listed only while it runs."""
        with self._lock:
            self.seen(visitor)
            job = jobs.submit(key, function, *args, lane="beside")
            return self._add(TrayEntry(next(self._numbers), visitor, key, origin, passing=True, job=job))

    def give_up(self, entry: TrayEntry) -> None:
        """Stop work beside a page that the page does not need any more."""
        with self._lock:
            if entry.is_open:
                self._end(entry, "stopped")
            self._remove(entry)

    def of(self, visitor: str) -> list[TrayEntry]:
        """The entries of a visitor, the newest first."""
        with self._lock:
            self.seen(visitor)
            for entry in list(self._entries.get(visitor, ())):
                self._settle(entry)
            found: dict[str, TrayEntry] = {}
            for entry in reversed(self._entries.get(visitor, ())):
                if not entry.passing or entry.elapsed_s >= SHOWN_AFTER_S:
                    found.setdefault(entry.key, entry)  # two places of a page may share their work
            return list(found.values())

    def find(self, visitor: str, key: str) -> TrayEntry | None:
        """The visitor's entry of a result's key, or None."""
        with self._lock:
            own = [e for e in self._entries.get(visitor, ()) if e.key == key and not e.passing]
            if own:
                self._settle(own[0])
            return own[0] if own else None

    def known(self, visitor: str, key: str) -> bool:
        """Whether the result of a key is there, or being computed for this visitor."""
        found = self.find(visitor, key)
        return key in jobs.cache or (found is not None and found.is_open)

    def stop(self, visitor: str, number: int) -> None:
        """Stop a job of this visitor; a number of somebody else's changes nothing."""
        with self._lock:
            own = self._entries.get(visitor, [])
            keys = {entry.key for entry in own if entry.number == number}
            for entry in list(own):
                if entry.key in keys and entry.is_open:
                    self._end(entry, "stopped")
                    if entry.passing:
                        self._remove(entry)

    def close(self, visitor: str, number: int) -> None:
        """Remove an entry of this visitor, and stop its job where it still runs."""
        with self._lock:
            for entry in list(self._entries.get(visitor, ())):
                if entry.number == number:
                    self._remove(entry)

    def seen(self, visitor: str) -> None:
        """Note that the visitor is there."""
        with self._lock:
            if visitor in self._entries:
                self._seen[visitor] = self._clock()

    def expire(self) -> None:
        """Stop the jobs of visitors who left, and forget their results after a day."""
        with self._lock:
            now = self._clock()
            for visitor, last in list(self._seen.items()):
                for entry in list(self._entries.get(visitor, ())):
                    self._settle(entry)
                    if now - last > GONE_S and entry.is_open:
                        self._end(entry, "stopped", f"nobody had the page open for {GONE_S / 60:.0f} minutes")
                    if now - last > KEPT_S:
                        self._remove(entry)

    # -- inside the lock --------------------------------------------------------------------------------

    def _add(self, entry: TrayEntry) -> TrayEntry:
        own = self._entries.setdefault(entry.visitor, [])
        own.append(entry)
        self._seen[entry.visitor] = self._clock()
        if len(own) > MOST_ENTRIES:
            self._remove(next((e for e in own if not e.is_open), own[0]))
        everybody = [e for entries in self._entries.values() for e in entries]
        if len(everybody) > MOST_OF_ALL:
            over = [e for e in everybody if not e.is_open and e is not entry]
            if over:
                self._remove(min(over, key=lambda e: e.number))
        if self._watcher is None or not self._watcher.is_alive():
            self._watcher = threading.Thread(target=self._watch_over, daemon=True)
            self._watcher.start()
        return entry

    def _settle(self, entry: TrayEntry) -> None:
        """Note the end of a job, and keep its result in the cache until the entry is closed."""
        if entry.job is None or not entry.job.done:
            return
        entry.took_s, entry.error = entry.job.elapsed_s, entry.job.error
        cancelled, entry.ended = entry.job.cancelled, entry.state
        if cancelled and entry.error is not None:
            entry.ended, entry.error = "stopped", None
        entry.job = None
        if entry.passing:
            self._remove(entry)
        elif entry.ended == "done":
            jobs.cache.hold(entry.key)

    def _end(self, entry: TrayEntry, how: State, reason: str = "") -> None:
        assert entry.job is not None
        entry.took_s, entry.ended = entry.job.elapsed_s, how
        entry.error = JobError(reason) if reason else None
        entry.job.cancel()
        entry.job = None

    def _remove(self, entry: TrayEntry) -> None:
        own = self._entries.get(entry.visitor, [])
        if entry in own:
            own.remove(entry)
            if entry.job is not None:
                entry.job.cancel()
            if entry.ended == "done" and not entry.passing:
                jobs.cache.release(entry.key)
        if not own:
            self._entries.pop(entry.visitor, None)
            self._seen.pop(entry.visitor, None)

    def _watch_over(self) -> None:
        """Look now and then whether visitors left, as long as there are entries."""
        while True:
            time.sleep(min(30.0, GONE_S / 4))
            self.expire()
            with self._lock:
                if not self._entries:
                    self._watcher = None
                    return


tray = Tray()
"""The one tray of the server."""
