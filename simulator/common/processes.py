"""Worker processes that end with the process that started them."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor

OBJECTS_A_COLLECTION = 500_000
"""New objects after which a worker looks for cycles, those of several predictions. With Python's own 700 it
would walk all objects of a prediction at the end of each, some 4 to 18 ms, to find nearly nothing."""


def default_workers() -> int:
    """Number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def worker_pool(workers: int) -> ProcessPoolExecutor:
    """Processes that take calls; they are spawned, because forking a process that has threads can hang."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, mp_context=context, initializer=_start)


def _start() -> None:
    gc.set_threshold(OBJECTS_A_COLLECTION)
    _end_with_parent()


def _end_with_parent() -> None:
    """End this worker when its parent has ended, as it would otherwise wait for work forever.

    Ctrl-C is left to the parent, so that running calls are finished.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
