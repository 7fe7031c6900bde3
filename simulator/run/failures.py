"""What stops a run: the model, checkpoints by tier, their best intervals, and the expected end (pure)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.units import format_quantity, parse_quantity, time_text
from moesim.simulator.model.precision import BYTES_PER_ELEMENT, Precision
from moesim.simulator.scenario.run_plan import OPTIMAL, Checkpoint

PROCESS, NODE, RACK, SYSTEM = range(4)
"""What a fault takes with it, and what a checkpoint must outlive: SYSTEM, the storage, outlives all."""

# -- the model ---------------------------------------------------------------------------------------
# What can stop or slow a job, as plain numbers for the whole job. Times are in s, rates in 1/s.


class Stop(Struct, frozen=True):
    """One cause of stops: how often, what it costs, and what comes back from where.

    `nodes` must be replaced, and are away for `away_s`. `tier`: number of the fastest checkpoint tier that
    outlives it. `planned`: training saves a checkpoint first, so that nothing is lost.
    """

    name: str
    rate_per_s: float = 0.0
    detection_s: float = 0.0
    restart_s: float = 0.0
    nodes: int = 0
    tier: int = 0
    planned: bool = False
    away_s: float = 0.0


class Tier(Struct, frozen=True):
    """Checkpoints to one place: the interval and stall of training, and the lag until they are durable.

    `every`: how many checkpoints of the fastest tier lie between two of this one.
    """

    name: str = "remote"
    interval_s: float = math.inf
    stall_s: float = 0.0
    lag_s: float = 0.0
    every: int = 1


class SlowNodes(Struct, frozen=True):
    """Nodes that slow the whole job by `factor`: noticed after `detection_s` and swapped, or not noticed.

    `undetected`: share that nobody notices, which ends by itself after `lasts_s`. `stop`: number of the swap.
    """

    rate_per_s: float
    factor: float
    detection_s: float
    undetected: float
    lasts_s: float
    stop: int

    @property
    def mean_factor(self) -> float:
        """Mean factor on the time of training; the number of slow nodes at a time is Poisson."""
        mean = self.rate_per_s * ((1.0 - self.undetected) * self.detection_s + self.undetected * self.lasts_s)
        return 1.0 / (math.exp(-mean) - math.expm1(-mean) / self.factor)


class Outage(NamedTuple):
    """Planned maintenance of the whole job; `stop`: its number among the causes."""

    every_s: float
    lasts_s: float
    stop: int


class Offenders(NamedTuple):
    """Nodes that fail again and again: how many, their share of faults, and after how many they must go."""

    nodes: int
    share: float
    evict_after: int | None


class Groups(Struct, frozen=True):
    """Replica groups of a job, of which some may be away (`go_on`: the others train on without a restart).

    `stall_s` stops all when a group is lost, `rejoin_s` when it comes back; `step_cost` is the share by which
    fault tolerance lengthens every step. `keep_batch`: the others take over the micro-batches of a lost one.
    """

    count: int
    minimum: int
    go_on: bool
    nodes: int
    stall_s: float = 0.0
    rejoin_s: float = 0.0
    step_cost: float = 0.0
    keep_batch: bool = False
    microbatches: int = 0
    """Micro-batches of a group in a step of the full job; 0: as if they could be split."""

    def pace(self, active: int) -> float:
        """Time of a full job's work with so many groups, over that of all without fault tolerance."""
        share = self.count / active
        if self.keep_batch and self.microbatches:
            share = math.ceil(self.microbatches * self.count / active - 1e-9) / self.microbatches
        return share * (1.0 + self.step_cost)


class FailureModel(Struct, frozen=True):
    """All that stops or slows a job.

    `spares`: standby nodes; None means that a replacement is always available. `crews`: nodes that can be
    repaired at a time; None: all. `trays`: spare trays of each node that is a rack. `growth`: number of the
    stop in which an elastic job takes a group back.
    """

    stops: tuple[Stop, ...]
    tiers: tuple[Tier, ...] = (Tier(),)
    nodes: int = 1
    spares: int | None = None
    crews: int | None = None
    trays: int = 0
    offenders: Offenders | None = None
    slow: SlowNodes | None = None
    maintenance: Outage | None = None
    groups: Groups | None = None
    growth: int = -1
    outlives_node: int = 0
    """Number of the fastest tier that outlives the loss of a node."""

    @property
    def rate_per_s(self) -> float:
        """Random stops of the job in a second."""
        return math.fsum(stop.rate_per_s for stop in self.stops)

    @property
    def certain(self) -> bool:
        """Whether nothing random and nothing planned touches the run."""
        return self.rate_per_s <= 0.0 and self.slow is None and self.maintenance is None


