"""Requests through replicas, event by event: arrivals, routing, steps of engines, hand-over to decode."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import simpy
from msgspec import Struct, field

from moesim.hwmodels.arrays import IntArray
from moesim.hwmodels.errors import InfeasibleError
from moesim.simulator.serving.requests import Requests
from moesim.simulator.serving.scheduler import Done, Policy, Scheduler, StepBatch


class StepPace(NamedTuple):
    """How long steps take while the same sequences decode.

    Step i of the stretch (from 0) takes `first_ns + i * growth_ns`, as the contexts get longer; the law holds
    for `steps` steps at most.
    """

    first_ns: float
    growth_ns: float = 0.0
    steps: int = 1 << 30

    def after(self, steps: int) -> int:
        """Nanoseconds of so many steps, at least one each."""
        return max(round(steps * self.first_ns + self.growth_ns * (steps * (steps - 1) // 2)), steps)


class PaceModel(Protocol):
    """What an engine's steps take."""

    def pace(self, now_ns: int, ranks: Sequence[StepBatch]) -> StepPace:
        """The pace of ranks that step together, each with its batch."""
        ...


class ReplicaPool(Struct, frozen=True):
    """Equal replicas: `ranks` of each step in lockstep (data-parallel attention with shared experts)."""

    replicas: int
    policy: Policy
    times: PaceModel
    ranks: int = 1


class PromptChunk(NamedTuple):
    """Tokens of a request's prompt that one step of a rank computed, from its begin to its end."""

    request: int
    prompts_only: bool
    rank: int
    begin_ns: int
    end_ns: int
    tokens: int


class PoolLog(Struct):
    """What a pool did: steps and busy time of all its replicas, and sums over their ranks."""

    steps: int = 0
    busy_ns: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    peak_blocks: int = 0


class Count(NamedTuple):
    """Sequences at one time: running, waiting, running in the pool that decodes, and on its fullest rank."""

    time_ns: int
    running: int
    waiting: int
    decoding: int
    fullest: int


class Served(Struct):
    """What became of every request, in ns after the first arrival; -1 where it did not come to it.

    `rank` and `prefill_rank`: where it was served last, counted over a pool's replicas and their ranks.
    `transfer_ns`: from the first token to the keys and values in the other pool. `pools`:
    that which decodes first.
    """

    requests: Requests
    arrival_ns: IntArray
    scheduled_ns: IntArray
    first_token_ns: IntArray
    last_token_ns: IntArray
    transfer_ns: IntArray
    rank: IntArray
    prefill_rank: IntArray
    pools: list[PoolLog] = field(default_factory=list)
    counts: list[Count] = field(default_factory=list)


# -- routing -----------------------------------------------------------------------------------------

Router = Callable[[int, Sequence[Scheduler], list[int]], int]
"""The place of the rank that gets a request; the list has every rank's load (`Scheduler.load`)."""

IMBALANCE = (64, 1.5)
"""Difference and ratio of loads above which a prefix counts no more (SGLang's router:
`balance_abs_threshold`, `balance_rel_threshold`)."""


def round_robin() -> Router:
    """One rank after the other."""
    turn = -1

    def choose(request: int, ranks: Sequence[Scheduler], loads: list[int]) -> int:
        nonlocal turn
        turn = (turn + 1) % len(ranks)
        return turn

    return choose


def least_loaded(request: int, ranks: Sequence[Scheduler], loads: list[int]) -> int:
    """The rank with the lowest load; the first of equals."""
    return loads.index(min(loads))


def prefix_aware(request: int, ranks: Sequence[Scheduler], loads: list[int]) -> int:
    """The rank with the longest prefix of the prompt, the least loaded of equals and if loads differ much."""
    low, high = min(loads), max(loads)
    if high - low > IMBALANCE[0] and high > IMBALANCE[1] * low:
        return loads.index(low)
    found = [rank.matched_tokens(request) for rank in ranks]
    longest = max(found)
    return min(range(len(ranks)), key=lambda at: (found[at] < longest, loads[at]))


ROUND_ROBIN, PREFIX_AWARE = "round_robin", "prefix_aware"


def router(name: str, prefixes: bool = True) -> Router:
    """A router by the scenario's name for it; without `prefixes` of requests none is longest."""
    if name == ROUND_ROBIN:
        return round_robin()
    return prefix_aware if name == PREFIX_AWARE and prefixes else least_loaded


# -- a replica ---------------------------------------------------------------------------------------


