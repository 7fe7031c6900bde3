"""Worker processes, or a Dask cluster, in which a search runs the engine."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from importlib import import_module
from multiprocessing.connection import Connection, Pipe
from multiprocessing.connection import wait as first_ready
from typing import TypeVar

from moesim.hwmodels.errors import InputError
from moesim.simulator.common.processes import DaskPool, worker_pool

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
