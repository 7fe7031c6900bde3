"""Specification and registry of schedules, their legal sizes, helpers of the builders, and the validator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Literal, TypeAlias

from msgspec import Struct, field

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.validation import nearest
from moesim.simulator.common.bounded_cache import BoundedCache
from moesim.simulator.schedules.action import KINDS, Action, Kind, Overlap, Schedule, Step, actions_of
from moesim.simulator.schedules.timeline import Durations, longest_path

# -- sizes; every error names the nearest legal ones ---------------------------------------------------

MAX_CHUNKS = 1_000_000
"""Most (stage, micro-batch) pairs of one schedule; 16 ranks with 120 micro-batches have 1,920."""


def check_microbatches(
    name: str, microbatches: int, minimum: int, legal: Callable[[int], bool], rule: str
) -> None:
    """Raise InputError unless `microbatches` is at least `minimum` and `legal`; the message states `rule`."""
    if microbatches >= minimum and legal(microbatches):
        return
    below = next((m for m in range(microbatches - 1, minimum - 1, -1) if legal(m)), None)
    start = max(minimum, microbatches + 1)
    above = next(m for m in range(start, 2 * start + 1) if legal(m))
    near = [m for m in (below, above) if m is not None]
    raise InputError(
        f"schedule {name}: microbatches={microbatches} is illegal: {rule}; nearest legal: "
        f"{', '.join(map(str, near))}.",
        key="microbatches",
        nearest=near,
    )


# -- specification of a pipeline schedule, and the registry of all schedules ---------------------------

Builder: TypeAlias = Callable[[int, int, int], Schedule]
"""Builds a schedule from pipeline ranks, micro-batches and stages per rank, which were checked before."""

Bubble: TypeAlias = Callable[[int, Durations, int], float | None]
"""Published bubble from pipeline ranks, durations of a chunk and stages per rank; None if not published."""

Project: TypeAlias = Literal["torch", "megatron-lm"]
"""`torch.distributed.pipelining` (2.13) and the pipeline schedules of Megatron-LM."""


DEFAULT_ORDER = "deepseek-v3"
"""Name in `OVERLAP_ORDERS` of the order inside the pairs of most schedules."""


class ScheduleSpec(Struct, frozen=True):
    """One pipeline schedule: its builder, legal sizes and known properties.

    A test builds every registered schedule and compares it with its spec.
    """

    name: str
    builder: Builder
    stages_per_rank: int | None = 1
    """Stages of one direction on a rank; None lets the caller choose (`parallel.vpp`)."""
    check_sizes: Callable[[int, int], None] | None = None
    """Raises InputError, with the nearest legal sizes, for numbers of pipeline ranks and micro-batches that
    the schedule does not support; None if it supports all."""
    microbatch_step: Callable[[int, int], int] | None = None
    """Micro-batches after which the steady state repeats, from pipeline ranks and micro-batches; None if not
    known, so that the planner validates and replays every order in full."""
    bubble: Bubble | None = None
    """Published closed form of the bubble; None if there is none."""
    bidirectional: bool = False
    """Whether micro-batches enter at both ends, so that two pipeline ranks hold every stage."""
    overlapped_pairs: bool = False
    """Whether it runs a forward and a backward chunk as one overlapped pair."""
    hides_expert_transfers: bool = False
    """Whether its pairs are Megatron core's expert overlap, with the limits that it checks."""
    awaits_sends: bool = False
    """Whether a rank waits until the outputs of an action are sent (docs/model.md, eq. E7)."""
    names_elsewhere: Mapping[Project, str] = field(default_factory=dict)
    """Names in other projects; a project that is missing does not have the schedule."""
    overlap_order: str = DEFAULT_ORDER
    """Name in `OVERLAP_ORDERS` of the order inside its pairs."""
    advised: bool = True
    """Whether the advice on what to try next (`moesim explain`) simulates it."""
    fleet_default: bool = True
    """Whether a search over a fleet tries it by default. A bidirectional schedule cannot run on a fleet, and
    is tried on each pool alone."""

    @property
    def free_vpp(self) -> bool:
        """Whether the caller chooses the number of stages per rank."""
        return self.stages_per_rank is None

    def check(self, pp: int, microbatches: int, vpp: int = 1) -> None:
        """Raise InputError, with the nearest legal sizes, for sizes that `build` does not accept."""
        for label, value in (("pp", pp), ("microbatches", microbatches), ("vpp", vpp)):
            if value < 1:
                raise InputError(
                    f"schedule {self.name}: {label}={value} is below 1, the nearest legal value."
                )
        if pp * microbatches * vpp > MAX_CHUNKS:
            raise InputError(
                f"schedule {self.name}: pp={pp} x microbatches={microbatches} x vpp={vpp} is above the limit "
                f"of {MAX_CHUNKS:,} chunks; with these ranks use at most "
                f"{max(1, MAX_CHUNKS // (pp * vpp)):,} micro-batches."
            )
        fixed = self.stages_per_rank
        if fixed is not None and vpp not in (1, fixed):
            free = ", ".join(spec.name for spec in SCHEDULES.values() if spec.free_vpp)
            legal = "1" if fixed == 1 else f"{fixed} (or leave it out)"
            raise InputError(
                f"schedule {self.name}: vpp={vpp} is illegal, since it always holds {fixed} stage(s) a rank "
                f"and direction; nearest legal: {legal}. Schedules with a free vpp: {free}.",
                key="parallel.vpp",
                nearest=(1,),
            )
        if self.check_sizes is not None:
            self.check_sizes(pp, microbatches)

    def build(self, pp: int, microbatches: int, vpp: int = 1) -> Schedule:
        """The schedule on `pp` ranks. Raises InputError for sizes that are not legal."""
        self.check(pp, microbatches, vpp)

        def built() -> Schedule:
            return replace(self.builder(pp, microbatches, vpp), awaits_sends=self.awaits_sends)

        return _BUILT.get((self.builder, self.awaits_sends, pp, microbatches, vpp), built)


