"""Schedule patterns: a schedule compiled for few micro-batches, and extrapolated to more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from moesim.hwmodels.arrays import FloatArray
from moesim.simulator.layout.in_flight import rank_stages
from moesim.simulator.layout.memory import RankStages
from moesim.simulator.planner.replay import Key, Order, compile_order, key_of
from moesim.simulator.schedules import Awaited, Schedule, Step, awaiting, build, spec_of, validate

FILLS = (2, 3)
"""Least pipeline fills in each of a pattern's two samples, so that both reach the steady state."""


@dataclass(frozen=True, slots=True)
class Ends:
    """The stages of a rank's first forward, its last input gradient and the weight gradients after that."""

    first_stage: int
    last_stage: int
    trailing_weights: tuple[int, ...]


@dataclass(frozen=True)
class Pattern:
    """A schedule for one or two numbers of micro-batches, from which larger numbers are extrapolated.

    In its steady state every schedule here adds the same steps for each further micro-batch (or round, or
    pair of them), so the linear extrapolation of counts is exact, and times are those of an eventually
    periodic max-plus system.
    """

    name: str
    samples: tuple[Schedule, ...]

    @property
    def pp(self) -> int:
        """Pipeline ranks."""
        return self.samples[0].pp

    @property
    def n_stages(self) -> int:
        """Stages that one micro-batch passes."""
        return self.samples[0].n_stages

    @property
    def copies(self) -> int:
        """Pipeline ranks that hold the same parameters."""
        return len(self.samples[0].routes)

    @cached_property
    def paired(self) -> bool:
        """Whether the schedule has overlapped pairs."""
        return self.samples[-1].paired

    @cached_property
    def orders(self) -> tuple[Order, ...]:
        """The samples, compiled for replay."""
        return tuple(compile_order(schedule) for schedule in self.samples)

    @cached_property
    def counts(self) -> tuple[tuple[Mapping[Key, int], ...], ...]:
        """How often each rank runs each kind of step, by sample and rank."""
        return tuple(tuple(Counter(map(key_of, steps)) for steps in s.ranks) for s in self.samples)

    @cached_property
    def split(self) -> bool:
        """Whether any rank runs input and weight gradients as separate actions."""
        return any(key[0] == "I" for rank in self.counts[-1] for key in rank)

    @cached_property
    def ends(self) -> tuple[Ends, ...]:
        """First and last work of each rank."""
        return tuple(_ends(steps) for steps in self.samples[-1].ranks)

    @cached_property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """For each rank, the ranks that hold the same stages."""
        return tuple(self.samples[0].holders(rank) for rank in range(self.pp))

    @cached_property
    def in_flight(self) -> tuple[tuple[RankStages, ...], ...]:
        """Moments of most micro-batches in flight of every rank, by sample and rank."""
        return tuple(tuple(rank_stages(schedule)) for schedule in self.samples)

    def along(
        self, first: FloatArray | float, last: FloatArray | float, microbatches: FloatArray
    ) -> FloatArray:
        """Extrapolate a figure of the two samples linearly to other numbers of micro-batches."""
        if len(self.samples) == 1:
            return np.broadcast_to(np.asarray(first, dtype=np.float64), np.shape(microbatches))
        m1, m2 = self.samples[0].microbatches, self.samples[1].microbatches
        slope = (np.asarray(last) - np.asarray(first)) / (m2 - m1)
        return np.asarray(first + slope * (microbatches - m1))


@lru_cache(maxsize=4096)
def pattern(name: str, pp: int, microbatches: int, vpp: int, awaited: Awaited = "schedule") -> Pattern:
    """The pattern of a schedule: the schedule itself if it is short, else two shorter samples of it.

    `awaited`: the sends that its runtime awaits.

    A schedule that does not state the period of its steady state (`ScheduleSpec.microbatch_step`) is
    validated and taken whole. Raises InputError if its builder refuses the sizes or builds a schedule that
    cannot run.
    """
    step = spec_of(name).microbatch_step
    if step is None:
        whole = _pattern(name, pp, vpp, awaited, (microbatches,))
        validate(whole.samples[0])
        return whole
    grain = step(pp, microbatches)
    sizes = [_reduced(microbatches, grain, fills * pp) for fills in FILLS]
    if microbatches <= sizes[1] or sizes[0] == sizes[1]:
        return _pattern(name, pp, vpp, awaited, (microbatches,))
    return _pattern(name, pp, vpp, awaited, tuple(sizes))


def _reduced(microbatches: int, grain: int, least: int) -> int:
    """The smallest number of at least `least` that lies a multiple of `grain` below `microbatches`."""
    return microbatches - max(0, microbatches - least) // grain * grain


@lru_cache(maxsize=4096)
def _pattern(name: str, pp: int, vpp: int, awaited: Awaited, sizes: tuple[int, ...]) -> Pattern:
    built = (build(name, pp, size, vpp) for size in sizes)
    return Pattern(name, tuple(awaiting(schedule, awaited) for schedule in built))


def _ends(steps: Sequence[Step]) -> Ends:
    keys = [key_of(step) for step in steps]
    last = max(n for n, key in enumerate(keys) if key[0] not in ("F", "W"))
    return Ends(keys[0][1], keys[last][2], tuple(key[2] for key in keys[last + 1 :]))