# -- checkpoint --------------------------------------------------------------------------------------
# Closed forms of checkpoints: bytes, stall, expected time under failures and best interval (pure).


def checkpoint_bytes(parameters: int, recipe: Precision) -> float:
    """Bytes of a checkpoint, which holds master weights and both Adam moments of every parameter (eq. J2)."""
    each = BYTES_PER_ELEMENT[recipe.master_weights] + 2.0 * BYTES_PER_ELEMENT[recipe.moments]
    return parameters * each


def young_interval_s(stall_s: float, mean_time_between_s: float) -> float:
    """Young's first-order optimum of the training time between checkpoints in s (Young 1974; eq. J6)."""
    return math.sqrt(2.0 * stall_s * mean_time_between_s)


def daly_interval_s(stall_s: float, mean_time_between_s: float) -> float:
    """Daly's higher-order optimum of the time between checkpoints in s (Daly 2006, eq. 37; eq. J6)."""
    if stall_s >= 2.0 * mean_time_between_s:
        return mean_time_between_s
    ratio = stall_s / (2.0 * mean_time_between_s)
    root = math.sqrt(2.0 * stall_s * mean_time_between_s)
    return root * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - stall_s


def optimal_interval_s(stall_s: float, mean_time_between_s: float) -> float:
    """The interval that minimises the exact expectation of eq. J5: (1 - t/M) e^((t+d)/M) = 1.

    It is found by bisection on (0, M), where the left side decreases. Detection and restart scale the cost of
    every interval by the same factor, and the lag of an asynchronous write adds nearly the same to each, so
    they do not change the optimum.
    """
    if math.isinf(mean_time_between_s):
        return math.inf
    low, high = 0.0, 1.0
    ratio = stall_s / mean_time_between_s
    for _ in range(50):  # to 1e-15 of M
        middle = 0.5 * (low + high)
        if math.log1p(-middle) + middle + ratio > 0.0:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high) * mean_time_between_s


def segments(work_s: float, interval_s: float) -> tuple[int, float]:
    """(number of stretches of training between checkpoints, length of the last one in s)."""
    count = max(1, math.ceil(work_s / interval_s)) if math.isfinite(interval_s) else 1
    return count, work_s - (count - 1) * interval_s if count > 1 else work_s


# -- closed form -------------------------------------------------------------------------------------


def expected_wall_s(work_s: Sequence[float], model: FailureModel, step_s: Sequence[float] = ()) -> float:
    """Expected wall seconds of the phases (eqs. J5 and J12); inf where a stretch practically never succeeds.

    Exact for random stops that all return to one synchronous tier, with spares at hand; a renewal
    approximation of the first order for the rest. `step_s`: step time of each phase (see `Groups`).
    """
    try:
        return _expected_wall_s(work_s, model, step_s)
    except OverflowError:
        return math.inf


def _expected_wall_s(work_s: Sequence[float], model: FailureModel, step_s: Sequence[float]) -> float:
    slow, groups = model.slow, model.groups
    scale = _eviction(math.fsum(work_s), model)
    faults = [(stop.rate_per_s * (1.0 if stop.planned else scale), stop) for stop in model.stops]
    if groups is not None and groups.go_on:
        wall = math.fsum(_tolerant(w, model, faults, s) for w, s in zip(
            work_s, step_s or [0.0] * len(work_s), strict=True
        ))  # fmt: skip
    else:
        pace = slow.mean_factor if slow else 1.0
        if groups is not None:
            missing, none = _elastic(model, faults)
            pace *= groups.pace(groups.count) * groups.count / max(groups.count - missing, groups.minimum)
            faults = [(r * (1.0 - missing / groups.count), stop) for r, stop in faults]
            taken = math.fsum(r for r, stop in faults if stop.nodes and not stop.planned)
            faults.append((taken * none, model.stops[model.growth]))
        wall = math.fsum(_renewed(work, model, faults, pace) for work in work_s)
    save = model.tiers[model.outlives_node].stall_s

    def planned_s(stop: Stop) -> float:
        return save + (down_s(faults, [(1.0, stop)]) or stop.detection_s + stop.restart_s)

    exposed = wall
    wall += exposed * math.fsum(r * planned_s(stop) for r, stop in faults if stop.planned)
    if slow is not None:
        wall += exposed * slow.rate_per_s * (1.0 - slow.undetected) * planned_s(model.stops[slow.stop])
    if groups is None:
        states = [1.0] if model.spares is None else _nodes_away(model, faults, True)
        wall /= math.fsum(states[: (model.spares or 0) + 1])  # the rest of the time it waits for nodes
    if model.maintenance is not None:
        away = planned_s(model.stops[model.maintenance.stop]) + model.maintenance.lasts_s
        share = away / (model.maintenance.every_s + away)
        # As many as begin before the end: the last one need not come.
        count = math.floor(wall / model.maintenance.every_s * (1.0 + share)) if share < 0.5 else math.inf
        wall += min(count * away, wall / (1.0 - share) - wall) if math.isfinite(count) else math.inf
    return wall


