"""Computes the points of a sweep in this process, in local processes or on a Dask cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from importlib import import_module
from itertools import chain, islice
from typing import Any

from moesim.simulator.common.processes import dask_client, worker_pool
from moesim.simulator.scenario import Scenario
from moesim.simulator.studies.space import Measure, evaluate_group
from moesim.simulator.studies.store import PointOutcome

Task = tuple[int, Scenario]
"""A point to compute: (number of the point, its scenario)."""

Group = Sequence[Task]
"""Points that one worker computes in a row, because they share prices and draws. Groups may be made as they
are taken, so that few scenarios exist at a time."""

Wanted = Callable[[int], bool]
"""Called with a point's number when its turn comes; returns whether it must still be computed."""

AHEAD = 2
"""Groups submitted for each worker, so that no worker waits for its next one."""

DIED = (
    "its process died twice, the second time with no other point in it: out of memory, or a script that "
    'calls sweep outside `if __name__ == "__main__":`'
)


def outcomes_here(
    groups: Iterable[Group], wanted: Wanted, measure: Measure
) -> Iterator[tuple[int, PointOutcome]]:
    """Compute the outcomes one after the other in this process."""
    for number, scenario in chain.from_iterable(groups):
        if wanted(number):
            yield number, measure(scenario)


def start_pool(workers: int) -> ProcessPoolExecutor:
    """Start worker processes, which import the engine while the caller prepares the points."""
    pool = worker_pool(workers)
    for _ in range(workers):
        pool.submit(_ready)
    return pool


def _ready() -> None:
    """Do nothing; unpickling this function makes the worker import the engine."""


def outcomes_locally(
    groups: Iterable[Group],
    wanted: Wanted,
    measure: Measure,
    workers: int,
    pool: ProcessPoolExecutor | None = None,
) -> Iterator[tuple[int, PointOutcome]]:
    """Compute the outcomes in local processes, and yield them as their groups finish.

    `pool`: processes of `start_pool`, which are shut down here. If a process dies, the points that were
    running are tried once more, each alone in a new process; a point whose process dies again has failed.
    """
    waiting = iter(groups)
    pool = pool or start_pool(workers)
    try:
        running: dict[Future[list[PointOutcome]], Group] = {}
        group = next(waiting, None)
        while group is not None or running:
            while group is not None and len(running) < AHEAD * workers:
                own = [task for task in group if wanted(task[0])]
                if own and not _submit(pool, running, own, measure):
                    break
                group = next(waiting, None)
            suspects: list[Task] = []
            done = wait(running, return_when=FIRST_COMPLETED).done if running else set()
            for future in sorted(done, key=lambda f: running[f][0][0]):
                ended = running.pop(future)
                if isinstance(future.exception(), BrokenProcessPool):
                    suspects += ended
                else:
                    yield from _numbered(ended, future.result())
            if suspects or not done:
                # A broken pool fails all running points within moments of each other.
                wait(running)
                suspects += chain.from_iterable(g for f, g in running.items() if f.exception() is not None)
                finished = [(g, f.result()) for f, g in running.items() if f.exception() is None]
                running.clear()
                for group, outcomes in finished:
                    yield from _numbered(group, outcomes)
                pool.shutdown(cancel_futures=True)
                for number, scenario in sorted(suspects, key=lambda task: task[0]):
                    yield number, _alone(scenario, measure)
                pool = worker_pool(workers)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _numbered(group: Group, outcomes: Iterable[PointOutcome]) -> Iterator[tuple[int, PointOutcome]]:
    return zip((number for number, _ in group), outcomes, strict=True)


def _submit(
    pool: Executor, running: dict[Future[list[PointOutcome]], Group], group: Group, measure: Measure
) -> bool:
    scenarios = [scenario for _, scenario in group]
    try:
        running[pool.submit(evaluate_group, scenarios, measure)] = group
    except BrokenProcessPool:
        return False
    return True


def _alone(scenario: Scenario, measure: Measure) -> PointOutcome:
    with worker_pool(1) as pool:
        try:
            return pool.submit(measure, scenario).result()
        except BrokenProcessPool:
            return PointOutcome("failed", DIED, {}, "")


def outcomes_on_dask(
    groups: Iterable[Group], wanted: Wanted, measure: Measure, address: str
) -> Iterator[tuple[int, PointOutcome]]:
    """Compute the outcomes on a Dask cluster, and yield them as they finish.

    Files that scenarios name must be readable at the same paths on its workers. Raises InputError as
    `dask_client`.
    """
    with dask_client(address) as client:
        left = ([task for task in group if wanted(task[0])] for group in groups)
        waiting = (group for group in left if group)
        given: dict[Any, Group] = {}
        pool = import_module("distributed").as_completed(loop=client.loop)

        def give_out(n: int) -> None:
            for group in islice(waiting, n):
                scenarios = [scenario for _, scenario in group]
                future = client.submit(evaluate_group, scenarios, measure, pure=False, retries=1)
                given[future.key] = group
                pool.add(future)

        give_out(AHEAD * max(1, sum(client.nthreads().values())))
        for future in pool:
            broken = future.exception()
            lost = PointOutcome("failed", f"its Dask worker was lost: {broken}", {}, "")
            group = given.pop(future.key)
            yield from _numbered(group, future.result() if broken is None else [lost] * len(group))
            give_out(1)
