"""Worker processes that end with the process that started them, and run nothing of the current folder."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

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