def _eviction(work_s: float, model: FailureModel) -> float:
    """Mean share of the faults that still come, as repeat offenders leave the job one by one."""
    who = model.offenders
    rate = math.fsum(stop.rate_per_s for stop in model.stops if not stop.planned)
    if who is None or who.evict_after is None or rate <= 0.0 or work_s <= 0.0 or not who.nodes:
        return 1.0
    mean = rate * who.share / who.nodes * work_s  # faults of one offender
    probability, struck, total = math.exp(-mean), 0.0, 0.0
    for number in range(who.evict_after):  # E[min(Poisson, n)]
        struck += number * probability
        total += probability
        probability *= mean / (number + 1)
    struck += who.evict_after * (1.0 - total)
    return 1.0 - who.share + who.share * struck / mean


def down_s(faults: Sequence[tuple[float, Stop]], first: Sequence[tuple[float, Stop]] = ()) -> float:
    """Mean seconds from an interruption to training again, with interruptions of the restart.

    `first`: the stops, with their rates, one of which begins it; by default all.
    """
    rate = math.fsum(r for r, _ in faults)
    if rate <= 0.0:
        return 0.0

    def means(stops: Sequence[tuple[float, Stop]]) -> tuple[float, float]:
        total = math.fsum(r for r, _ in stops)
        detection = math.fsum(r / total * stop.detection_s for r, stop in stops)
        return detection, math.fsum(r / total * -math.expm1(-rate * stop.restart_s) for r, stop in stops)

    detection, broken = means(faults)
    again = math.inf if broken >= 1.0 else (detection + broken / rate) / (1.0 - broken)
    if not first:
        return again
    detection, broken = means(first)
    return detection + broken * (1.0 / rate + again)


def _renewed(work_s: float, model: FailureModel, faults: Sequence[tuple[float, Stop]], pace: float) -> float:
    """Wall seconds of a phase whose random stops send the whole job back to a checkpoint."""
    first = model.tiers[0]
    count, last_s = segments(work_s, first.interval_s)
    stall_s = first.stall_s + math.fsum(tier.stall_s / tier.every for tier in model.tiers[1:])
    struck = [(rate, stop) for rate, stop in faults if not stop.planned and rate > 0.0]
    rate = math.fsum(r for r, _ in struck)
    whole = work_s * pace + count * stall_s + model.tiers[-1].lag_s
    if rate <= 0.0:
        return whole
    back_s = down_s(faults, struck)
    if len(model.tiers) == 1 and first.lag_s == 0.0:

        def attempt(length_s: float) -> float:
            return math.expm1(rate * (length_s * pace + stall_s))

        return ((count - 1) * attempt(first.interval_s) + attempt(last_s)) * (1.0 / rate + back_s)
    lost_s = 0.0
    for number, tier in enumerate(model.tiers):
        here = math.fsum(r for r, stop in struck if stop.tier == number)
        beyond = math.fsum(r for r, stop in struck if stop.tier >= number)
        if here:
            interval_s = first.interval_s * tier.every if number else first.interval_s
            cycle_s = min(interval_s, work_s) * pace + stall_s * (tier.every if number else 1)
            age_s = 1.0 / beyond - cycle_s / math.expm1(beyond * cycle_s)
            lost_s += here * (age_s + tier.lag_s * math.exp(-beyond * cycle_s))
    if lost_s >= 1.0:
        return math.inf
    return whole * (1.0 + rate * back_s) / (1.0 - lost_s)


