"""A run event by event in SimPy: faults, repairs, spares, slow nodes, planned stops, groups that come and go.

Time is whole nanoseconds. Every nanosecond of every group of GPUs is booked once: the books balance exactly.
Between two events nothing is random, so the checkpoints of a stretch have a closed form and need no events.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import simpy
from msgspec import Struct, field

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.frozen import Frozen
from moesim.simulator.run.failures import FailureModel, Stop

NS = 1e9
RANDOM_STREAM = 7
"""Separates this stream of random numbers from the other streams of a scenario's seed."""
FOREVER_NS = 10**18
DRAWS = 64
"""Random numbers that a source draws at once."""

Process = Generator[simpy.Event, Any, None]


class TimelineEntry(NamedTuple):
    """A part of the shown run: `what` the job did (or a node or group, beside it), and why; times in s."""

    begin_s: float
    end_s: float
    what: str
    why: str
    phase: int


class TimelineRow(Frozen):
    """What the job did between two times of the shown run."""

    begin_s: float
    end_s: float
    what: str
    why: str
    phase: str


class RunTimeline(Frozen):
    """One of the simulated runs, the one of median length, from its begin to its end."""

    replica: int
    rows: tuple[TimelineRow, ...]
    omitted: int
    """Rows left out at the end of a very long list."""


class RunBooks(Struct):
    """One run: `ns` is group-nanoseconds by (phase, part, cause); they sum to groups * wall exactly.

    Cause -1 stands for none. `stops` counts interruptions by (phase, cause). `wall_ns`: by phase.
    `active_ns`: sum over training of time * groups at work.
    """

    groups: int
    wall_ns: list[int]
    ns: defaultdict[tuple[int, str, int], int] = field(default_factory=lambda: defaultdict(int))
    stops: defaultdict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))
    trained_ns: int = 0
    active_ns: int = 0
    timeline: list[TimelineEntry] = field(default_factory=list)

    @property
    def balanced(self) -> bool:
        """Whether all parts together are the whole time of all groups, to the nanosecond."""
        return sum(self.ns.values()) == self.groups * sum(self.wall_ns)

    def seconds(self, part: str) -> float:
        """Seconds of the whole job in a part."""
        return sum(ns for (_, name, _), ns in self.ns.items() if name == part) / self.groups / NS


def simulate_events(
    work_s: Sequence[float],
    model: FailureModel,
    replicas: int,
    seed: int,
    factors: FloatArray | None = None,
    step_s: Sequence[float] = (),
) -> list[RunBooks]:
    """Run the phases one after the other in every replica (eq. J4).

    `work_s`: training seconds of each phase without interruptions; `factors` multiplies them in each replica
    (uncertain step time). `step_s`: step time of each phase, for what a lost group throws away. A phase ends
    with a durable checkpoint. Faults of replica i come at the same times for every model with the same rates
    (common random numbers).
    """
    scale = [1.0] * replicas if factors is None else [float(factor) for factor in factors]
    return [simulate_one(work_s, model, seed, i, scale[i], step_s) for i in range(replicas)]


def simulate_one(
    work_s: Sequence[float],
    model: FailureModel,
    seed: int,
    replica: int,
    factor: float = 1.0,
    step_s: Sequence[float] = (),
    show: bool = False,
) -> RunBooks:
    """One replica of `simulate_events`; `show` keeps its timeline."""
    work = [max(round(seconds * factor * NS), 0) for seconds in work_s]
    steps = [max(round(seconds * factor * NS), 1) for seconds in step_s] or [1] * len(work)
    return _EventRun(model, work, steps, [seed, RANDOM_STREAM, replica], show).books


class _Draws:
    """A stream of random numbers, drawn in blocks."""

    __slots__ = ("exponentials", "rng", "uniforms")

    def __init__(self, key: Sequence[int]) -> None:
        self.rng = np.random.default_rng(key)
        self.exponentials: Iterator[float] = iter(())
        self.uniforms: Iterator[float] = iter(())

    def wait_ns(self, rate_per_s: float) -> int:
        value = next(self.exponentials, None)
        if value is None:
            self.exponentials = iter(self.rng.standard_exponential(DRAWS).tolist())
            value = next(self.exponentials)
        return max(1, min(round(value / rate_per_s * NS), FOREVER_NS))

    def uniform(self) -> float:
        value = next(self.uniforms, None)
        if value is None:
            self.uniforms = iter(self.rng.random(DRAWS).tolist())
            value = next(self.uniforms)
        return value


