"""Requests through replicas, event by event: arrivals, routing, steps of every engine, hand-over from prefill to decode."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import simpy
from numpy.typing import NDArray

from moesim.simulator.serving.requests import Requests
from moesim.simulator.serving.scheduler import Batch, Done, Policy, Scheduler

Ints = NDArray[np.int64]


class Pace(NamedTuple):
    """How long steps take while the same sequences decode.

    Step i of the stretch (from 0) takes `first_ns + i * growth_ns`, as the contexts get longer; the law holds for
    `steps` steps at most.
    """

    first_ns: float
    growth_ns: float = 0.0
    steps: int = 1 << 30

    def after(self, steps: int) -> int:
        """Nanoseconds of so many steps, at least one each."""
        return max(round(steps * self.first_ns + self.growth_ns * (steps * (steps - 1) // 2)), steps)


class StepTimes(Protocol):
    """What an engine's steps take."""

    def pace(self, now_ns: int, ranks: Sequence[Batch]) -> Pace:
        """The pace of ranks that step together, each with its batch."""
        ...


@dataclass(frozen=True)
class Pool:
    """Equal replicas: `ranks` of each step in lockstep (data-parallel attention with shared experts)."""

    replicas: int
    policy: Policy
    times: StepTimes
    ranks: int = 1


@dataclass
class Served:
    """What became of every request, in ns after the first arrival; -1 where it did not come to it.

    `rank`: where it was served last, counted over replicas and their ranks.
    """

    requests: Requests
    scheduled_ns: Ints
    first_token_ns: Ints
    last_token_ns: Ints
    rank: Ints
    steps: int = 0
    busy_ns: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    counts: list[tuple[int, int, int]] = field(default_factory=list)


class Router(Protocol):
    """Chooses a rank for a request."""

    def __call__(self, request: int, ranks: Sequence[Scheduler]) -> int:
        """The place of a rank."""
        ...


def round_robin() -> Router:
    """One rank after the other."""
    turn = -1

    def choose(request: int, ranks: Sequence[Scheduler]) -> int:
        nonlocal turn
        turn = (turn + 1) % len(ranks)
        return turn

    return choose


def least_loaded(request: int, ranks: Sequence[Scheduler]) -> int:
    """The rank with the lowest of waiting x 4 + running, as vLLM's balancer of data-parallel engines; the first of equals."""
    return min(range(len(ranks)), key=lambda at: 4 * len(ranks[at].waiting) + ranks[at].running)


class _Replica:
    def __init__(
        self,
        env: simpy.Environment,
        pool: Pool,
        served: Served,
        at: int,
        done: Callable[[int, Done, int], None],
    ) -> None:
        self._env, self._pool, self._served, self._done = env, pool, served, done
        self._first_rank = at * pool.ranks
        self.ranks = [Scheduler(pool.policy, served.requests) for _ in range(pool.ranks)]
        self._stretch: tuple[int, Pace, int] | None = None  # start, pace, steps: while an arrival may cut it
        self._asleep: simpy.Event | None = None
        self._process = env.process(self._run())

    def add(self, rank: int, request: int, generated: int = 0) -> None:
        """A request for one of the ranks; a stretch of decodes ends with its present step if the rank has a place."""
        scheduler = self.ranks[rank]
        scheduler.add(request, generated)
        if self._asleep is not None:
            self._asleep.succeed()
            self._asleep = None
        elif self._stretch is not None and scheduler.running < self._pool.policy.max_num_seqs:
            self._process.interrupt()

    def _run(self) -> Generator[Any, Any, None]:
        env, served, ranks, times = self._env, self._served, self.ranks, self._pool.times
        while True:
            busy = [rank for rank in ranks if rank.busy]
            if not busy:
                self._asleep = env.event()
                yield self._asleep
                continue
            start: int = env.now
            pace = times.pace(start, [rank.plan() for rank in ranks])
            steps = min(rank.horizon(pace.steps) for rank in busy)
            for rank in busy:
                for request in rank.scheduled:
                    if served.scheduled_ns[request] < 0:
                        served.scheduled_ns[request] = start
            if steps > 1:
                self._stretch = start, pace, steps
            try:
                yield env.timeout(pace.after(steps))
                self._stretch = None
            except simpy.Interrupt:
                self._stretch = None
                gone = env.now - start
                steps = 1 + bisect_right(range(1, steps), gone, key=pace.after)
                yield env.timeout(pace.after(steps) - gone)
            served.steps += steps
            served.busy_ns += env.now - start
            for place, rank in enumerate(ranks):
                if rank.planned:
                    self._done(self._first_rank + place, rank.advance(steps), env.now)


def serve(
    requests: Requests,
    decode: Pool,
    *,
    prefill: Pool | None = None,
    transfer_ns: Callable[[int], int] | None = None,
    router: Router = least_loaded,
    sample_ns: int = 0,
) -> Served:
    """Serve a load until its last token.

    `decode`: the replicas that serve, or decode only where `prefill` names others for the prompts; then the keys
    and values of n tokens take `transfer_ns(n)` between them, one request after another on a replica's link.
    `sample_ns`: interval at which running and waiting sequences are counted.
    """
    env = simpy.Environment()
    count = len(requests)
    served = Served(requests, *(np.full(count, -1, dtype=np.int64) for _ in range(4)))
    left = count

    def done(rank: int, ended: Done, now: int) -> None:
        nonlocal left
        for request in ended.first:
            served.first_token_ns[request] = now
        for request in ended.last:
            served.last_token_ns[request] = now
            served.rank[request] = rank
        left -= len(ended.last)

    replicas = [_Replica(env, decode, served, at, done) for at in range(decode.replicas)]
    ranks = [rank for replica in replicas for rank in replica.ranks]

    def arrive() -> Generator[Any, Any, None]:
        for request, moment in enumerate(requests.arrival_ns.tolist()):
            if moment > env.now:
                yield env.timeout(moment - env.now)
            at = router(request, ranks)
            replicas[at // decode.ranks].add(at % decode.ranks, request)

    def sample() -> Generator[Any, Any, None]:
        while left:
            yield env.timeout(sample_ns)
            served.counts.append(
                (int(env.now), sum(r.running for r in ranks), sum(len(r.waiting) for r in ranks))
            )

    env.process(arrive())
    if sample_ns:
        env.process(sample())
    env.run()
    served.preemptions = sum(rank.preemptions for rank in ranks)
    served.cached_tokens = sum(rank.cached_tokens for rank in ranks)
    return served