def _tolerant(
    work_s: float, model: FailureModel, faults: Sequence[tuple[float, Stop]], step_s: float
) -> float:
    """Wall seconds of a phase of a job whose other groups train on when one is lost (eq. J12)."""
    groups, first = model.groups, model.tiers[0]
    assert groups is not None
    struck = [(r, stop) for r, stop in faults if not stop.planned]
    away = math.fsum(
        r * max(1, -(-stop.nodes // groups.nodes)) * (stop.detection_s + stop.restart_s + groups.stall_s)
        for r, stop in struck
    )
    absent = away / (1.0 + away / groups.count)
    for _ in range(20):  # fewer groups meet fewer faults
        missing, _none = _short(model, [(r * (1.0 - absent / groups.count), stop) for r, stop in struck])
        absent = 0.5 * absent + 0.5 * min(away * (1.0 - absent / groups.count) + missing, groups.count - 1.0)
    pace = groups.pace(groups.count) * groups.count / max(groups.count - absent, groups.minimum)
    pace *= model.slow.mean_factor if model.slow else 1.0
    count, _ = segments(work_s, first.interval_s)
    exposed = work_s * pace + count * math.fsum(tier.stall_s / tier.every for tier in model.tiers)
    rate = math.fsum(r for r, _ in struck) * (1.0 - absent / groups.count)
    each = groups.stall_s + groups.rejoin_s
    lost = rate * step_s * pace / 2.0
    return math.inf if lost >= 1.0 else exposed * (1.0 + rate * each) / (1.0 - lost) + model.tiers[-1].lag_s


def _nodes_away(model: FailureModel, faults: Sequence[tuple[float, Stop]], waits: bool) -> list[float]:
    """Probability of each number of nodes in repair; `waits`: nothing breaks while the job lacks a node.

    Balance across a cut: n nodes come back at min(n, crews) / repair, as often as faults of k nodes lift the
    number over n - 1. For single nodes and enough crews this is Erlang's loss formula, insensitive to the
    distribution of the repair; faults of several nodes bring all of them back at once, which it neglects.
    """
    assert model.spares is not None
    taken = [(r, stop) for r, stop in faults if stop.nodes and r > 0.0]
    nodes = math.fsum(r * stop.nodes for r, stop in taken)
    if not nodes:
        return [1.0]
    away_s = math.fsum(r * stop.nodes * stop.away_s for r, stop in taken) / nodes
    largest = max(stop.nodes for _, stop in taken)
    over = [math.fsum(r for r, stop in taken if stop.nodes >= k) for k in range(largest + 1)]
    if model.trays:
        single = math.fsum(r for r, stop in taken if stop.nodes == 1)
        load, full = single * away_s / model.nodes, [1.0]
        for n in range(1, model.trays + 1):
            full.append(full[-1] * load / n)
        over[1] -= single * (1.0 - full[-1] / math.fsum(full))
    away, most = (
        [1.0],
        model.spares + (largest if waits else 40 + 2 * largest + math.ceil(2 * nodes * away_s)),
    )
    for n in range(1, most + 1):
        last = min(n - 1, model.spares if waits else n - 1)
        rise = math.fsum(away[j] * over[n - j] for j in range(max(0, n - largest), last + 1))
        away.append(rise * away_s / (n if model.crews is None else min(n, model.crews)))
        if away[-1] > 1e250:
            away = [value / 1e250 for value in away]
    total = math.fsum(away)
    return [value / total for value in away]


def _elastic(model: FailureModel, faults: Sequence[tuple[float, Stop]]) -> tuple[float, float]:
    """`_short` of a job that meets faults only while it trains, and fewer with fewer groups."""
    assert model.groups is not None
    missing = none = 0.0
    for _ in range(20):
        share = 1.0 - missing / model.groups.count
        up = share / (1.0 + share * math.fsum(r for r, _ in faults) * down_s(faults))
        more, none = _short(model, [(r * up, stop) for r, stop in faults])
        missing = 0.5 * missing + 0.5 * min(more, model.groups.count - 1.0)
    return missing, none


def _short(model: FailureModel, faults: Sequence[tuple[float, Stop]]) -> tuple[float, float]:
    """(mean number of nodes that are missing, probability that a fault finds no spare)."""
    if model.spares is None:
        return 0.0, 0.0
    away, spares = _nodes_away(model, faults, False), model.spares
    missing = math.fsum(p * (n - spares) for n, p in enumerate(away) if n > spares)
    return missing, math.fsum(away[spares:])


# -- checkpoint tiers --------------------------------------------------------------------------------


class TierReport(Frozen):
    """Checkpoints to one place: times in s and best intervals for the stops that load from it."""

    tier: str
    interval_s: float
    stall_s: float
    write_s: float
    load_s: float
    young_s: float | None
    daly_s: float | None
    optimal_s: float | None


class CheckpointReport(Frozen):
    """Size, times and best intervals of checkpoints (docs/model.md, eqs. J2, J3 and J6)."""

    bytes: float
    interval_s: float
    stall_s: float
    write_s: float
    mean_time_between_interruptions_s: float | None
    young_s: float | None
    daly_s: float | None
    optimal_s: float | None
    """Interval with the least exactly expected time, but no shorter than an asynchronous write."""
    tiers: tuple[TierReport, ...] = ()
    """All places of checkpoints, the fastest first, where the plan has more than one."""


def stall_and_write_s(save: Checkpoint, cluster: Cluster, size_bytes: float) -> tuple[float, float]:
    """(seconds that training waits for a checkpoint, seconds of its write) (eq. J3).

    Both are the write of a synchronous checkpoint. With an asynchronous one training waits for the copy to
    host memory, in which every GPU copies its share over its own host link; the write overlaps with training,
    and slows it by `interference`.
    """
    write = size_bytes / save.storage.write_bytes_per_s(cluster.nodes)
    beside = save.interference.value * write if save.interference else 0.0
    if save.stall is not None:
        return save.stall.value + beside, max(write, save.stall.value)
    if not save.asynchronous:
        return write, write
    return _host_copy_s(cluster, size_bytes) + beside, write


def _host_copy_s(cluster: Cluster, size_bytes: float) -> float:
    host = cluster.accelerator.host_bandwidth
    if host is None:
        raise InputError(
            f"run.checkpoint.asynchronous: accelerator {cluster.accelerator.name!r} has no figure "
            "host_bandwidth; state run.checkpoint.stall, or set asynchronous: false"
        )
    return size_bytes / cluster.n_gpus / host.value


def loads_s(save: Checkpoint | None, cluster: Cluster, size_bytes: float) -> list[float]:
    """Seconds to load a checkpoint from each tier, the storage last."""
    if save is None:
        return [0.0]
    share = size_bytes / cluster.n_gpus
    fast = [share / tier.bandwidth.value for tier in save.tiers if tier.bandwidth is not None]
    return [*fast, size_bytes / save.storage.read_bytes_per_s(cluster.nodes)]


def checkpoint_tiers(
    save: Checkpoint, cluster: Cluster, size_bytes: float, needs: Sequence[float], loads: Sequence[float]
) -> tuple[tuple[Tier, ...], CheckpointReport]:
    """The tiers of a plan and their figures; `needs`: rate of the stops that load from each."""
    stall, write = stall_and_write_s(save, cluster, size_bytes)
    figures = [(save.interval, save.asynchronous, stall, write, save.storage.name, "run.checkpoint")]
    for tier in reversed(save.tiers):
        assert tier.bandwidth is not None
        copy = size_bytes / cluster.n_gpus / tier.bandwidth.value
        waits = min(copy, _host_copy_s(cluster, size_bytes)) if tier.asynchronous else copy
        place = f"run.checkpoint.tiers ({tier.where})"
        figures.insert(0, (tier.interval, tier.asynchronous, waits, copy, tier.where, place))
    tiers: list[Tier] = []
    reports: list[TierReport] = []
    for (interval, behind, waits, copy, name, place), need, load in zip(figures, needs, loads, strict=True):
        best = max(optimal_interval_s(waits, 1.0 / need), copy if behind else 0.0) if need > 0.0 else None
        length = _interval_s(interval, best, copy if behind else 0.0, (place, name, size_bytes))
        every = max(1, round(length / tiers[0].interval_s)) if tiers else 1
        length = every * tiers[0].interval_s if tiers else length
        tiers.append(Tier(name, length, waits, copy if behind else 0.0, every))
        reports.append(
            TierReport(
                tier=name, interval_s=length, stall_s=waits, write_s=copy, load_s=load, optimal_s=best,
                young_s=young_interval_s(waits, 1.0 / need) if need > 0.0 else None,
                daly_s=daly_interval_s(waits, 1.0 / need) if need > 0.0 else None,
            )
        )  # fmt: skip
    rate, last = math.fsum(needs), reports[-1].model_dump(exclude={"tier", "load_s"})
    return tuple(tiers), CheckpointReport(
        bytes=size_bytes,
        mean_time_between_interruptions_s=1.0 / rate if rate > 0.0 else None,
        tiers=tuple(reports) if len(reports) > 1 else (),
        **last,
    )


def _interval_s(interval: str, best: float | None, least_s: float, what: tuple[str, str, float]) -> float:
    """Seconds of an interval; raises InputError where it cannot be."""
    place, name, size_bytes = what
    if interval == OPTIMAL:
        if best is None or best <= 0.0:
            raise InputError(
                f"{place}.interval: optimal has no answer where nothing that fails needs this checkpoint, or "
                "where it costs nothing; state a time, for example 30 min"
            )
        return best
    length = parse_quantity(interval, "s")
    if length < least_s:
        raise InputError(
            f"{place}.interval={interval}: one asynchronous write of "
            f"{format_quantity(size_bytes, 'bytes')} to {name} takes {time_text(least_s)}; use a longer "
            "interval or faster storage"
        )
    return length


# -- whether it can end ------------------------------------------------------------------------------

MOST_SLOWDOWN = 20.0
"""Largest ratio of expected time to training time at which a run still finishes in practice."""

MOST_INTERRUPTIONS = 50_000
"""Largest number of expected interruptions at which simulating a run is still useful."""


class Interruptions(Struct, frozen=True):
    """All interruptions of training: the failure model, checkpoint figures and what was assumed."""

    model: FailureModel
    checkpoint: CheckpointReport | None
    notes: tuple[str, ...]
    restart_parts: dict[str, float]

    @property
    def causes(self) -> tuple[str, ...]:
        """Names of all causes of stops."""
        return tuple(stop.name for stop in self.model.stops)

    def expected_seconds(self, work_s: Sequence[float], step_s: Sequence[float] = ()) -> float:
        """Wall seconds by the closed form (eqs. J5 and J12)."""
        return expected_wall_s(work_s, self.model, step_s)

    def check_feasible(self, work_s: Sequence[float], step_s: Sequence[float] = ()) -> None:
        """Raise InfeasibleError with the reason where the run practically never ends."""
        rate, work = self.model.rate_per_s, math.fsum(work_s)
        if self.model.certain or work <= 0.0:
            return
        expected = self.expected_seconds(work_s, step_s)
        if expected <= MOST_SLOWDOWN * work and expected * rate <= MOST_INTERRUPTIONS:
            return
        at_hand = expected_wall_s(work_s, replace(self.model, spares=None), step_s)
        if at_hand <= MOST_SLOWDOWN * work and at_hand * rate <= MOST_INTERRUPTIONS:
            self.check_waiting(work, expected - at_hand)
        reasons = []
        if rate > 0.0:
            slowest = self.model.tiers[-1]
            length = min(slowest.interval_s, work) + slowest.stall_s
            tries = math.exp(min(length * rate, 700.0))
            back_s = down_s([(stop.rate_per_s, stop) for stop in self.model.stops])
            back = "for ever" if back_s > 1e12 else time_text(back_s)
            reasons.append(
                f"one interruption every {time_text(1.0 / rate)} on the whole job, while training to the "
                f"next checkpoint takes {time_text(length)} ({tries:.3g} attempts on average) and coming "
                f"back {back}"
            )
        if self.model.maintenance is not None:
            plan = self.model.maintenance
            reasons.append(f"maintenance of {time_text(plan.lasts_s)} every {time_text(plan.every_s)}")
        raise InfeasibleError(
            f"the run never finishes in practice: {'; '.join(reasons)}; expected {expected / work:.3g} times "
            "the training time. A shorter run.checkpoint.interval, faster run.restart, fewer nodes or fewer "
            "failures are needed"
        )

    def check_waiting(self, work_s: float, waiting_s: float) -> None:
        """Raise InfeasibleError where the run mostly waits for repaired nodes; arguments are mean seconds."""
        if work_s + waiting_s > MOST_SLOWDOWN * work_s:
            away = max(stop.away_s for stop in self.model.stops)
            raise InfeasibleError(
                f"the run never finishes in practice: it trains for {time_text(work_s)} and waits for a "
                f"spare node for {time_text(waiting_s)}, with {self.model.spares} spares, one interruption "
                f"every {time_text(1.0 / self.model.rate_per_s)} and {time_text(away)} of repair. More "
                "run.spares or a shorter repair are needed"
            )
