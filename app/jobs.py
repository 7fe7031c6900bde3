"""Runs each job in a process of its own, with progress, cancel, limits on time and memory, and a cache.

A job runs in a child of a warm server process (`job_server`) that has imported the simulator once, so it
starts in about ten milliseconds, can be stopped at any moment, and gives all of its memory back. Results are
shared by all sessions and stored as bytes, so that the memory of the cache is known and bounded.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from msgspec import Struct

from moesim.hwmodels.errors import InfeasibleError, InputError, MoesimError
from moesim.simulator.predict.work_size import WorkLimits, check_size
from moesim.simulator.scenario import Scenario

# -- budget ------------------------------------------------------------------------------------------
# Limits on the work of one visitor, estimated before a job starts and enforced in its process.

JOB_BYTES = 1_500_000_000
"""Memory limit of one job's process, the imported simulator included.

A full plan search of the home case needs 0.5 GB."""
VALUE_BYTES = 16_000_000
"""Size limit of a job's pickled result, which the server holds. The trace of the home case has 3 MB."""
READ_S = 20.0
"""Processor time that reading a link or an upload may take."""
SHORT_S = 60.0
LONG_S = 600.0
CLOCK = 3.0
"""Seconds on the clock for each second of a job's processor time, at most: jobs give way to other work."""

LIMITS = WorkLimits(
    most_bytes=1_300_000_000,
    most_seconds=20.0,
    most_parts=1_000_000,
    where="the dashboard",
    instead="run it with the command line (moesim simulate), which takes what your machine can hold",
)
"""Limit on the estimate made before a job; an interval or advice runs up to about ten such simulations."""
DRAWN_PARTS = 3_000_000
"""Most GPUs, switches and cables together of a cluster that is drawn and counted."""

LINK_TEXTS = 200
LINK_CHARACTERS = 16_000
"""Limit on all changes of one scenario together; a link that a browser accepts is shorter."""


def admit(scenario: Scenario, *, trace: bool = False) -> Scenario:
    """Return the scenario itself; raise InputError where simulating it exceeds the dashboard's limits."""
    check_size(scenario, scenario.shape, scenario.machines, LIMITS, trace=trace)
    return scenario


def check_link(texts: Sequence[str]) -> None:
    """Raise InputError where a link has more changes, or longer ones, than the dashboard reads."""
    length = sum(map(len, texts))
    if len(texts) > LINK_TEXTS or length > LINK_CHARACTERS:
        raise InputError(
            f"the link has {len(texts):,} changes of together {length:,} characters, more than the "
            f"{LINK_TEXTS} and {LINK_CHARACTERS:,} that are read; upload the scenario as a file instead"
        )


def enforce(budget_s: float) -> None:
    """Have the system end this process at its limits of memory, processor time and wall-clock time."""
    seconds = math.ceil(budget_s) + 5
    for kind, most in (
        (resource.RLIMIT_DATA, JOB_BYTES),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_CORE, 0),
    ):
        with suppress(ValueError, OSError):  # a system that has no such limit, or a lower one
            resource.setrlimit(kind, (most, most))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, CLOCK * seconds)


_once_sent: list[Callable[[], None]] = []


def once_sent(call: Callable[[], None]) -> None:
    """In a job: do something, such as storing, when the job's value is on its way to the dashboard."""
    _once_sent.append(call)


def finish_job() -> None:
    """Do what `once_sent` was given."""
    while _once_sent:
        _once_sent.pop(0)()


# -- value cache -------------------------------------------------------------------------------------
# Keeps the most recently used results of jobs as bytes, so that their memory is known and bounded.


class Cache:
    """A cache of the most recently used values, bounded by `limit_bytes` of pickled bytes.

    Values that somebody holds stay, as long as they take at most half of the limit; then the one that was
    held first loses its place.
    """

    def __init__(self, limit_bytes: int) -> None:
        """Start empty."""
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._values: OrderedDict[str, bytes] = OrderedDict()
        self._holders: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> Any:
        """The value, or None where there is none."""
        with self._lock:
            data = self._values.get(key)
            if data is not None:
                self._values.move_to_end(key)
        return None if data is None else pickle.loads(data)

    def __contains__(self, key: str) -> bool:
        """Whether the cache has a value for the key."""
        with self._lock:
            return key in self._values

    def put(self, key: str, data: bytes) -> None:
        """Store pickled bytes and drop the least recently used; a value above the limit is not stored."""
        with self._lock:
            self.used_bytes -= len(self._values.pop(key, b""))
            if len(data) > self.limit_bytes:
                return
            self._values[key] = data
            self.used_bytes += len(data)
            while self.used_bytes > self.limit_bytes:
                oldest = next((name for name in self._values if name not in self._holders), None)
                if oldest is None:
                    oldest = next(iter(self._values))
                self.used_bytes -= len(self._values.pop(oldest))

    def drop(self, key: str) -> None:
        """Forget a value."""
        with self._lock:
            self.used_bytes -= len(self._values.pop(key, b""))
            self._holders.pop(key, None)

    def hold(self, key: str) -> None:
        """Keep a value until it is released as often as it was held; nothing where it is not there."""
        with self._lock:
            if key not in self._values:
                return
            self._holders[key] = self._holders.get(key, 0) + 1
            while sum(len(self._values.get(name, b"")) for name in self._holders) > self.limit_bytes // 2:
                self._holders.popitem(last=False)

    def release(self, key: str) -> None:
        """Give up one hold on a value; nothing where nobody holds it."""
        with self._lock:
            left = self._holders.get(key, 0) - 1
            if left > 0:
                self._holders[key] = left
            else:
                self._holders.pop(key, None)