MOST_STEPS = 100_000
"""Steps of the schedules that are kept for the next scenario, about 25 MB."""

_BUILT: BoundedCache[Schedule] = BoundedCache(MOST_STEPS, lambda built: sum(map(len, built.ranks)))


def every(count: int) -> Callable[[int, int], int]:
    """Return a `microbatch_step` that does not depend on the sizes."""
    return lambda pp, microbatches: count


SCHEDULES: dict[str, ScheduleSpec] = {}
"""Every schedule by name, in the order in which they are listed to users."""


def register(spec: ScheduleSpec) -> None:
    """Add a schedule to the registry. Raises ValueError for a name that is taken."""
    if spec.name in SCHEDULES:
        raise ValueError(f"schedule {spec.name!r} is registered already; choose another name")
    SCHEDULES[spec.name] = spec


def spec_of(name: str) -> ScheduleSpec:
    """The schedule of this name; raises InputError with the valid names for any other."""
    spec = SCHEDULES.get(name)
    if spec is None:
        hint = nearest(name, list(SCHEDULES))
        raise InputError(f"schedule {name!r} is unknown{hint}; valid names: {', '.join(SCHEDULES)}.")
    return spec


def build(name: str, pp: int, microbatches: int, vpp: int = 1) -> Schedule:
    """Build the schedule `name` on `pp` ranks.

    `vpp` is the number of stages per rank of the interleaved schedules; the others take 1. Raises InputError
    listing the valid names, or the nearest legal sizes.
    """
    return spec_of(name).build(pp, microbatches, vpp)


def default_order(name: str) -> str:
    """Name of the overlap order of a schedule; that of DeepSeek-V3 for a schedule from a file."""
    spec = SCHEDULES.get(name)
    return DEFAULT_ORDER if spec is None else spec.overlap_order


def published_bubble(name: str, pp: int, durations: Durations, vpp: int = 1) -> float | None:
    """Return the published closed-form bubble in the unit of `durations`, or None if none was published.

    It is shown beside a simulated bubble and never replaces it. `pp` counts ranks, and `durations` are those
    of one chunk (a micro-batch through one stage). Each schedule's module has the formula and its source.
    """
    spec = SCHEDULES.get(name)
    return None if spec is None or spec.bubble is None else spec.bubble(pp, durations, vpp)


def fleet_defaults() -> tuple[str, ...]:
    """Schedules that a search over a fleet tries by default; none of them keeps a stage on two ranks."""
    return tuple(s.name for s in SCHEDULES.values() if s.fleet_default and not s.bidirectional)


def pool_defaults() -> tuple[str, ...]:
    """Schedules tried on one pool of a fleet alone: `fleet_defaults`, then the bidirectional ones."""
    both_ways = (s.name for s in SCHEDULES.values() if s.fleet_default and s.bidirectional)
    return (*fleet_defaults(), *both_ways)


