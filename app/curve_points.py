"""The points of the page Curves: which are known, and which are computed next, the nearest ones first.

Their intervals come after all of the points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from moesim.app import jobs, predictions
from moesim.hwmodels.errors import MoesimError
from moesim.simulator.predict.work_size import Band
from moesim.simulator.scenario import Scenario
from moesim.simulator.studies.curves import AxisName, CurveAxis, CurvePoint

PER_JOB = 3
"""Points of one job: enough to share what they have in common, few enough to appear one after the other."""
AT_ONCE = 2
"""Jobs asked for at a time; one of them runs and one waits, so that other pages find their lane free."""


class CurvePart(Struct, frozen=True):
    """Some values of one axis, which one job computes."""

    axis: CurveAxis
    places: tuple[int, ...]
    key: str
    intervals: bool = False
    """Whether the job computes the intervals at the values, not the figures."""

    @property
    def values(self) -> tuple[float, ...]:
        """The values at the places."""
        return tuple(self.axis.values[place] for place in self.places)


class CurveRun(Struct):
    """The curves of one scenario, as far as they are known."""

    key: str
    scenario: Scenario
    parts: tuple[CurvePart, ...]
    points: dict[tuple[AxisName, int], CurvePoint] = field(default_factory=dict)
    bands: dict[tuple[AxisName, int], Mapping[str, Band]] = field(default_factory=dict)
    """Intervals by figure; none at a value that cannot be predicted."""
    running: dict[str, jobs.Job] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Number of points of all curves."""
        return sum(len(part.places) for part in self.parts if not part.intervals)

    @property
    def done(self) -> bool:
        """Whether every point is known."""
        return len(self.points) == self.total

    @property
    def whole(self) -> bool:
        """Whether every interval is known too."""
        return self.done and len(self.bands) == self.total

    def step(self) -> None:
        """Take over what is known, and ask for the next points; returns at once."""
        for part in self._missing():
            known = jobs.cache.get(part.key)
            if known is not None:
                self._take(part, known)
                continue
            job = self.running.get(part.key)
            if job is not None and job.done:
                try:
                    self._take(part, job.result())
                except MoesimError as error:  # these points carry its reason, and have no interval
                    failed = [CurvePoint(value, "failed", str(error)) for value in part.values]
                    self._take(part, [{}] * len(failed) if part.intervals else failed)
        for part in self._missing():
            if len(self.running) >= AT_ONCE:
                break
            if part.key not in self.running:
                work = predictions.curve_bands if part.intervals else predictions.points
                self.running[part.key] = jobs.submit(
                    part.key, work, self.scenario, part.axis.name, part.values, lane="beside"
                )

    def stop(self) -> None:
        """Give up what still runs."""
        for job in self.running.values():
            if not job.done:
                job.cancel()
        self.running.clear()

    def of(self, axis: CurveAxis) -> dict[int, CurvePoint]:
        """The known points of one axis by place, in order."""
        return {
            place: self.points[axis.name, place]
            for place in range(len(axis.values))
            if (axis.name, place) in self.points
        }

    def _missing(self) -> list[CurvePart]:
        return [part for part in self.parts if (part.axis.name, part.places[0]) not in self._known(part)]

    def _known(self, part: CurvePart) -> dict[tuple[AxisName, int], Any]:
        return self.bands if part.intervals else self.points

    def _take(self, part: CurvePart, values: Sequence[Any]) -> None:
        self.running.pop(part.key, None)
        for place, value in zip(part.places, values, strict=True):
            self._known(part)[part.axis.name, place] = value


def curve_run(key: str, scenario: Scenario, axes: Sequence[CurveAxis]) -> CurveRun:
    """The curves of a scenario, of which nothing is known yet; `key` names the scenario."""
    by_axis = []
    for axis in axes:
        places = axis.nearest_first()
        parts = [places[first : first + PER_JOB] for first in range(0, len(places), PER_JOB)]
        names = [",".join(f"{axis.values[n]:g}" for n in some) for some in parts]
        by_axis.append(
            [
                CurvePart(axis, some, f"curve/{key}/{axis.name}/{name}")
                for some, name in zip(parts, names, strict=True)
            ]
        )
    order = [part for round_ in zip_longest(*by_axis) for part in round_ if part is not None]
    intervals = [replace(part, key=f"{part.key}/intervals", intervals=True) for part in order]
    return CurveRun(key, scenario, (*order, *intervals))