class _PhaseProgress:
    """Where a phase stands: cycles of training and checkpoint that are done, and the place in this one.

    Every cycle ends with a checkpoint to the fastest tier, every `every[k]`-th one to tier k too, and the
    last one to all.
    """

    __slots__ = ("a", "count", "done", "every", "into", "lags", "safe", "stalled", "stalls", "work")

    def __init__(self, work: int, model: FailureModel) -> None:
        tiers = model.tiers
        self.work = work
        self.a = min(max(round(min(tiers[0].interval_s * NS, FOREVER_NS)), 1), max(work, 1))
        self.stalls = [round(tier.stall_s * NS) for tier in tiers]
        self.lags = [round(tier.lag_s * NS) for tier in tiers]
        self.every = [1, *(tier.every for tier in tiers[1:])]
        self.count = max(1, -(-work // self.a))
        self.done = self.into = self.stalled = 0
        self.safe = [0] * len(tiers)

    def stalls_to(self, cycle: int) -> int:
        """Checkpoint stalls of the first cycles."""
        if len(self.stalls) == 1:
            return self.stalls[0] * cycle
        return sum(d * (cycle // m + (cycle == self.count and cycle % m > 0)) for d, m in zip(
            self.stalls, self.every, strict=True
        ))  # fmt: skip

    def work_to(self, cycle: int) -> int:
        return self.work if cycle == self.count else cycle * self.a

    def now(self) -> tuple[int, int]:
        """(work, stalls) that have passed."""
        return self.work_to(self.done) + self.into, self.stalls_to(self.done) + self.stalled

    def wall_to(self, cycle: int, slow: float) -> int:
        """Wall time until a cycle ends at a factor on the time of work."""
        work, stalls = self.now()
        left = self.work_to(cycle) - work
        return (left if slow == 1.0 else math.ceil(left * slow)) + self.stalls_to(cycle) - stalls

    def advance(self, wall: int, slow: float) -> None:
        """Let wall time pass."""
        cycle = self.a * slow + self.stalls_to(self.count) / self.count
        end = max(self.done, min(self.count, self.done + int(wall / cycle)))
        while end > self.done and self.wall_to(end, slow) > wall:
            end -= 1
        while end < self.count and self.wall_to(end + 1, slow) <= wall:
            end += 1
        if end > self.done:
            wall -= self.wall_to(end, slow)
            self.done, self.into, self.stalled = end, 0, 0
        if end == self.count:
            return
        left = self.work_to(end + 1) - self.work_to(end) - self.into
        longest = left if slow == 1.0 else math.ceil(left * slow)
        if wall < longest:
            self.into += wall if slow == 1.0 else int(wall / slow)
        else:
            self.into += left
            self.stalled += wall - longest

    def saved(self, tier: int, slow: float) -> int:
        """Cycle of the newest checkpoint of a tier, or of a slower one, that is wholly written."""
        newest = self.safe[tier]
        work, stalls = self.now()
        for k in range(tier, len(self.every)):
            cycle = self.done // self.every[k] * self.every[k]
            while cycle > newest and (
                (work - self.work_to(cycle)) * slow + stalls - self.stalls_to(cycle) < self.lags[k]
            ):
                cycle -= self.every[k]
            newest = max(newest, cycle)
        return newest

    def roll_back(self, tier: int, slow: float) -> int:
        """Return to the newest checkpoint of a tier; returns the work that is lost."""
        cycle = self.saved(tier, slow)
        lost = self.now()[0] - self.work_to(cycle)
        self.safe = [cycle if k <= tier else min(cycle, self.saved(k, slow)) for k in range(len(self.every))]
        self.done, self.into, self.stalled = cycle, 0, 0
        return lost

    def save(self) -> None:
        """Treat the present place as saved (a planned stop writes a checkpoint first)."""
        # The cycle starts anew behind the work that is done; its checkpoint moves back by as much.
        self.work -= self.now()[0]
        self.count = max(1, -(-self.work // self.a))
        self.done = self.into = self.stalled = 0
        self.safe = [0] * len(self.every)


class _EventRun:
    """One run: the job as a process, and a process for each source of events, broken node and lost group."""

    def __init__(
        self, model: FailureModel, work: Sequence[int], steps: Sequence[int], key: list[int], show: bool
    ) -> None:
        self.model, self.steps, self.show = model, steps, show
        self.env = env = simpy.Environment()
        self.books = RunBooks(model.groups.count if model.groups else 1, [0] * len(work))
        self.phase, self.spent = 0, 0
        self.exposed = self.training = self.swapped_tray = False
        self.slow_nodes = 0
        self.active = self.books.groups
        self.requests: list[tuple[str, Stop | None]] = []
        self.back: simpy.Event | None = None
        self.spares = None
        if model.spares is not None:
            self.spares = simpy.Container(env, init=model.spares)
        self.crews = None if model.crews is None else simpy.Resource(env, capacity=model.crews)
        self.in_rack: defaultdict[int, int] = defaultdict(int)
        self.offences: defaultdict[int, int] = defaultdict(int)
        self.job = env.process(self._job(work))
        if model.rate_per_s > 0.0:
            env.process(self._stops(_Draws([*key, 1])))
        if model.slow is not None and model.slow.rate_per_s > 0.0:
            env.process(self._slow_nodes(_Draws([*key, 2])))
        if model.maintenance is not None:
            env.process(self._maintenance())
        env.run(until=self.job)

    @property
    def now(self) -> int:
        """Nanoseconds since the begin."""
        return int(self.env.now)

    # -- books

    def _book(self, part: str, wall: int, cause: int = -1) -> None:
        if wall:
            self.books.ns[self.phase, part, cause] += wall * self.books.groups
            self._shown(wall, part, cause)

    def _shown(self, wall: int, part: str, cause: int = -1, why: str = "") -> None:
        if self.show:
            end = self.now
            name = why or (self.model.stops[cause].name if cause >= 0 else "")
            self.books.timeline.append(TimelineEntry((end - wall) / NS, end / NS, part, name, self.phase))

    def _pace(self) -> float:
        """Wall time for a nanosecond of work: slow nodes, lost groups, and what fault tolerance costs."""
        pace = self.model.slow.factor if self.slow_nodes and self.model.slow else 1.0
        groups = self.model.groups
        return pace if groups is None else pace * groups.pace(self.active)

    def _advance(self, place: _PhaseProgress, wall: int, pace: float) -> None:
        if not wall:
            return
        before = place.now()
        place.advance(wall, pace)
        after = place.now()
        work, stalls = after[0] - before[0], after[1] - before[1]
        books, groups = self.books, self.books.groups
        books.ns[self.phase, "productive", -1] += work * groups
        books.ns[self.phase, "checkpoints", -1] += stalls * groups
        rest = (wall - work - stalls) * groups
        away = min(rest, (wall - stalls) * (groups - self.active))
        books.ns[self.phase, "fewer groups", -1] += away
        slower = rest - away
        tolerance = 0
        if slower and self.model.groups is not None:
            ideal = groups / self.active
            tolerance = min(slower, int(work * groups * (self.model.groups.pace(self.active) / ideal - 1.0)))
            books.ns[self.phase, "fault tolerance", -1] += tolerance
        books.ns[self.phase, "slow nodes", -1] += slower - tolerance
        books.trained_ns += wall
        books.active_ns += wall * self.active
        self._shown(wall, "slow" if self.slow_nodes else "training", why=(
            f"{self.active} of {groups} groups" if self.active < groups else ""
        ))  # fmt: skip

    def _lose(self, work: int, cause: int) -> None:
        """Work that was booked as productive must be done again."""
        self.books.ns[self.phase, "productive", -1] -= work * self.books.groups
        self.books.ns[self.phase, "lost", cause] += work * self.books.groups
        if self.show:
            name = f"{self.model.stops[cause].name}; {work / NS:.1f} s done again"
            self.books.timeline.append(TimelineEntry(self.now / NS, self.now / NS, "fault", name, self.phase))

    # -- the job

    def _job(self, work: Sequence[int]) -> Process:
        for number, length in enumerate(work):
            self.phase = number
            began = self.now
            yield from self._train(_PhaseProgress(length, self.model))
            last = round(self.model.tiers[-1].lag_s * NS)  # the last write must be durable
            if last:
                yield self.env.timeout(last)
                self._book("checkpoints", last)
            self.books.wall_ns[number] = self.now - began

    def _train(self, place: _PhaseProgress) -> Process:
        while True:
            while self.requests:
                yield from self._serve(place, *self.requests.pop(0))
            if self.model.groups is not None and self.active < self.model.groups.minimum:
                yield from self._wait_for_groups()
                continue
            pace = self._pace()
            left = place.wall_to(place.count, pace)
            began = self.now
            self.exposed = self.training = True
            try:
                yield self.env.timeout(left)
            except simpy.Interrupt as hit:
                self.exposed = self.training = False
                self._advance(place, self.now - began, pace)
                if hit.cause is not None:
                    yield from self._struck(place, int(hit.cause), pace)
            else:
                self.exposed = self.training = False
                self._advance(place, left, pace)
                return

    def _struck(self, place: _PhaseProgress, cause: int, pace: float) -> Process:
        """An interruption of training: to the end of the restart, or of the stall of the other groups."""
        stop, groups = self.model.stops[cause], self.model.groups
        self.books.stops[self.phase, cause] += 1
        if stop.planned:
            yield from self._save(place, cause)
        elif groups is not None and groups.go_on:
            lost = min(place.now()[0] % self.steps[self.phase], place.into)
            self._lose(lost, cause)
            place.into -= lost
            for _ in range(min(self.active, max(1, -(-stop.nodes // groups.nodes)))):
                self.active -= 1
                self.env.process(self._lost_group(stop, min(stop.nodes, groups.nodes)))
            if not self.active:  # no group has the state any more
                self._lose(place.roll_back(stop.tier, pace), cause)
            stall = round(groups.stall_s * NS)
            yield self.env.timeout(stall)
            self._book("restart", stall, cause)
            return
        else:
            self._lose(place.roll_back(stop.tier, pace), cause)
        yield from self._come_back(cause)

    def _save(self, place: _PhaseProgress, cause: int) -> Process:
        """A checkpoint before a planned stop, to the fastest tier that outlives a node."""
        stall = round(self.model.tiers[self.model.outlives_node].stall_s * NS)
        place.save()
        if stall:
            yield self.env.timeout(stall)
            self._book("checkpoints", stall, cause)

    def _come_back(self, cause: int) -> Process:
        """Detection, nodes and restart; an interruption of the restart begins anew with its own cause."""
        while True:
            stop = self.model.stops[cause]
            detection = round(stop.detection_s * NS)
            if detection:
                yield self.env.timeout(detection)
                self._book("detection", detection, cause)
            began = self.now
            yield from self._replace(stop)
            self._book("waiting", self.now - began, cause)
            began = self.now
            self.exposed = True
            try:
                yield self.env.timeout(round(stop.restart_s * NS))
            except simpy.Interrupt as hit:
                self._book("restart", self.now - began, cause)
                cause = int(hit.cause or 0)
                self.books.stops[self.phase, cause] += 1
                continue
            finally:
                self.exposed = False
            self._book("restart", self.now - began, cause)
            return

    def _replace(self, stop: Stop) -> Process:
        """Wait until the nodes of a fault are replaced, or go on with fewer groups if the plan is elastic."""
        if not stop.nodes or self.spares is None or self.swapped_tray:
            self.swapped_tray = False
            return
        for _ in range(stop.nodes):
            self.env.process(self._repair(round(stop.away_s * NS)))
        groups = self.model.groups
        elastic = groups is not None and not groups.go_on and self.active > groups.minimum
        if elastic and self.spares.level < stop.nodes:
            self.active -= 1
            self.env.process(self._grow(stop.nodes))
            return
        yield self.spares.get(stop.nodes)

    def _repair(self, away: int) -> Process:
        """A broken node, until it is a spare."""
        assert self.spares is not None
        if self.crews is None:
            yield self.env.timeout(away)
        else:
            with self.crews.request() as crew:
                yield crew
                yield self.env.timeout(away)
        yield self.spares.put(1)

    def _ask(self, what: str, stop: Stop | None = None) -> None:
        """Ask the job for something at its next moment of training."""
        self.requests.append((what, stop))
        if self.back is not None and not self.back.triggered:
            self.back.succeed()
        self._look()

    def _look(self) -> None:
        """Let a job that trains look at its pace and requests."""
        if self.training:
            self.exposed = self.training = False
            self.job.interrupt(None)

    def _serve(self, place: _PhaseProgress, what: str, stop: Stop | None) -> Process:
        """Do what was asked for while the job trained: let a group in, swap a slow node, maintain."""
        groups, model = self.model.groups, self.model
        if what == "rejoin":
            assert groups is not None
            wall = round(groups.rejoin_s * NS)
            yield self.env.timeout(wall)
            self._book("restart", wall)
            self.active += 1
            return
        cause = model.stops.index(stop) if stop is not None else -1
        assert stop is not None
        self.books.stops[self.phase, cause] += 1
        yield from self._save(place, cause)
        if what == "maintenance":
            assert model.maintenance is not None
            wall = round(model.maintenance.lasts_s * NS)
            yield self.env.timeout(wall)
            self._book("planned", wall, cause)
        elif what == "grow":
            self.active += 1
        else:
            self.slow_nodes -= 1
        yield from self._come_back(cause)

    # -- groups of a fault-tolerant or elastic job

    def _lost_group(self, stop: Stop, nodes: int) -> Process:
        swapped, self.swapped_tray = self.swapped_tray, False
        yield self.env.timeout(round(stop.detection_s * NS))
        if nodes and self.spares is not None and not swapped:
            for _ in range(nodes):
                self.env.process(self._repair(round(stop.away_s * NS)))
            yield self.spares.get(nodes)
        yield self.env.timeout(round(stop.restart_s * NS))
        self._ask("rejoin")

    def _grow(self, nodes: int) -> Process:
        assert self.spares is not None
        yield self.spares.get(nodes)
        self._ask("grow", self.model.stops[self.model.growth])

    def _wait_for_groups(self) -> Process:
        began = self.now
        self.back = self.env.event()
        if not self.requests:
            yield self.back
        self._book("waiting", self.now - began)

    # -- sources of events

    def _stops(self, draws: _Draws) -> Process:
        """All random stops: a Poisson process of their total rate, each with its share."""
        stops, rate = self.model.stops, self.model.rate_per_s
        bounds = [math.fsum(stop.rate_per_s for stop in stops[: n + 1]) / rate for n in range(len(stops) - 1)]
        while True:
            yield self.env.timeout(draws.wait_ns(rate))
            number = bisect_right(bounds, draws.uniform())
            stop = stops[number]
            if not self.exposed or not self.job.is_alive or not self._strikes(stop, draws):
                continue
            self.exposed = self.training = False
            self.swapped_tray = self._in_rack(stop, draws)
            self.job.interrupt(number)

    def _strikes(self, stop: Stop, draws: _Draws) -> bool:
        """Whether a fault meets a node that is in the job: not evicted, and not of a group that is away."""
        offenders = self.model.offenders
        if self.active < self.books.groups and draws.uniform() * self.books.groups >= self.active:
            return False
        if offenders is None or stop.planned or draws.uniform() >= offenders.share:
            return True
        node = int(draws.uniform() * offenders.nodes)
        if offenders.evict_after is not None and self.offences[node] >= offenders.evict_after:
            return False
        self.offences[node] += 1
        return True

    def _in_rack(self, stop: Stop, draws: _Draws) -> bool:
        """Whether a spare tray of the same rack takes over."""
        model = self.model
        if not model.trays or stop.nodes != 1 or stop.planned:
            return False
        rack = int(draws.uniform() * model.nodes)
        if self.in_rack[rack] >= model.trays:
            return False
        self.in_rack[rack] += 1
        self.env.process(self._tray(rack, round(stop.away_s * NS)))
        return True

    def _tray(self, rack: int, away: int) -> Process:
        yield self.env.timeout(away)
        self.in_rack[rack] -= 1

    def _slow_nodes(self, draws: _Draws) -> Process:
        slow = self.model.slow
        assert slow is not None
        while True:
            yield self.env.timeout(draws.wait_ns(slow.rate_per_s))
            self.env.process(self._slow_node(draws.uniform() < slow.undetected))

    def _slow_node(self, unnoticed: bool) -> Process:
        slow = self.model.slow
        assert slow is not None
        self.slow_nodes += 1
        self._look()
        yield self.env.timeout(round((slow.lasts_s if unnoticed else slow.detection_s) * NS))
        if unnoticed:
            self.slow_nodes -= 1
            self._look()
        else:
            self._ask("swap", self.model.stops[slow.stop])

    def _maintenance(self) -> Process:
        plan = self.model.maintenance
        assert plan is not None
        while True:
            yield self.env.timeout(round(plan.every_s * NS))
            self._ask("maintenance", self.model.stops[plan.stop])
