"""Predicted and traced time by class of the runs of which a profiler recorded a step.

`traced-runs.yaml` holds the runs, `traced-parts.csv` the nanoseconds of each part as `moesim trace` cuts the
traced step (`lab/writers/parts_board.py` writes it). Both steps are cut by one rule, so their parts add up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from statistics import median
from typing import Any

import numpy as np

from moesim.hwmodels.frozen import Frozen
from moesim.simulator.predict.step import ExecutedStep, run_step
from moesim.simulator.scenario import Scenario, load_scenario
from moesim.simulator.scoring import published_data, published_records
from moesim.simulator.scoring.scoreboard.runs import runs, scenario_of_run
from moesim.simulator.trace import summary
from moesim.simulator.trace.partition import Part, joined, side_of
from moesim.simulator.trace.predicted import START_NS, predicted_trace
from moesim.simulator.trace.read import StepTrace

RUNS, PARTS = "traced-runs.yaml", "traced-parts.csv"
LARGE, FAR = 0.05, 0.15
"""A part above this share of the step must be within this relative error."""


class TracedRun(Frozen):
    """A run of the file; `scenario` is a mapping under `common`, a run of `h200-runs.csv` or a preset."""

    name: str
    title: str
    hardware: str
    trace: str
    """Name of the profiler's file, which is not shipped."""
    source: str
    step_s: float
    """Median step without the profiler, or the traced span where only that is known."""
    settings: tuple[str, ...] = ()
    pair: bool = False
    """Whether the trace is one overlapped pair of chunks, not a whole step."""
    scenario: dict[str, Any] | str


class TracedRuns(Frozen):
    """The file; `clusters` by the names that scenarios give."""

    common: dict[str, Any]
    clusters: dict[str, dict[str, Any]]
    runs: tuple[TracedRun, ...]


class PartRow(Frozen):
    """Nanoseconds of one part of a step."""

    part: str
    kind: str
    traced_ns: int
    predicted_ns: int

    @property
    def difference_ns(self) -> int:
        """Predicted minus traced."""
        return self.predicted_ns - self.traced_ns

    @property
    def error(self) -> float:
        """Predicted / traced - 1; the part must be in the trace."""
        return self.predicted_ns / self.traced_ns - 1.0


class ScoredParts(Frozen):
    """A run's parts, largest first. Errors are predicted / measured - 1; `gap` is over the traced step."""

    name: str
    title: str
    hardware: str
    step_s: float
    traced_s: float
    predicted_s: float
    step_error: float
    gap: float
    """Predicted minus traced step."""
    parts_gap: float
    """Sum of absolute differences of the parts."""
    compute_gap: float
    """The same over computing parts: what a profiler's slower host does not change."""
    rows: tuple[PartRow, ...]

    @property
    def far(self) -> tuple[PartRow, ...]:
        """Parts above 5 % of the traced step that are off by more than 15 %."""
        large = (row for row in self.rows if row.traced_ns > LARGE * self.traced_s * 1e9)
        return tuple(row for row in large if abs(row.error) > FAR)


@lru_cache(maxsize=1)
def traced_runs() -> TracedRuns:
    """The runs. Raises InputError for a malformed file."""
    return published_data(TracedRuns, RUNS)


def scenario_of(run: TracedRun | str, *overrides: str) -> Scenario:
    """The scenario of a run or of its name, with `key=value` overrides as for `load_scenario`."""
    if isinstance(run, str):
        run = next(one for one in traced_runs().runs if one.name == run)
    if isinstance(run.scenario, dict):
        file = traced_runs()
        data = {"name": run.name, **file.common, **run.scenario}
        data["cluster"] = file.clusters.get(data["cluster"], data["cluster"])
        return load_scenario(data, [*run.settings, *overrides])
    own = next((own for own in runs() if own.name == run.scenario), None)
    return load_scenario(scenario_of_run(own) if own else run.scenario, [*run.settings, *overrides])


def parts_of(trace: StepTrace, *, priced: bool) -> dict[Part, int]:
    """Nanoseconds of the parts of the median step of a trace; waiting of collectives is in their classes."""
    return dict(joined(side_of(trace, None, None, [], priced=priced)).parts)


def traced() -> dict[str, dict[Part, int]]:
    """The stored parts of the traced steps, by run."""
    found: dict[str, dict[Part, int]] = {}
    for line in published_records(PARTS):
        found.setdefault(line["run"], {})[line["kind"], line["part"]] = int(line["traced_ns"])
    return found


def predicted_parts(run: TracedRun, *overrides: str) -> tuple[float, dict[Part, int]]:
    """Seconds of the predicted step, or pair, and nanoseconds of its parts on rank 0."""
    executed = run_step(scenario_of(run, *overrides))
    trace = predicted_trace(executed, [0])
    if run.pair:
        trace = _one_pair(executed, trace)
    parts = parts_of(trace, priced=False)
    return sum(parts.values()) * 1e-9, parts


def _one_pair(executed: ExecutedStep, trace: StepTrace) -> StepTrace:
    """The trace with the first overlapped action of its rank as its only step."""
    (rank,) = trace.ranks
    table, times = executed.executions[0].table, executed.executions[0].times
    first, last = table.first_action[:2].tolist()
    action = next(n for n in range(first, last) if min(table.steps[n].stages) >= 0)
    start, end = (START_NS + int(when[action, 0]) for when in (times.start, times.free))
    idle = summary.gaps(rank.raw, start, end)
    row = {"number": 0, "name": "pair", "start_ns": start, **summary.times(rank.events, start, end)}
    rank.steps[:] = [{**row, "idle_by_cause_ns": idle}]
    return trace


def score_parts(run: TracedRun, of_trace: Mapping[Part, int], *overrides: str) -> ScoredParts:
    """A run's predicted parts beside its traced ones."""
    seconds, own = predicted_parts(run, *overrides)
    keys = sorted({*of_trace, *own}, key=lambda key: -max(of_trace.get(key, 0), own.get(key, 0)))
    rows = tuple(
        PartRow(part=key[1], kind=key[0], traced_ns=of_trace.get(key, 0), predicted_ns=own.get(key, 0))
        for key in keys
    )
    whole = sum(of_trace.values())
    off = np.array([abs(row.difference_ns) for row in rows])
    computes = np.array([row.kind == "compute" for row in rows])
    return ScoredParts(
        name=run.name, title=run.title, hardware=run.hardware, step_s=run.step_s, traced_s=whole * 1e-9,
        predicted_s=seconds, step_error=seconds / run.step_s - 1.0, gap=seconds / (whole * 1e-9) - 1.0,
        parts_gap=float(off.sum()) / whole, compute_gap=float(off[computes].sum()) / whole, rows=rows,
    )  # fmt: skip


def score_all_parts() -> Iterator[ScoredParts]:
    """Every run with stored parts, in the order of the file."""
    stored = traced()
    for run in traced_runs().runs:
        if run.name in stored:
            yield score_parts(run, stored[run.name])


def median_gap(scored: list[ScoredParts]) -> float:
    """Median over runs of the sum of absolute differences of parts, over the traced step."""
    return median(one.parts_gap for one in scored)