def name_from(project: Project, free_vpp: bool) -> str:
    """Our name of the schedule that a project runs, with or without a free choice of stages per rank.

    Schedules that hide the transfers of experts are options of a project, and are left out.
    """
    return next(
        spec.name
        for spec in SCHEDULES.values()
        if project in spec.names_elsewhere and spec.free_vpp == free_vpp and not spec.hides_expert_transfers
    )


# -- helpers of the builders, which number micro-batches and merge forwards with backwards -------------

Chunk = tuple[int, int]
"""(stage, micro-batch)."""


class RankWriter:
    """Writes the steps of one rank; every (chunk, kind) takes its micro-batches in ascending order.

    A chunk is given as (stage, first micro-batch), so that one writer can serve both directions of a
    bidirectional pipeline. Micro-batches from number `limit` on are dropped.
    """

    def __init__(self, limit: int | None = None) -> None:
        """Start with an empty rank."""
        self.steps: list[Step] = []
        self._limit = limit
        self._next: dict[tuple[Chunk, Kind], int] = {}
        self._deferred: list[Chunk] = []

    def _take(self, chunk: Chunk, kind: Kind) -> Action:
        # B and I share a counter because a micro-batch has either one B or one I.
        key = (chunk, "I" if kind == "B" else kind)
        microbatch = self._next.get(key, chunk[1])
        self._next[key] = microbatch + 1
        return Action(chunk[0], kind, microbatch)

    def count(self, chunk: Chunk, kind: Kind) -> int:
        """Micro-batches that `kind` of `chunk` has taken so far, dropped ones included."""
        return self._next.get((chunk, "I" if kind == "B" else kind), chunk[1]) - chunk[1]

    def put(self, chunk: Chunk, *kinds: Kind) -> None:
        """Append the next micro-batch of each kind in turn."""
        for kind in kinds:
            action = self._take(chunk, kind)
            if self._limit is None or action.microbatch < self._limit:
                self.steps.append(action)

    def put_overlap(self, forward: Chunk, backward: Chunk) -> None:
        """Append the next forward of one chunk, overlapped with the next full backward of another."""
        self.steps.append(Overlap(self._take(forward, "F"), self._take(backward, "B")))

    def put_input_gradient(self, chunk: Chunk) -> None:
        """Append the next input gradient and queue its weight gradient."""
        action = self._take(chunk, "I")
        self.steps.append(action)
        self._deferred.append((action.stage, action.microbatch))

    def put_deferred_weight(self) -> None:
        """Append the oldest queued weight gradient."""
        stage, microbatch = self._deferred.pop(0)
        self.steps.append(Action(stage, "W", microbatch))


def one_forward_one_backward(
    forwards: Sequence[Chunk], backwards: Sequence[Chunk], warmup: int
) -> tuple[Step, ...]:
    """`warmup` forwards, then forward and backward in turn, then the backwards that are left."""
    steps: list[Step] = [Action(s, "F", m) for s, m in forwards[:warmup]]
    for index, (stage, microbatch) in enumerate(backwards):
        if warmup + index < len(forwards):
            steps.append(Action(forwards[warmup + index][0], "F", forwards[warmup + index][1]))
        steps.append(Action(stage, "B", microbatch))
    return tuple(steps)


def split_backwards(steps: Sequence[Step], delay: int) -> tuple[Step, ...]:
    """Split each full backward into its input gradient and a weight gradient `delay` backwards later.

    Weight gradients that are left over run at the end.
    """
    split: list[Step] = []
    pending: list[Action] = []
    for step in steps:
        if not isinstance(step, Action) or step.kind != "B":
            split.append(step)
            continue
        split.append(Action(step.stage, "I", step.microbatch))
        pending.append(Action(step.stage, "W", step.microbatch))
        if len(pending) > delay:
            split.append(pending.pop(0))
    return (*split, *pending)


# -- validation: every action occurs once, on the right rank, with all dependencies met ----------------


