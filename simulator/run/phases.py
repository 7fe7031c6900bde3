"""Divides a run plan into whole steps with batch ramps; interpolates step times between batches (pure)."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from moesim.hwmodels.errors import InputError
from moesim.simulator.scenario.run_plan import Ramp


@dataclass(frozen=True, slots=True)
class Level:
    """Steps at one batch size."""

    sequences: int
    steps: int


def steps_for(tokens: float, sequences: int, sequence_length: int) -> int:
    """Number of whole steps that cover a number of tokens (eq. F6)."""
    return math.ceil(tokens / (sequences * sequence_length))


def levels(
    tokens: float, sequences: int, sequence_length: int, ramp: Ramp | None, increment: int
) -> list[Level]:
    """Batch sizes in order, each with its steps (eq. J1).

    The ramp's increments share its tokens evenly; a step belongs to the increment in which it starts.
    `increment` (sequences) applies where the ramp states none. Raises InputError for a ramp that decreases,
    and for an increment that does not divide it.
    """
    if ramp is None:
        return [Level(sequences, steps_for(tokens, sequences, sequence_length))]
    by = ramp.increment or increment
    if ramp.sequences >= sequences:
        raise InputError(
            f"run.ramp.sequences={ramp.sequences} must be below the full batch of {sequences}; leave the "
            "ramp out for a constant batch"
        )
    if (sequences - ramp.sequences) % by:
        raise InputError(
            f"run.ramp: from {ramp.sequences} to {sequences} sequences is not a whole number of increments "
            f"of {by}; state run.ramp.increment, for example {math.gcd(sequences - ramp.sequences, by)}"
        )
    count = (sequences - ramp.sequences) // by
    sizes, done = [], 0
    for number in range(count):
        batch = ramp.sequences + number * by
        boundary = ramp.tokens * (number + 1) / count
        steps = max(0, math.ceil((boundary - done) / (batch * sequence_length)))
        sizes.append(Level(batch, steps))
        done += steps * batch * sequence_length
    rest = max(0, math.ceil((tokens - done) / (sequences * sequence_length)))
    return [*sizes, Level(sequences, rest)]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Step time (s) over batch size (sequences), linear between a few simulated batches (eq. J1).

    A step takes the fill and end of the pipeline plus a time for each micro-batch, so it is nearly linear.
    `error` is the largest relative error at an inner point that the interpolation leaves out.
    """

    sequences: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, sequences: int) -> float:
        """Step time at a batch size; below the smallest simulated batch the first line is extended."""
        if len(self.sequences) == 1:
            return self.seconds[0]
        right = min(max(bisect_right(self.sequences, sequences), 1), len(self.sequences) - 1)
        return _line(
            sequences,
            (self.sequences[right - 1], self.seconds[right - 1]),
            (self.sequences[right], self.seconds[right]),
        )

    @property
    def error(self) -> float:
        """Largest relative error at an inner point of the line between its neighbours; 0 without one."""
        points = list(zip(self.sequences, self.seconds, strict=True))
        misses = [
            abs(_line(points[i][0], points[i - 1], points[i + 1]) / points[i][1] - 1.0)
            for i in range(1, len(points) - 1)
        ]
        return max(misses, default=0.0)


def _line(x: int, first: tuple[int, float], second: tuple[int, float]) -> float:
    slope = (second[1] - first[1]) / (second[0] - first[0])
    return first[1] + slope * (x - first[0])


def work_seconds(found: Sequence[Level], times: StepTimes) -> float:
    """Seconds of all steps of a phase."""
    return math.fsum(level.steps * times.at(level.sequences) for level in found)
