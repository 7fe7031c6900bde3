"""Worker processes, of this machine or of a Dask cluster.

Those of this machine end with the process that started them, and run nothing of the current folder.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

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

    What these functions make has no cycles: it is freed as soon as nothing refers to it.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
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