CACHE_BYTES = 64_000_000
MOST_WAITING = 64
"""Most jobs of one lane that may wait for a free place; further ones are refused."""

log = logging.getLogger("moesim.app")


class JobError(MoesimError):
    """A job that was cancelled, ran out of time, or failed for a reason that is not the visitor's input."""


class JobProgress(Struct, frozen=True):
    """Progress of a job: a share from 0 to 1 (None where unknown) and what it is doing."""

    share: float | None = None
    text: str = "waiting for a free processor"


class Job:
    """One computation, shared by everybody who asked for the same key."""

    def __init__(self, key: str, budget_s: float) -> None:
        """A job that one caller wants and that has not started."""
        self.key, self.budget_s = key, budget_s
        self.progress = JobProgress()
        self.started: float | None = None
        self._ended: float | None = None
        self._wanted = 1
        self._stop = threading.Event()
        self._done = threading.Event()
        self._data: bytes | None = None
        self._error: MoesimError | None = None

    @property
    def done(self) -> bool:
        """Whether the job has ended with a value or an error."""
        return self._done.is_set()

    @property
    def error(self) -> MoesimError | None:
        """What the job raised; None while it runs and where it has a value."""
        return self._error

    @property
    def elapsed_s(self) -> float:
        """Seconds since the job got its place, until its end."""
        if self.started is None:
            return 0.0
        return (time.monotonic() if self._ended is None else self._ended) - self.started

    @property
    def cancelled(self) -> bool:
        """Whether every caller has given up the job."""
        return self._stop.is_set()

    def cancel(self) -> None:
        """Give up one caller's claim; the process ends when no caller wants the result any more."""
        with _lock:
            self._wanted -= 1
            if self._wanted <= 0:
                self._stop.set()
                _running.pop(self.key, None)

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s`; return whether the job is done."""
        return self._done.wait(timeout_s)

    def result(self, timeout_s: float | None = None) -> Any:
        """The value. Raises what the job raised, or JobError where it was stopped or is not done in time."""
        if not self._done.wait(timeout_s):
            raise JobError("the computation is not done yet")
        if self._error is not None:
            raise self._error
        assert self._data is not None
        return pickle.loads(self._data)

    def _finish(self, data: bytes | None, error: MoesimError | None) -> None:
        self._data, self._error, self._ended = data, error, time.monotonic()
        self._done.set()


_lock = threading.Lock()
_running: dict[str, Job] = {}
cache = Cache(CACHE_BYTES)


class Lane:
    """A limited number of places for jobs of one kind, taken in the order of request."""

    def __init__(self, places: int, niceness: int) -> None:
        """Start with all places free."""
        self.niceness, self.waiting = niceness, 0
        self._free, self._changed = places, threading.Condition()
        self._queue: deque[Job] = deque()

    def take(self, job: Job) -> bool:
        """Wait for a place; False where the job was cancelled before it got one."""
        with self._changed:
            self._queue.append(job)
            while not job.cancelled and not (self._free > 0 and self._queue[0] is job):
                self._changed.wait(0.1)
            self._queue.remove(job)
            wanted = not job.cancelled
            self._free -= wanted
            self._changed.notify_all()
            return wanted

    def leave(self) -> None:
        """Give a place back."""
        with self._changed:
            self._free += 1
            self._changed.notify_all()


_cores = os.cpu_count() or 1
_lanes = {
    "read": Lane(max(2, _cores), 0),  # reads a link or an upload, before anything else of a page
    "short": Lane(max(2, _cores), 0),  # a page waits for it
    "beside": Lane(1, 5),  # takes some seconds while the page is already shown
    "long": Lane(max(1, _cores // 2), 10),
}


_BUDGETS = {"read": READ_S, "short": SHORT_S, "beside": LONG_S, "long": LONG_S}


def submit(
    key: str,
    function: Callable[..., Any],
    *args: Any,
    budget_s: float | None = None,
    lane: str = "short",
    ahead: bool = False,
) -> Job:
    """Run `function(*args)` in a process of its own and return the job at once.

    `key` names the result: a finished value with the same key is returned from the cache, a running job is
    shared. `function` must be importable by name. Where it has an argument `progress`, it is given one to be
    called with a share from 0 to 1 (or None) and a text. A job that is started `ahead` of its need has no
    claim on it until it is submitted again. Raises JobError where too many jobs wait.
    """
    seconds = budget_s or _BUDGETS[lane]
    known = cache.get(key)
    if known is not None:
        job = Job(key, seconds)
        job._finish(pickle.dumps(known), None)
        return job
    with _lock:
        found = _running.get(key)
        if found is not None and not found.done and not found.cancelled:
            found._wanted += not ahead
            return found
        if _lanes[lane].waiting >= MOST_WAITING:
            raise JobError(f"the server is busy: {MOST_WAITING} computations wait already; try again later")
        job = _running[key] = Job(key, seconds)
        job._wanted = int(not ahead)
        _lanes[lane].waiting += 1
    threading.Thread(target=_supervise, args=(job, _lanes[lane], function, args), daemon=True).start()
    return job


def known(key: str) -> bool:
    """Whether the result of this key is cached or being computed."""
    with _lock:
        found = _running.get(key)
    return key in cache or (found is not None and not found.done and not found.cancelled)


def _supervise(job: Job, lane: Lane, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    data, error = None, None
    try:
        if lane.take(job):
            try:
                job.progress = JobProgress(None, "computing")
                data, error = _run(job, lane, function, args)
            finally:
                lane.leave()
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
    job: Job, lane: Lane, function: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[bytes | None, MoesimError | None]:
    job.started = time.monotonic()
    deadline = job.started + CLOCK * job.budget_s
    process, ended = 0, False
    with _started().connect() as pipe:
        try:
            pipe.send((lane.niceness, job.budget_s, function, args))
            while not job.cancelled:
                if time.monotonic() > deadline:
                    return None, JobError(
                        f"the computation took longer than its {CLOCK * job.budget_s:.0f} s and was stopped"
                    )
                if not pipe.poll(0.05):
                    continue
                kind, *rest = pipe.recv()
                if kind == "process":
                    process = rest[0]
                elif kind == "progress":
                    job.progress = _further(job.progress, *rest)
                else:
                    ended = True
                    return (rest[0], None) if kind == "value" else (None, _error(*rest))
        except (EOFError, OSError):
            ended = True
            return None, JobError(
                "the computation ended without a result: its process was ended, as for more memory than its "
                f"{JOB_BYTES / 1e9:.1f} GB or more processor time than its {job.budget_s:.0f} s"
            )
        finally:
            if process and not ended:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
    return None, None


def _further(before: JobProgress, share: float | None, text: str) -> JobProgress:
    """Progress that never goes back and stays between 0 and 1."""
    if share is None:
        return JobProgress(before.share, text)
    return JobProgress(max(before.share or 0.0, min(1.0, max(0.0, share))), text)


def _error(kind: str, text: str, key: str | None = None, nearest: Sequence[object] = ()) -> MoesimError:
    if kind == "InputError":
        return InputError(text, key=key, nearest=nearest)
    return InfeasibleError(text) if kind == "InfeasibleError" else JobError(text)


class _Server:
    """The job server's process and the socket it listens on."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="moesim-jobs-")  # readable for this user only
        self._path = str(Path(self._folder.name) / "jobs")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "moesim.app.job_server", self._path],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._folder.cleanup()

    def connect(self) -> Connection:
        """A connection to a new job process. Raises JobError where the server does not answer."""
        for _ in range(600):  # its imports take a second
            taken = socket.socket(socket.AF_UNIX)
            try:
                taken.connect(self._path)
                return Connection(taken.detach())
            except OSError:
                taken.close()
                if not self.alive:
                    break
                time.sleep(0.05)
        raise JobError("the computation could not be started")


_server: _Server | None = None


def _started() -> _Server:
    """The running server, started first where there is none or it has died."""
    global _server
    with _lock:
        if _server is None or not _server.alive:
            _server = _Server()
        return _server


def warm_up() -> None:
    """Start the server process before the first job needs it."""
    _started()


def shut_down() -> None:
    """End the server process with all jobs, and remove its socket."""
    if _server is not None:
        _server.end()
