"""Specification of a pipeline schedule, and the registry of all schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.validation import nearest
from moesim.simulator.common.bounded_cache import BoundedCache
from moesim.simulator.schedules.schedule import Schedule
from moesim.simulator.schedules.sizes import check_fixed_vpp, check_positive
from moesim.simulator.schedules.timeline import Durations

Builder: TypeAlias = Callable[[int, int, int], Schedule]
"""Builds a schedule from pipeline ranks, micro-batches and stages per rank, which were checked before."""

Bubble: TypeAlias = Callable[[int, Durations, int], float | None]
"""Published bubble from pipeline ranks, durations of a chunk and stages per rank; None if not published."""

Project: TypeAlias = Literal["torch", "megatron-lm"]
"""`torch.distributed.pipelining` (2.13) and the pipeline schedules of Megatron-LM."""


DEFAULT_ORDER = "deepseek-v3"
"""Name in `OVERLAP_ORDERS` of the order inside the pairs of most schedules."""


@dataclass(frozen=True, slots=True)
class ScheduleSpec:
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
        check_positive(self.name, pp, microbatches, vpp)
        if self.stages_per_rank is not None:
            free = [spec.name for spec in SCHEDULES.values() if spec.free_vpp]
            check_fixed_vpp(self.name, vpp, self.stages_per_rank, free)
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
    """Our name of the schedule that a project runs, with or without a free choice of stages per rank."""
    return next(
        spec.name
        for spec in SCHEDULES.values()
        if project in spec.names_elsewhere and spec.free_vpp == free_vpp
    )
