"""Worker processes, of this machine or of a Dask cluster.

Those of this machine end with the process that started them, and run nothing of the current folder.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from importlib import import_module
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, Pipe
from multiprocessing.connection import wait as first_ready
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any, TypeVar

from moesim.hwmodels.errors import InputError
from moesim.version import __version__

SAFE_PATH = "PYTHONSAFEPATH"
"""Environment variable with which Python looks for no module in the current folder, as with its option -P."""

OBJECTS_A_COLLECTION = 500_000
"""New objects after which a worker looks for cycles, those of several predictions. With Python's own 700 it
would walk all objects of a prediction at the end of each, some 4 to 18 ms, to find nearly nothing."""


def default_workers() -> int:
    """Number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def worker_pool(
    workers: int, initializer: Callable[..., None] | None = None, initargs: tuple[Any, ...] = ()
) -> ProcessPoolExecutor:
    """Processes that take calls; each begins with `initializer`, by default one that ends it with its parent.

    They are spawned, because forking a process that has threads (a notebook, a dashboard) can hang. Python
    would start them, and multiprocessing's own helper, with the current folder first on their path, and run
    a `numpy.py` that lies there: they start without it.
    """
    if os.name == "posix":
        with _safe_path():
            resource_tracker.ensure_running()
    return ProcessPoolExecutor(
        workers, mp_context=_SafeContext(), initializer=initializer or _start, initargs=initargs
    )


class _SafeProcess(SpawnProcess):
    """A spawned process that does not look for modules in the current folder."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802 - the name is that of multiprocessing
        with _safe_path():
            return SpawnProcess._Popen(process_obj)


class _SafeContext(SpawnContext):
    Process = _SafeProcess


_environment = threading.RLock()


@contextmanager
def _safe_path() -> Iterator[None]:
    """Set SAFE_PATH while a process starts; what the caller starts himself stays as he wants it."""
    with _environment:
        before = os.environ.get(SAFE_PATH)
        os.environ[SAFE_PATH] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[SAFE_PATH]
            else:
                os.environ[SAFE_PATH] = before


def _start() -> None:
    """Begin a worker that ends when its parent has ended; it would otherwise wait for work forever.

    Ctrl-C is left to the parent, so that running calls are finished.
    """
    gc.set_threshold(OBJECTS_A_COLLECTION)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def without_cyclic_collection() -> Iterator[None]:
    """Pause the cyclic garbage collector, which would walk all prices, plans and records again and again.

    What these functions make has no cycles: it is freed as soon as nothing refers to it. It belongs to the
    oldest objects at once, so that the collector does not walk it just after the pause.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if gc.get_freeze_count() == 0:  # nobody else has objects that the next line would give back
                gc.freeze()
                gc.unfreeze()
            gc.enable()


# -- Dask cluster ------------------------------------------------------------------------------------
# The workers of a Dask cluster, by the address of its scheduler.

CONNECT_S = 20.0
"""Seconds that a Dask scheduler may take to answer."""