class _Replica:
    """Steps of one replica; `loads` are those of its pool, kept up to date at its own places."""

    def __init__(self, events: _Events, pool: ReplicaPool, log: PoolLog, at: int, loads: list[int]) -> None:
        self._events, self._env, self._pool, self._log = events, events.env, pool, log
        self._first, self._loads = at * pool.ranks, loads
        self.ranks = [Scheduler(pool.policy, events.served.requests) for _ in range(pool.ranks)]
        self._stretch = False  # whether an arrival may cut the present steps short
        self._held: list[tuple[int, int, int, bool]] = []  # requests that the engine has not looked at
        self._since = 0  # decode steps since the engine looked
        self._asleep: simpy.Event | None = None
        self._process = self._env.process(self._run())

    def add(self, rank: int, request: int, generated: int = 0, ready: bool = False) -> None:
        """A request for one of the ranks, which ends a stretch of decodes if the rank has a place."""
        scheduler = self.ranks[rank]
        if self._pool.policy.wait_steps > 1 and self._asleep is None:
            self._held.append((rank, request, generated, ready))
            self._tell(rank)
            if self._stretch:
                self._process.interrupt()
            return
        scheduler.add(request, generated, ready, amid=self._asleep is None)
        self._tell(rank)
        if self._asleep is None and self._stretch and scheduler.running < self._pool.policy.max_num_seqs:
            self._stretch = False
            self._process.interrupt()
        self.wake()

    def let_go(self, rank: int, request: int) -> None:
        """The keys and values of a request that was handed over leave."""
        self.ranks[rank].let_go(request)
        self.wake()

    def wake(self) -> None:
        """Something may have become possible."""
        if self._asleep is not None:
            self._asleep.succeed()
            self._asleep = None

    def _tell(self, rank: int) -> None:
        """The router's view of a rank; held requests count as waiting ones.

        Where prompts wait for each other's ranks, requests are counted alike: TensorRT-LLM gives a new one to
        a rank with fewer than the mean (_torch/pyexecutor/executor_request_queue.py, release 1.2).
        """
        held = sum(each[0] == rank for each in self._held) if self._held else 0
        scheduler = self.ranks[rank]
        load = scheduler.load + 4 * held
        if self._pool.policy.wait_for_ranks:
            load = scheduler.running + scheduler.queued + held
        self._loads[self._first + rank] = load

    def _steps_to_look(self, done: int, most: int) -> int:
        """Steps, from `done` to `most` of the present ones, until the engine looks at held requests."""
        if not self._held or self._all_have_one():
            return done
        return min(done + -(self._since + done) % self._pool.policy.wait_steps, most)

    def _all_have_one(self) -> bool:
        return self._pool.policy.wait_for_ranks and len({held[0] for held in self._held}) == len(self.ranks)

    def _look(self) -> None:
        """Held requests join their queues if it is time to look, or if there is nothing to wait for.

        Of those that wait for other ranks only the prompts of one step go.
        """
        policy, tokens = self._pool.policy, self._events.served.requests.input_tokens
        running = [rank.running > 0 for rank in self.ranks]
        busy = all(running) if policy.wait_for_ranks else any(running)
        if busy and self._since % policy.wait_steps and not self._all_have_one():
            return
        held, self._held = self._held, []
        room = [policy.max_num_batched_tokens] * len(self.ranks)
        for each in held:
            rank, request, generated, ready = each
            if policy.wait_for_ranks:
                left, most = room[rank], policy.max_num_batched_tokens
                room[rank] = left - int(tokens[request]) if left == most or left >= tokens[request] else -1
                if left != most and room[rank] < 0:
                    self._held.append(each)
                    continue
            self.ranks[rank].add(request, generated, ready, amid=busy)
            self._tell(rank)

    def _run(self) -> Generator[Any, Any, None]:
        env, log, ranks, times = self._env, self._log, self.ranks, self._pool.times
        while True:
            if self._held:
                self._look()
            batches = [rank.plan() for rank in ranks]
            unseen = any(rank.unseen for rank in ranks)
            if not any(rank.planned for rank in ranks):
                if not unseen:
                    self._asleep = env.event()
                    yield self._asleep
                continue  # an idle engine plans at once
            start = int(env.now)
            pace = times.pace(start, batches)
            steps = 1 if unseen else min([r.horizon(pace.steps) for r in ranks if r.planned])
            steps = self._steps_to_look(1, steps) if self._held else steps
            for place, rank in enumerate(ranks):
                self._tell(place)
                for request in rank.scheduled:
                    self._events.begun(request, start)
            self._stretch = steps > 1
            while True:
                try:
                    yield env.timeout(pace.after(steps) - (int(env.now) - start))
                    break
                except simpy.Interrupt:
                    gone = int(env.now) - start
                    under_way = 1 + bisect_right(range(1, steps), gone, key=pace.after)
                    steps = self._steps_to_look(under_way, steps)
            self._stretch = False
            self._since += steps
            if any(batch.prefill_tokens for batch in batches):
                self._since = int(self._pool.policy.wait_for_ranks)
            log.steps += steps
            log.busy_ns += int(env.now) - start
            for place, rank in enumerate(ranks, self._first):
                if rank.planned:
                    self._events.chunks(self._pool, place, start, rank)
                    done = rank.advance(steps)
                    self._tell(place - self._first)
                    if done.first or done.last:
                        self._events.done(self._pool, place, done)


