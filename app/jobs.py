"""Long work off the script thread: one process a job, with progress, cancel, a time budget and a cache.

A job runs in a child of a warm server process that has imported the simulator once, so it starts in some
ten milliseconds, can be stopped at any moment, and gives all of its memory back. Results are shared by all
sessions and kept as bytes, so that the memory of the cache is known and bounded.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import moesim
from moesim.hwmodels.errors import InfeasibleError, InputError, MoesimError

CACHE_BYTES = 64_000_000
SHORT_BUDGET_S = 60.0
LONG_BUDGET_S = 600.0
MOST_WAITING = 64
"""Jobs of one lane that may wait for a free place; one more is refused."""

PRELOAD = ["moesim.app.work"]
"""Imported once by the server process that job processes are forked from."""

log = logging.getLogger("moesim.app")


class JobError(MoesimError):
    """A job that was cancelled, ran out of time, or failed for a reason that is not the visitor's input."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a job is: a share from 0 to 1 (None: unknown) and what it does."""

    share: float | None = None
    text: str = "waiting for a free processor"


class Cache:
    """The most recently used values, together at most `limit_bytes` of pickled bytes."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._values: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> Any:
        """The value, or None where there is none."""
        with self._lock:
            data = self._values.get(key)
            if data is not None:
                self._values.move_to_end(key)
        return None if data is None else pickle.loads(data)

    def put(self, key: str, data: bytes) -> None:
        """Keep pickled bytes; those not used for longest go. What is larger than the cache is not kept."""
        with self._lock:
            self.used_bytes -= len(self._values.pop(key, b""))
            if len(data) > self.limit_bytes:
                return
            self._values[key] = data
            self.used_bytes += len(data)
            while self.used_bytes > self.limit_bytes:
                self.used_bytes -= len(self._values.popitem(last=False)[1])


class Job:
    """One computation, shared by everybody who asked for the same key."""

    def __init__(self, key: str, budget_s: float) -> None:
        self.key, self.budget_s = key, budget_s
        self.progress = Progress()
        self.started: float | None = None
        self._wanted = 1
        self._stop = threading.Event()
        self._done = threading.Event()
        self._data: bytes | None = None
        self._error: MoesimError | None = None

    @property
    def done(self) -> bool:
        """Whether a value or an error is there."""
        return self._done.is_set()

    @property
    def cancelled(self) -> bool:
        """Whether nobody wants it any more."""
        return self._stop.is_set()

    def cancel(self) -> None:
        """Give up one claim; the process ends when nobody is left who wants the result."""
        with _lock:
            self._wanted -= 1
            if self._wanted <= 0:
                self._stop.set()
                _running.pop(self.key, None)

    def wait(self, timeout_s: float) -> bool:
        """Whether it is done within so many seconds."""
        return self._done.wait(timeout_s)

    def result(self, timeout_s: float | None = None) -> Any:
        """The value. Raises what the job raised; JobError where it was stopped or is not done in time."""
        if not self._done.wait(timeout_s):
            raise JobError("the computation is not done yet")
        if self._error is not None:
            raise self._error
        assert self._data is not None
        return pickle.loads(self._data)

    def _finish(self, data: bytes | None, error: MoesimError | None) -> None:
        self._data, self._error = data, error
        self._done.set()


_lock = threading.Lock()
_running: dict[str, Job] = {}
cache = Cache(CACHE_BYTES)


@dataclass(slots=True)
class _Lane:
    """Places for jobs of one kind: short ones that a page waits for, long ones that run beside."""

    places: threading.BoundedSemaphore
    niceness: int
    waiting: int = 0


_cores = os.cpu_count() or 1
_lanes = {
    "short": _Lane(threading.BoundedSemaphore(max(2, _cores)), 0),
    "long": _Lane(threading.BoundedSemaphore(max(1, _cores // 2)), 10),
}


def submit(
    key: str,
    function: Callable[..., Any],
    *args: Any,
    budget_s: float | None = None,
    lane: str = "short",
    with_progress: bool = False,
) -> Job:
    """Run `function(*args)` in a process of its own and return the job at once.

    `key` names the result: a finished value with the same key is returned from the cache, a running job is
    shared. `function` must be importable by name. With `with_progress` it gets a keyword `progress`, to be
    called with a share from 0 to 1 (or None) and a text. Raises JobError where too many jobs wait.
    """
    budget = budget_s or (SHORT_BUDGET_S if lane == "short" else LONG_BUDGET_S)
    known = cache.get(key)
    if known is not None:
        job = Job(key, budget)
        job._finish(pickle.dumps(known), None)
        return job
    with _lock:
        found = _running.get(key)
        if found is not None and not found.done and not found.cancelled:
            found._wanted += 1
            return found
        if _lanes[lane].waiting >= MOST_WAITING:
            raise JobError(f"the server is busy: {MOST_WAITING} computations wait already; try again later")
        job = _running[key] = Job(key, budget)
        _lanes[lane].waiting += 1
    threading.Thread(
        target=_supervise, args=(job, _lanes[lane], function, args, with_progress), daemon=True
    ).start()
    return job


def _supervise(
    job: Job, lane: _Lane, function: Callable[..., Any], args: tuple[Any, ...], with_progress: bool
) -> None:
    data, error = None, None
    try:
        while not lane.places.acquire(timeout=0.1):
            if job.cancelled:
                break
        else:
            try:
                data, error = _run(job, lane, function, args, with_progress)
            finally:
                lane.places.release()
    except Exception:
        log.exception("job %s", job.key)
        error = JobError("the computation could not be started")
    finally:
        if data is None and error is None:
            error = JobError("the computation was cancelled")
        if data is not None:
            cache.put(job.key, data)
        with _lock:
            lane.waiting -= 1
            if _running.get(job.key) is job:
                del _running[job.key]
        job._finish(data, error)


def _run(
    job: Job, lane: _Lane, function: Callable[..., Any], args: tuple[Any, ...], with_progress: bool
) -> tuple[bytes | None, MoesimError | None]:
    ours, theirs = _context().Pipe(duplex=False)
    process = _context().Process(
        target=_child, args=(theirs, lane.niceness, function, args, with_progress), daemon=True
    )
    job.started, job.progress = time.monotonic(), Progress(None, "computing")
    process.start()
    theirs.close()
    deadline = job.started + job.budget_s
    try:
        while not job.cancelled:
            if time.monotonic() > deadline:
                return None, JobError(
                    f"the computation took longer than its {job.budget_s:.0f} s and was stopped"
                )
            if not ours.poll(0.05):
                continue
            kind, *rest = ours.recv()
            if kind == "progress":
                job.progress = Progress(*rest)
            elif kind == "value":
                return rest[0], None
            else:
                return None, _error(*rest)
    except EOFError:
        return None, JobError("the computation ended without a result; it may have run out of memory")
    finally:
        ours.close()
        if process.is_alive() and (job.cancelled or time.monotonic() > deadline):
            process.kill()
        process.join(5.0)
    return None, None


def _error(kind: str, text: str, key: str | None = None, nearest: Sequence[object] = ()) -> MoesimError:
    if kind == "InputError":
        return InputError(text, key=key, nearest=nearest)
    return InfeasibleError(text) if kind == "InfeasibleError" else JobError(text)


def _child(
    pipe: Any, niceness: int, function: Callable[..., Any], args: tuple[Any, ...], with_progress: bool
) -> None:
    """What a job process does: compute, send one value or one error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C stops the server, which stops us
    if niceness and hasattr(os, "nice"):
        os.nice(niceness)
    try:
        extra = {"progress": _Sender(pipe)} if with_progress else {}
        pipe.send(("value", pickle.dumps(function(*args, **extra))))
    except InputError as error:
        pipe.send(("error", "InputError", str(error), error.key, error.nearest))
    except MoesimError as error:
        pipe.send(("error", type(error).__name__, str(error)))
    except Exception as error:
        log.exception("job failed")
        pipe.send(
            (
                "error",
                "JobError",
                f"the computation failed ({type(error).__name__}); the server's log says why",
            )
        )


class _Sender:
    """Reports progress to the page, at most ten times a second."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._last = 0.0

    def __call__(self, share: float | None, text: str) -> None:
        now = time.monotonic()
        if now - self._last >= 0.1:
            self._last = now
            self._pipe.send(("progress", share, text))


@lru_cache(maxsize=1)
def _context() -> Any:
    """Processes forked from a clean, single-threaded server where there is one (not on Windows)."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def warm_up() -> None:
    """Start the server process before the first job needs it."""
    submit(f"warm-up/{moesim.__version__}", _nothing)


def _nothing() -> bool:
    return True
