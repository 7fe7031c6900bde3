"""Sweeps: predict one scenario at many points, in parallel, with an optional store."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from math import fsum
from pathlib import Path
from sys import intern
from typing import Any

from msgspec import Struct
from msgspec.structs import replace
from pydantic import Field

from moesim.hwmodels.errors import InputError, UnknownKeyError
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.summary_text import count, gib, percent, short, table_lines
from moesim.simulator.common.processes import default_workers
from moesim.simulator.common.tables import Row, TableResult
from moesim.simulator.scenario import AnyScenario, Scenario, load_scenario
from moesim.simulator.scenario.inputs import Inputs, inputs_of
from moesim.simulator.studies.pool import outcomes_here, outcomes_locally, outcomes_on_dask, start_pool
from moesim.simulator.studies.space import (
    Measure,
    Points,
    Space,
    evaluate,
    key_of,
    points,
    work_groups,
    work_order,
)
from moesim.simulator.studies.store import Key, PointOutcome, Status, Store
from moesim.version import __version__

MOST_WORKERS = 1024
MOST_PRINTED = 40
"""Most points, and most reasons, that a printed sweep shows."""


class Progress(Struct, frozen=True):
    """Progress of a sweep; `rate_per_s` counts only computed points, `eta_s` is None before the first one."""

    done: int
    total: int
    reused: int
    failed: int
    rate_per_s: float
    eta_s: float | None

    def __str__(self) -> str:
        """One line of text."""
        left = "" if self.eta_s is None else f", {self.rate_per_s:.2f}/s, {self.eta_s:.0f} s left"
        told = f", {self.reused} from the store" if self.reused else ""
        return f"{self.done} of {self.total} points{told}{left}"


class SweepPoint(Frozen):
    """One point, with the values of its keys, its status and its figures."""

    values: dict[str, Any]
    status: Status
    reason: str = ""
    figures: dict[str, float | bool | None] = Field(default_factory=dict)
    key: str
    """Its key in the store."""


class Sweep(TableResult):
    """A finished sweep, in the order of its design; any number of workers gives the same bytes."""

    scenario: str
    inputs: Inputs
    """What was swept; the values of a point are overrides on it."""
    design: str
    seed: int
    version: str
    points: tuple[SweepPoint, ...]
    computed: int = Field(0, exclude=True)
    reused: int = Field(0, exclude=True)
    work_s: float = Field(0.0, exclude=True)
    """Seconds of computing, summed over the workers."""

    def __str__(self) -> str:
        """The number of points by status, the fastest point, the first points and reasons of refusals."""
        by_status = Counter(point.status for point in self.points)
        counted = ", ".join(f"{number:,} {status}" for status, number in by_status.items())
        lines = [f"sweep of {self.scenario}: {count(len(self.points), 'point')} ({counted})"]
        lines += self.inputs.lines()
        timed = [point for point in self.points if point.status == "ok"]
        if timed:
            best = min(timed, key=lambda point: float(point.figures["step_time_s"] or 0.0))
            values = ", ".join(f"{key}={value}" for key, value in best.values.items())
            lines.append(f"  fastest: {values}: {best.figures['step_time_s']:.3f} s")
        keys = list(dict.fromkeys(key for point in self.points for key in point.values))
        rows = [[*keys, "status", "step (s)", "MFU", "memory (GiB)", "days", "cost"]]
        rows += [
            [*(str(point.values.get(key, "")) for key in keys), *_printed_figures(point)]
            for point in self.points
        ]
        if any(key.endswith("power_limit") for key in keys):
            more = [["W a board", "J/token"], *(_printed_energy(point) for point in self.points)]
            rows = [row + own for row, own in zip(rows, more, strict=True)]
        lines += table_lines(rows, MOST_PRINTED)
        reasons = self.reasons()
        if reasons:
            lines.append("  why not:")
            lines += [f"    {number:,} {status}: {why}" for (status, why), number in reasons[:MOST_PRINTED]]
            left = sum(number for _, number in reasons[MOST_PRINTED:])
            lines += [f"    ... and {left:,} more"] if left else []
        return "\n".join([*lines, "  more: .rows(), .best(), .to_pandas()"])

    def rows(self) -> list[Row]:
        """One row for each point, with its values, status, figures and reason."""
        return [{**p.values, "status": p.status, **p.figures, "reason": p.reason} for p in self.points]

    def reasons(self) -> list[tuple[tuple[str, str], int]]:
        """Status and reason of the points without a prediction that fits, with their number, most first."""
        return Counter((str(p.status), p.reason) for p in self.points if p.status != "ok").most_common()

    def best(self, figure: str = "step_time_s", largest: bool = False) -> SweepPoint:
        """The point that fits and has the smallest (or largest) figure. Raises InputError if none has it."""
        found = [p for p in self.points if p.status == "ok" and p.figures.get(figure) is not None]
        if not found:
            raise InputError(f"no point of the sweep is possible and has a figure {figure!r}")
        sign = -1.0 if largest else 1.0
        return min(found, key=lambda p: sign * float(p.figures[figure] or 0.0))


def sweep(
    scenario: AnyScenario,
    space: Space,
    *overrides: str,
    design: str = "grid",
    count: int | None = None,
    seed: int = 0,
    workers: int | None = None,
    scheduler: str | None = None,
    store: str | Path | None = None,
    uncertainty: bool = False,
    measure: Measure | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Sweep:
    """Predict `scenario`, with overrides as for `load_scenario`, at every point of a space.

    `space`: values by dotted key ("8..256:x2", [1, 2]) or, for design "list", one mapping for each point.
    `design`, `count`, `seed`: see `space.points`. `workers`: number of local processes (default: cores; 1
    computes in this process). `scheduler`: address of a Dask cluster to use instead. `store`: SQLite file
    that keeps points as soon as the group that a worker computes is known (`work_order.LARGEST` points at
    most); a sweep that is started again computes only the missing points. `uncertainty`: add P10, P50 and
    P90. `measure`: what else than a training step is predicted at each point. A point that is refused or does
    not fit is kept with its reason. A script must call this below `if __name__ == "__main__":`. Raises
    InputError for a malformed space or store, and for a key that no scenario has before anything is computed.
    """
    if workers is not None and not 1 <= workers <= MOST_WORKERS:
        raise InputError(f"workers={workers} is not between 1 and {MOST_WORKERS}")
    scenario = load_scenario(scenario, overrides)
    design_points = points(space, design, count, seed)
    # A point may name a key that no scenario has; each set of keys is tried once.
    for values in {tuple(sorted(values)): values for values in reversed(design_points)}.values():
        try:
            scenario.replace(**values)
        except UnknownKeyError as error:
            raise UnknownKeyError(f"the sweep cannot vary it: {error}") from None
        except InputError:  # an illegal value; the point will say so
            continue
    run = _Run(scenario, design_points, uncertainty, measure, progress)
    if store is None:
        run.compute(None, workers, scheduler)
    else:
        with Store(Path(store)) as opened:
            run.compute(opened, workers, scheduler)
    return Sweep(
        scenario=scenario.name,
        inputs=inputs_of(scenario),
        design=design,
        seed=seed,
        version=__version__,
        points=tuple(run.points[number] for number in range(len(design_points))),
        computed=run.computed,
        reused=run.reused,
        work_s=fsum(run.work_s),
    )


class _Run:
    """A running sweep. Of a point it keeps what its result holds; few scenarios exist at a time."""

    def __init__(
        self,
        scenario: Scenario,
        design: Points,
        uncertainty: bool,
        measure: Measure | None,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self.scenario, self.design, self.uncertainty = scenario, design, uncertainty
        self.measure = measure or partial(evaluate, uncertainty=uncertainty)
        self.measured = "" if measure is None else f"{measure.__module__}.{measure.__qualname__}"
        self.progress = progress
        self.keys: dict[int, Key] = {}
        self.points: dict[int, SweepPoint] = {}
        self.work_s: list[float] = []
        self.computed = self.reused = self.failed = 0
        self.started = time.monotonic()

    def compute(self, store: Store | None, workers: int | None, scheduler: str | None) -> None:
        """Fill `points` from the store, and compute those that it lacks."""
        workers = min(workers or default_workers(), max(1, len(self.design)))
        missing: list[int] = []
        pool = None
        for number in self._missing(store):
            missing.append(number)
            if len(missing) == 2 and workers > 1 and scheduler is None:
                pool = start_pool(workers)  # the workers start while the other keys are computed

        def wanted(number: int) -> bool:
            known = None if store is None else store.get(self.keys[number])
            if known is not None:  # another sweep on the same store has computed it meanwhile
                self._reuse(number, known)
            return known is None

        self._tell()
        if not missing:
            return
        groups = (
            [(number, self.scenario.replace(**self.design[number])) for number in group]
            for group in work_groups(self.design, missing, workers)
        )
        if scheduler is not None:
            stream = outcomes_on_dask(groups, wanted, self.measure, scheduler)
        elif pool is None:
            stream = outcomes_here(groups, wanted, self.measure)
        else:
            stream = outcomes_locally(groups, wanted, self.measure, workers, pool)
        for number, outcome in stream:
            self._compute(store, number, outcome)
            self._tell()

    def _missing(self, store: Store | None) -> Iterator[int]:
        """Points to compute in the order of work; illegal and stored ones get their outcome at once."""
        for number in work_order(self.design):
            values = self.design[number]
            try:
                key = key_of(self.scenario.replace(**values), self.uncertainty, measure=self.measured)
            except InputError as error:
                # The key of a point whose scenario is illegal.
                text = json.dumps([self.scenario.resolved(), values], sort_keys=True, default=str)
                self.keys[number] = Key(hashlib.sha256(text.encode()).hexdigest(), "none", __version__)
                self._compute(store, number, PointOutcome("illegal", str(error), {}, ""))
                continue
            self.keys[number] = replace(key, calibration=intern(key.calibration))
            known = None if store is None else store.get(key)
            if known is None:
                yield number
            else:
                self._reuse(number, known)

    def _reuse(self, number: int, outcome: PointOutcome) -> None:
        self._keep(number, outcome)
        self.reused += 1

    def _compute(self, store: Store | None, number: int, outcome: PointOutcome) -> None:
        # A failure is not stored, so that the next sweep on the store tries the point again.
        if store is not None and outcome.status != "failed":
            store.put(self.keys[number], self.scenario.name, outcome)
        self._keep(number, outcome)
        self.computed += 1

    def _keep(self, number: int, outcome: PointOutcome) -> None:
        self.points[number] = _point(self.design[number], self.keys.pop(number), outcome)
        self.failed += outcome.status == "failed"
        self.work_s.append(outcome.work_s)

    def _tell(self) -> None:
        if self.progress is None:
            return
        spent = max(time.monotonic() - self.started, 1e-9)
        rate, left = self.computed / spent, len(self.design) - len(self.points)
        eta = left / rate if self.computed else None
        self.progress(Progress(len(self.points), len(self.design), self.reused, self.failed, rate, eta))


def _point(values: dict[str, Any], key: Key, of: PointOutcome) -> SweepPoint:
    figures = {intern(name): value for name, value in of.figures.items()}
    return SweepPoint(
        values=values, status=of.status, reason=intern(of.reason), figures=figures, key=key.text
    )


def _printed_energy(point: SweepPoint) -> list[str]:
    watts, joules = (point.figures.get(key) for key in ("board_w", "joules_per_token"))
    return ["" if watts is None else f"{watts:,.0f}", "" if joules is None else f"{joules:.3f}"]


def _printed_figures(point: SweepPoint) -> list[str]:
    figure = point.figures
    if figure.get("step_time_s") is None:
        return [point.status, "", "", "", "", ""]
    cost = figure.get("cost_usd")
    return [
        point.status,
        f"{figure['step_time_s']:.3f}",
        percent(figure["mfu_causal"] or 0.0),
        gib(figure["memory_bytes"] or 0.0),
        f"{figure['days'] or 0.0:.1f}",
        "no price" if cost is None else f"${short(cost)}",
    ]


# -- survey ------------------------------------------------------------------------------------------
# Surveys a sweep before it starts: which points its store knows, which are illegal, which are missing.


class Survey(Struct, frozen=True):
    """The points of a sweep, in the order of its design: those with an outcome, and those without."""

    points: tuple[SweepPoint, ...]
    """Points that the store knows, and illegal ones."""
    missing: tuple[dict[str, Any], ...]
    """Values of the points that are still to be computed."""

    @property
    def total(self) -> int:
        """Number of points of the design."""
        return len(self.points) + len(self.missing)


def survey(
    scenario: Scenario,
    space: Space,
    store: Path | None = None,
    *,
    admit: Callable[[Scenario], object] = lambda scenario: None,
) -> Survey:
    """Look every point of a grid up, without computing any.

    `admit` is called with the scenario of each missing point and may refuse it by InputError, which ends the
    survey. Raises InputError for a malformed space or store.
    """
    known: list[SweepPoint] = []
    missing: list[dict[str, Any]] = []
    opened = Store(store, durable=False) if store is not None and store.is_file() else None
    try:
        for values in points(space):
            try:
                changed = scenario.replace(**values)
                key = key_of(changed)
            except InputError as error:
                known.append(SweepPoint(values=values, status="illegal", reason=str(error), key=""))
                continue
            outcome = None if opened is None else opened.get(key)
            if outcome is None:
                admit(changed)
                missing.append(values)
                continue
            known.append(_point(values, key, outcome))
    finally:
        if opened is not None:
            opened.close()
    return Survey(tuple(known), tuple(missing))