class RankReport(Struct, frozen=True):
    """Peak of chunks in flight and counts of actions on one rank.

    `peak_in_flight` counts (stage, micro-batch) chunks from the start of their forward to the end of
    their last backward part (B or W); `peak_stages` lists that peak (the first of several equal ones) as
    (stage, count) pairs. `peak_until_input_gradient` counts chunks only to the end of B or I. `counts` holds
    the actions outside of pairs by kind (F, I, W, B), and the pairs as `overlap`.
    """

    peak_in_flight: int
    peak_stages: tuple[tuple[int, int], ...]
    peak_until_input_gradient: int
    counts: dict[str, int]


class ScheduleReport(Struct, frozen=True):
    """Result of a successful validation, with a report for every rank in rank order."""

    ranks: tuple[RankReport, ...]

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Peak of chunks in flight on every rank."""
        return tuple(rank.peak_in_flight for rank in self.ranks)


def validate(schedule: Schedule) -> ScheduleReport:
    """Check a schedule by counting its actions and by a dry run across the ranks.

    Raises InputError, naming rank, position and action, for an action that is on the wrong rank, out of
    range, repeated or missing, or that waits for a result that never comes.
    """
    _check_actions(schedule)
    longest_path(schedule, lambda rank, step: 0.0)
    return ScheduleReport(tuple(_rank_report(steps) for steps in schedule.ranks))


def _check_actions(schedule: Schedule) -> None:
    seen: dict[tuple[int, int, str], tuple[int, int]] = {}
    n_stages, microbatches = schedule.n_stages, schedule.microbatches
    placed = (
        (rank, position, action)
        for rank, steps in enumerate(schedule.ranks)
        for position, step in enumerate(steps)
        for action in actions_of(step)
    )
    for rank, position, action in placed:
        here = f"schedule {schedule.name}: rank {rank}, position {position}: {action}"
        if not (0 <= action.stage < n_stages and 0 <= action.microbatch < microbatches):
            raise InputError(
                f"{here} is out of range: stages are 0..{n_stages - 1} and micro-batches "
                f"0..{microbatches - 1}."
            )
        if action.kind not in KINDS:
            raise InputError(f"{here} has kind {action.kind!r}; use one of {', '.join(KINDS)}.")
        owner = schedule.rank_of(action.stage, action.microbatch)
        if owner != rank:
            raise InputError(
                f"{here} is on the wrong rank: stage {action.stage} of micro-batch {action.microbatch} lives "
                f"on rank {owner} ({schedule.placement} placement); move it there."
            )
        # B is both gradients, so an I or W of the same chunk would be the same work twice.
        for kind in ("I", "W") if action.kind == "B" else (action.kind,):
            first = seen.setdefault((action.stage, action.microbatch, kind), (rank, position))
            if first != (rank, position):
                raise InputError(
                    f"{here} repeats work that position {first[1]} of rank {first[0]} does; "
                    "give every chunk one F and either one B or one I and one W."
                )
    if len(seen) == 3 * n_stages * microbatches:
        return
    for stage, microbatch in product(range(n_stages), range(microbatches)):
        missing = [kind for kind in ("F", "I", "W") if (stage, microbatch, kind) not in seen]
        if missing:
            lost = "B" if missing == ["I", "W"] else missing[0]
            rank = schedule.rank_of(stage, microbatch)
            raise InputError(
                f"schedule {schedule.name}: rank {rank}, position {len(schedule.ranks[rank])} (its end): "
                f"{stage}{lost}{microbatch} is missing; give every chunk one F and either one B or one I "
                "and one W."
            )


def _rank_report(steps: tuple[Step, ...]) -> RankReport:
    by_stage: Counter[int] = Counter()
    peak, peak_stages = 0, by_stage.copy()
    until_input = peak_until_input = 0
    in_flight = 0
    counts: Counter[str] = Counter()
    for step in steps:
        actions = actions_of(step)
        counts["overlap" if len(actions) == 2 else actions[0].kind] += 1
        for action in actions:
            if action.kind == "F":
                by_stage[action.stage] += 1
                in_flight += 1
                until_input += 1
        # A pair allocates the chunk of its forward before it frees that of its backward.
        if in_flight > peak:
            peak, peak_stages = in_flight, by_stage.copy()
        peak_until_input = max(peak_until_input, until_input)
        for action in actions:
            if action.kind in ("B", "W"):
                by_stage[action.stage] -= 1
                in_flight -= 1
            if action.kind in ("B", "I"):
                until_input -= 1
    stages = tuple(sorted((stage, count) for stage, count in peak_stages.items() if count))
    return RankReport(peak, stages, peak_until_input, dict(sorted(counts.items())))