# -- the whole ---------------------------------------------------------------------------------------


class _Events:
    """Pools, arrivals and hand-overs on one clock."""

    def __init__(
        self,
        requests: Requests,
        decode: ReplicaPool,
        prefill: ReplicaPool | None,
        transfer_ns: Callable[[int], int],
        route: Router,
        front_ns: Callable[[int], int] | None = None,
        watch: Callable[[PromptChunk], None] | None = None,
    ) -> None:
        self.env = simpy.Environment()
        self._watch = watch
        self._front_ns, self._front_free = front_ns, 0
        no, first, last, moved, rank, other = np.full((6, len(requests)), -1, dtype=np.int64)
        self.served = Served(requests, requests.arrival_ns.copy(), no, first, last, moved, rank, other)
        self.left = len(requests)
        self._decode, self._prefill, self._transfer_ns, self._route = decode, prefill, transfer_ns, route
        self._pools: dict[int, tuple[list[_Replica], list[Scheduler], list[int]]] = {}
        for pool in (decode, *([prefill] if prefill else [])):
            self.served.pools.append(log := PoolLog())
            loads = [0] * (pool.replicas * pool.ranks)
            replicas = [_Replica(self, pool, log, at, loads) for at in range(pool.replicas)]
            ranks = [rank for replica in replicas for rank in replica.ranks]
            self._pools[id(pool)] = replicas, ranks, loads
        self._sent: dict[int, int] = {}  # tokens whose keys and values went ahead of their prompt's end
        self._link_free = [0] * (prefill.replicas * prefill.ranks if prefill else 0)
        self._next: Iterator[int] | None = None  # requests of a closed loop

    def arrive(self, request: int) -> None:
        """A request is tokenised, after those before it, and goes to its rank."""
        if self._front_ns is None:
            self._route_now(request)
        else:
            tokens = int(self.served.requests.input_tokens[request])
            self._front_free = max(int(self.env.now), self._front_free) + self._front_ns(tokens)
            self.env.process(self._after_front(request, self._front_free))

    def _after_front(self, request: int, moment: int) -> Generator[Any, Any, None]:
        yield self.env.timeout(moment - int(self.env.now))
        self._route_now(request)

    def _route_now(self, request: int) -> None:
        """A request goes to the rank that the router chooses."""
        pool = self._prefill or self._decode
        replicas, ranks, loads = self._pools[id(pool)]
        at = self._route(request, ranks, loads)
        replicas[at // pool.ranks].add(at % pool.ranks, request)

    def begun(self, request: int, now: int) -> None:
        """The first step that works on a request begins."""
        if self.served.scheduled_ns[request] < 0:
            self.served.scheduled_ns[request] = now

    def chunks(self, pool: ReplicaPool, rank: int, start: int, scheduler: Scheduler) -> None:
        """A step's chunks are computed: send them ahead where the engine does, and tell who watches."""
        if pool.policy.sends_chunks:
            for request, done in scheduler.parts:
                self._send(rank, done - self._sent.get(request, 0))
                self._sent[request] = done
        if self._watch is not None:
            for request, tokens in scheduler.chunks:
                self._watch(
                    PromptChunk(request, pool is self._prefill, rank, start, int(self.env.now), tokens)
                )

    def done(self, pool: ReplicaPool, rank: int, done: Done) -> None:
        """Steps of a rank are over."""
        served, now = self.served, self.env.now
        for request in done.first:
            served.first_token_ns[request] = now
            (served.prefill_rank if pool is self._prefill else served.rank)[request] = rank
        for request in done.handed:
            self.env.process(self._hand_over(request, rank))
        for request in done.last:
            served.last_token_ns[request] = now
            (served.prefill_rank if pool is self._prefill else served.rank)[request] = rank
            self.left -= 1
            if self._next is not None and (following := next(self._next, None)) is not None:
                served.arrival_ns[following] = now
                self.arrive(following)

    def _send(self, rank: int, tokens: int) -> int:
        """Put keys and values on a rank's link, behind those before them; when they are there."""
        end = max(int(self.env.now), self._link_free[rank])
        self._link_free[rank] = end + (self._transfer_ns(tokens) if tokens > 0 else 0)
        return self._link_free[rank]

    def _hand_over(self, request: int, rank: int) -> Generator[Any, Any, None]:
        """Keys and values go to the other pool, what went ahead excepted."""
        assert self._prefill is not None
        start = int(self.env.now)
        tokens = int(self.served.requests.input_tokens[request]) - self._sent.pop(request, 0)
        end = self._send(rank, tokens)
        yield self.env.timeout(end - start)
        self.served.transfer_ns[request] = end - start
        self._pools[id(self._prefill)][0][rank // self._prefill.ranks].let_go(
            rank % self._prefill.ranks, request
        )
        replicas, ranks, loads = self._pools[id(self._decode)]
        at = least_loaded(request, ranks, loads)
        replicas[at // self._decode.ranks].add(at % self._decode.ranks, request, 1, ready=True)

    def open_loop(self) -> Generator[Any, Any, None]:
        """Requests arrive when the load says."""
        arrival, block = self.served.arrival_ns, 4096
        for first in range(0, len(arrival), block):
            for request, moment in enumerate(arrival[first : first + block].tolist(), first):
                if moment > self.env.now:
                    yield self.env.timeout(moment - self.env.now)
                self.arrive(request)

    def closed_loop(self, concurrency: int) -> Generator[Any, Any, None]:
        """So many requests at once, and another whenever one ends."""
        count = len(self.served.arrival_ns)
        self._next = iter(range(min(concurrency, count), count))
        self.served.arrival_ns[:concurrency] = 0
        yield self.env.timeout(0)
        for request in range(min(concurrency, count)):
            self.arrive(request)

    def sample(self, every_ns: int, most: int) -> Generator[Any, Any, None]:
        """Count running and waiting sequences; above `most` moments half go and the interval doubles."""
        ranks = [rank for _, ranks, _ in self._pools.values() for rank in ranks]
        counts, decoding = self.served.counts, len(self._pools[id(self._decode)][1])
        while self.left and self.env.peek() != float("inf"):
            yield self.env.timeout(every_ns)
            every = [rank.counts for rank in ranks]
            running, waiting = map(sum, zip(*every, strict=True))
            own = [count for count, _ in every[:decoding]]
            counts.append(Count(int(self.env.now), running, waiting, sum(own), max(own)))
            if len(counts) >= most:
                del counts[::2]
                every_ns *= 2

    def finish(self) -> Served:
        """Sums over the ranks, once nothing is left to happen."""
        for log, (_, ranks, _) in zip(self.served.pools, self._pools.values(), strict=True):
            log.preemptions = sum(rank.preemptions for rank in ranks)
            log.cached_tokens = sum(rank.cached_tokens for rank in ranks)
            log.peak_blocks = max(rank.cache.peak for rank in ranks)
        check_all_served(self.left, len(self.served.requests))
        return self.served


def check_all_served(left: int, requests: int) -> None:
    """Raise InfeasibleError where some of the requests are left, and nothing happens any more."""
    if left:
        raise InfeasibleError(
            f"{left} of {requests} requests cannot be served: their keys and values do not fit into the "
            "cache of a rank; give it more memory, or shorten the requests"
        )


def serve_requests(
    requests: Requests,
    decode: ReplicaPool,
    *,
    prefill: ReplicaPool | None = None,
    transfer_ns: Callable[[int], int] | None = None,
    route: str = "least_loaded",
    sample_ns: int = 0,
    most_samples: int = 1 << 30,
    concurrency: int | None = None,
    front_ns: Callable[[int], int] | None = None,
    watch: Callable[[PromptChunk], None] | None = None,
) -> Served:
    """Serve a load until its last token.

    `decode`: the replicas that serve, or decode only where `prefill` names others for the prompts; then the
    keys and values of n tokens take `transfer_ns(n)` between them, one request after another on a rank's
    link. `route`: as `serving.router`. `sample_ns`: interval at which running and waiting sequences are
    counted; it doubles above `most_samples`. `concurrency`: arrival times do not count, so many requests are
    under way at a time. `front_ns(n)`: what the tokeniser takes for n tokens, one prompt after another.
    `watch`: is told every chunk of a prompt. Raises InfeasibleError for requests that do not fit into the
    cache.
    """
    chosen = router(route, bool(requests.block_tokens))
    events = _Events(requests, decode, prefill, transfer_ns or (lambda tokens: 0), chosen, front_ns, watch)
    events.env.process(events.open_loop() if concurrency is None else events.closed_loop(concurrency))
    if sample_ns:
        events.env.process(events.sample(sample_ns, most_samples))
    events.env.run()
    return events.finish()
