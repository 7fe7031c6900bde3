"""Worker processes in which a plan search runs the engine."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from moesim.hwmodels.errors import InputError

MOST_WORKERS = 256
"""Most worker processes of a search."""


@contextmanager
def engine_processes(workers: int) -> Iterator[Executor | None]:
    """Start worker processes, which import the engine in the background; one worker is this process: None.

    Raises InputError for a number out of range, and if a worker process dies.
    """
    if not 1 <= workers <= MOST_WORKERS:
        raise InputError(f"workers={workers} must lie between 1 and {MOST_WORKERS}")
    if workers == 1:
        yield None
        return
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for _ in range(workers):
            pool.submit(_warm)
        try:
            yield pool
        except BrokenProcessPool:
            raise InputError(
                f"one of the {workers} processes of the engine ended: out of memory, or a script that calls "
                'plan(workers=...) outside `if __name__ == "__main__":`; workers=1 computes in this process'
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def without_cyclic_collection() -> Iterator[None]:
    """Pause the cyclic garbage collector, which would walk all prices of a search again and again.

    Prices and plans have no cycles: they are freed as soon as nothing refers to them. The pause took a fifth
    off the time of a search.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _warm() -> int:
    """Make a worker import the engine."""
    return os.getpid()