def dask_client(address: str) -> Any:
    """A client of the Dask cluster at an address, whose workers have this version of moesim.

    Raises InputError if `distributed` is not installed, the scheduler does not answer, or it has no workers
    or one with another version of moesim.
    """
    try:
        distributed: Any = import_module("distributed")  # it ships no types
    except ImportError:
        raise InputError("a Dask cluster needs: pip install 'moesim[cluster]'") from None
    try:
        client = distributed.Client(address, timeout=CONNECT_S, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        raise InputError(f"Dask scheduler {address}: no answer ({error or type(error).__name__})") from None
    try:
        versions = client.run(_version)
        if not versions:
            raise InputError(
                f"Dask scheduler {address} has no workers; start some with `dask worker {address}`"
            )
        other = {worker: version for worker, version in versions.items() if version != __version__}
        if other:
            raise InputError(f"Dask workers have another version of moesim than {__version__}: {other}")
    except BaseException:
        client.close()
        raise
    return client


def _version() -> str:
    return __version__


def check_cluster(address: str | None, engine_draws: int) -> None:
    """Raise InputError where a Dask cluster is named and no engine draws, which use it."""
    if address is not None and not engine_draws:
        raise InputError(f"scheduler={address} is not used: only engine draws use it (--engine-draws N)")


class DaskPool(Executor):
    """The workers of a Dask cluster as an executor; files that scenarios name lie at the same paths there.

    A call whose worker is lost is tried once more on another one.
    """

    def __init__(self, address: str) -> None:
        """`address`: that of the scheduler, such as tcp://host:8786. Raises InputError as `dask_client`."""
        self.address, self._client = address, dask_client(address)
        self._calls = self._client.get_executor(pure=False, retries=1)
        self._lost: Any = import_module("distributed").KilledWorker, CancelledError

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Start a call on the cluster."""
        call: Future[Any] = self._calls.submit(fn, *args, **kwargs)
        return call

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for the calls, or drop them, and leave the cluster, whose workers go on."""
        self._calls.shutdown(wait=wait and not cancel_futures)
        self._client.close()

    @contextmanager
    def losses_explained(self) -> Iterator[None]:
        """Raise InputError where a call was lost with its worker, or with the scheduler."""
        try:
            yield
        except self._lost as error:
            raise InputError(f"Dask scheduler {self.address}: a worker was lost twice ({error})") from None


# -- engine processes --------------------------------------------------------------------------------
# Worker processes, or a Dask cluster, in which a search runs the engine.

A = TypeVar("A")
B = TypeVar("B")

MOST_WORKERS = 256
"""Most worker processes of a search."""

PARTS, LARGEST_PART = 64, 8
"""Parts into which the items of `outcomes` are divided where there are many, and most items of a part. Items
of a part run one after the other in one process, where they share prices."""

PARTS_AHEAD = 2 * MOST_WORKERS
"""Most parts whose arguments or results wait in memory."""

PATIENCE_S = 0.1
"""Seconds after which a caller that waits for workers reports that it is alive, and can be cancelled."""


@contextmanager
def engine_processes(workers: int, scheduler: str | None = None) -> Iterator[Executor | None]:
    """Start worker processes, which import the engine in the background; one worker is this process: None.

    They end with the block, whatever they compute then, and with this process. `scheduler`: address of a Dask
    cluster to use instead. Raises InputError for a number out of range, for several workers beside a cluster,
    and if a worker dies.
    """
    if scheduler is not None:
        if workers != 1:
            raise InputError(
                f"workers={workers} beside the Dask scheduler {scheduler}: the cluster has its own workers; "
                "leave workers out"
            )
        cluster = DaskPool(scheduler)
        try:
            with cluster.losses_explained():
                yield cluster
        finally:
            cluster.shutdown(wait=False)
        return
    if not 1 <= workers <= MOST_WORKERS:
        raise InputError(f"workers={workers} must lie between 1 and {MOST_WORKERS}")
    if workers == 1:
        yield None
        return
    end, ending = Pipe(duplex=False)
    pool = worker_pool(workers, _end_with, (end,))
    try:
        for _ in range(workers):
            pool.submit(_warm)
        yield pool
    except BrokenProcessPool:
        raise InputError(
            f"one of the {workers} processes of the engine ended: out of memory, or a script that calls "
            'plan(workers=...) outside `if __name__ == "__main__":`; workers=1 computes in this process'
        ) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        ending.close()


def _end_with(end: Connection) -> None:
    """End this worker when its parent ends or closes the other end of a pipe; Ctrl-C is the parent's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        first_ready([end])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _warm() -> int:
    """Make a worker import the engine."""
    import_module("moesim.simulator.planner.result")
    return os.getpid()


def outcomes(
    pool: Executor | None,
    function: Callable[[A], B],
    items: Sequence[A],
    alive: Callable[[], None] = lambda: None,
) -> Iterator[tuple[int, B]]:
    """Start a function of every item, and yield (position, result) in the order in which they finish.

    `pool`: processes, which compute from the call on; None computes here, one item after the other. `alive`
    is called before each item, or at least every 0.1 s while others compute; what it raises ends the
    computation.
    """
    if pool is None:
        return _here(function, items, alive)
    size = min(LARGEST_PART, max(1, len(items) // PARTS))
    todo = deque((first, items[first : first + size]) for first in range(0, len(items), size))
    running: dict[Future[list[B]], int] = {}

    def submit() -> None:
        while todo and len(running) < PARTS_AHEAD:
            first, part = todo.popleft()
            running[pool.submit(_each, function, part)] = first

    submit()
    return _there(running, submit, alive)


def _here(
    function: Callable[[A], B], items: Sequence[A], alive: Callable[[], None]
) -> Iterator[tuple[int, B]]:
    for place, item in enumerate(items):
        alive()
        yield place, function(item)


def _there(
    running: dict[Future[list[B]], int], submit: Callable[[], None], alive: Callable[[], None]
) -> Iterator[tuple[int, B]]:
    while running:
        alive()
        for future in wait(running, PATIENCE_S, FIRST_COMPLETED).done:
            first = running.pop(future)
            yield from enumerate(future.result(), first)
        submit()


def _each(function: Callable[[A], B], items: Sequence[A]) -> list[B]:
    return [function(item) for item in items]
