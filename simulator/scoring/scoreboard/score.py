"""Predicts and scores every published row, with errors by group, by kind of model and for Hopper."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import fsum
from statistics import median
from typing import Any

from pydantic import Field

from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.hwmodels.frozen import Frozen
from moesim.simulator.common.processes import worker_pool
from moesim.simulator.engine.records import Execution
from moesim.simulator.memory.gpu import BUFFERS_SLACK
from moesim.simulator.model.recompute import recompute_label
from moesim.simulator.predict.driver import Prediction, finish
from moesim.simulator.predict.result import Result
from moesim.simulator.predict.step import Prepared, prepare
from moesim.simulator.scoring.scoreboard.configurations import as_configured, differs_from
from moesim.simulator.scoring.scoreboard.plan import left_out, plan_of, policies_of, scenario_of
from moesim.simulator.scoring.scoreboard.rows import OpenRow, memory_peaks, open_rows
from moesim.simulator.studies.uncertainty import interval_of, step_draws_s

Draw = Callable[[Prepared, Sequence[Execution], Result], FloatArray]
"""Draws the step (s) of a finished prediction, for the interval that should hold 80 % of measurements."""

DRAWS = 512
"""Draws of a row that are kept to tell plans apart; their P10 lies between the true 7 and 13 % points."""


class ScoredRow(Frozen):
    """A row and its prediction; `relative_error` = predicted / published step - 1.

    `refused` is the reason why a row was not predicted; its predictions are then None. `left_out` lists what
    the source states and the prediction does not express.
    """

    id: str
    group: str
    arch: str
    family: str
    """Family of the accelerator: Hopper, Ampere, Blackwell, TPU, Instinct."""
    source: str
    complete: bool = True
    """Whether the source states everything that the run depends on."""
    published_step_s: float | None
    predicted_step_s: float | None = None
    relative_error: float | None = None
    lower_bound_s: float | None = None
    upper_bound_s: float | None = None
    interval_s: tuple[float, float] | None = None
    """80 % interval of the step; None unless it is requested."""
    draws: tuple[float, ...] = Field((), exclude=True, repr=False)
    """Draws of the step over the predicted one, which rows share where they share a source; of no dump."""
    recompute: str = ""
    fits: bool | None = None
    """Whether the predicted peak fits into memory; False is a miss, as every row ran."""
    needed_bytes: float | None = None
    """Predicted peak with the framework's own bytes, which `fits` compares with the capacity."""
    capacity_bytes: float | None = None
    memory_bytes: float | None = None
    """Predicted peak; without the framework's own bytes if the allocator's count was published."""
    published_memory_bytes: float | None = None
    memory_error: float | None = None
    host_share: float | None = None
    """Share of the predicted step in which the GPUs wait for launches."""
    host_bound: bool = False
    left_out: tuple[str, ...] = ()
    refused: str = ""


class GroupScore(Frozen):
    """Errors of a set of rows, as fractions, and shares of the rows inside the interval and the bounds."""

    name: str
    rows: int
    median_error: float
    median_absolute_error: float
    """Median over the rows."""
    groups: int = 1
    """Groups of sources (model family and hardware generation) among the rows."""
    group_mean: float = 0.0
    """Mean over the groups of the median absolute error of their rows in this set."""
    group_median: float = 0.0
    """Median over the groups, likewise."""
    refused: int = 0
    """Rows of the set that were not predicted."""
    too_large: int = 0
    """Rows that ran and are predicted not to fit."""
    worst_absolute_error: float
    covered: float | None
    """Share of the rows whose published value lies in the 80 % interval; None without intervals."""
    below: float | None = None
    """Share of the rows whose published value lies below the interval (predicted too slow)."""
    above: float | None = None
    """Share of the rows whose published value lies above the interval (predicted too fast)."""
    interval_width: float | None = None
    """Median width of the intervals, relative to the predicted steps."""
    inside_bounds: float
    """Share of the rows whose published value lies between lower and upper bound."""
    host_bound_rows: int = 0
    """Rows whose step is predicted to be bound by launches."""
    memory_rows: int = 0
    memory_absolute_error: float | None = None
    """Median over the rows whose peak memory was published."""


class RefusalCount(Frozen):
    """Rows that were refused for one reason, by accelerator family and kind of model."""

    reason: str
    family: str
    arch: str
    rows: int


class Board(Frozen):
    """The open scoreboard: rows, scores of groups and sets of rows, refusals, and means over the groups."""

    rows: tuple[ScoredRow, ...]
    groups: tuple[GroupScore, ...]
    totals: tuple[GroupScore, ...]
    refusals: tuple[RefusalCount, ...] = ()
    group_mean: float | None
    """Mean over the groups of their median absolute errors; None without rows."""
    group_covered: float | None = None
    """Mean over the groups of their shares inside the interval; None without intervals."""


def predict(row: OpenRow) -> Prediction:
    """Predict a row with the first recompute policy that fits (the last if none does)."""
    return finish(prepared_row(row))


def prepared_row(row: OpenRow) -> Prepared:
    """The scenario of a row with that policy, ready to run. Raises InputError for a row that has none.

    A table's plan that no policy makes fit was not run: then the plan of its release's configuration, if that
    one fits.
    """
    prepared, other = _that_fits(row), as_configured(row)
    if prepared.memory.fits or other is None:
        return prepared
    configured = _that_fits(other)
    return configured if configured.memory.fits else prepared


def _that_fits(row: OpenRow) -> Prepared:
    policies = policies_of(row)
    for policy in policies:
        prepared = prepare(scenario_of(row, policy))
        if policy == policies[-1] or prepared.memory.fits:
            break
    return prepared


def score_row(row: OpenRow, draw: Draw | None = step_draws_s) -> ScoredRow:
    """Predict and score a row; a row that the model cannot express gets the reason instead.

    `draw`: draws the step of a finished prediction for its 80 % interval; None for no interval.
    """
    common: dict[str, Any] = {
        "id": row.id,
        "group": row.group,
        "arch": row.arch,
        "family": row.family,
        "source": row.source,
        "complete": row.complete == "yes",
        "published_step_s": row.published_step_s,
        "published_memory_bytes": row.published_memory_bytes,
    }
    try:
        prepared, executions, result = predict(row)
        step_s, notes = row.published_step_s, left_out(row)
        if prepared.scenario.parallel != plan_of(row):
            notes = tuple(note for note in notes if note not in differs_from(row))
            notes += differs_from(row, "the configuration's, as the table's does not fit")
    except (InputError, InfeasibleError) as error:
        return ScoredRow(**common, refused=str(error))
    assert step_s is not None  # a row without one is refused
    drawn = None if draw is None else draw(prepared, executions, result)
    kept = () if drawn is None else tuple((drawn[:DRAWS] / result.step.time_s).tolist())
    kinds = result.memory.by_kind_bytes
    memory = fsum(kinds.values()) - kinds["framework"]
    if row.id not in memory_peaks():
        # nvidia-smi's figures (BLOOM's chronicle, line 86): with the context, and all that was reserved
        memory += BUFFERS_SLACK.value * (memory - kinds["communication_buffers"]) + kinds["framework"]
    known = row.published_memory_bytes
    return ScoredRow(
        **common,
        predicted_step_s=result.step.time_s,
        relative_error=result.step.time_s / step_s - 1.0,
        lower_bound_s=result.step.lower_bound_s,
        upper_bound_s=result.step.upper_bound_s,
        interval_s=None if drawn is None else interval_of(drawn),
        draws=kept,
        recompute=recompute_label(prepared.scenario.recompute),
        fits=result.memory.fits,
        needed_bytes=result.memory.total_bytes,
        capacity_bytes=result.memory.capacity_bytes,
        memory_bytes=memory,
        memory_error=memory / known - 1.0 if known else None,
        host_share=result.host.share if result.host else None,
        host_bound=result.host is not None and result.host.bound,
        left_out=notes,
    )


def score_all(
    rows: Sequence[OpenRow] | None = None, *, workers: int = 1, draw: Draw | None = step_draws_s
) -> Board:
    """Score every row (by default all shipped rows); the order does not depend on `workers`."""
    chosen = open_rows() if rows is None else rows
    if workers > 1:
        with worker_pool(workers) as pool:
            scored = tuple(pool.map(score_row, chosen, [draw] * len(chosen), chunksize=4))
    else:
        scored = tuple(score_row(row, draw) for row in chosen)
    return board_of(scored)


def board_of(rows: Sequence[ScoredRow]) -> Board:
    """The scores of all groups and sets of rows that were predicted already."""
    groups = tuple(by_group(rows))
    mean = fsum(g.median_absolute_error for g in groups) / len(groups) if groups else None
    covered = [g.covered for g in groups if g.covered is not None]
    return Board(
        rows=tuple(rows),
        groups=groups,
        totals=tuple(totals(rows)),
        refusals=refusals(rows),
        group_mean=mean,
        group_covered=fsum(covered) / len(covered) if covered else None,
    )


def refusals(rows: Sequence[ScoredRow]) -> tuple[RefusalCount, ...]:
    """Refused rows, counted by reason, accelerator family and kind of model, most frequent first."""
    counts = Counter((reason_of(row), row.family, row.arch) for row in rows if row.refused)
    return tuple(RefusalCount(reason=r, family=f, arch=a, rows=n) for (r, f, a), n in counts.most_common())


def reason_of(row: ScoredRow) -> str:
    """The reason why a row was refused, without the row's id."""
    return row.refused.removeprefix(f"{row.id}: ")


def by_group(rows: Sequence[ScoredRow]) -> list[GroupScore]:
    """One score for each group, in the order of the rows; groups without a predicted row are left out."""
    names = dict.fromkeys(row.group for row in rows)
    return [s for s in (summary(n, [r for r in rows if r.group == n]) for n in names) if s is not None]


SETS: Mapping[str, Callable[[ScoredRow], bool]] = {
    "all rows": lambda r: True,
    "Hopper": lambda r: r.family == "Hopper",
    "Hopper, dense": lambda r: r.family == "Hopper" and r.arch == "dense",
    "Hopper, MoE": lambda r: r.family == "Hopper" and r.arch == "moe",
    "Blackwell": lambda r: r.family == "Blackwell",
    "A100": lambda r: r.family == "Ampere",
    "dense": lambda r: r.arch == "dense",
    "MoE": lambda r: r.arch == "moe",
}
"""Sets of rows that are scored together, each also without the rows whose sources leave something open."""


def totals(rows: Sequence[ScoredRow]) -> list[GroupScore]:
    """Scores of the sets of rows, then those of their complete rows."""
    scores = []
    for suffix, chosen in (("", rows), (", complete", [r for r in rows if r.complete])):
        scores += [summary(name + suffix, [r for r in chosen if is_in(r)]) for name, is_in in SETS.items()]
    return [score for score in scores if score is not None]


def summary(name: str, rows: Iterable[ScoredRow]) -> GroupScore | None:
    """Score of some rows; None if none was predicted."""
    rows = tuple(rows)
    known = [r for r in rows if r.relative_error is not None]
    if not known:
        return None
    errors = [r.relative_error or 0.0 for r in known]
    bands = [(r, r.interval_s) for r in known if r.interval_s is not None]
    below = [(r.published_step_s or 0.0) < low for r, (low, _) in bands]
    above = [(r.published_step_s or 0.0) > high for r, (_, high) in bands]
    widths = [(high - low) / (r.predicted_step_s or 1.0) for r, (low, high) in bands]
    memory = [abs(r.memory_error) for r in known if r.memory_error is not None]
    bounded = [
        (r.lower_bound_s or 0.0) <= (r.published_step_s or 0.0) <= (r.upper_bound_s or 0.0) for r in known
    ]
    names = dict.fromkeys(r.group for r in known)
    medians = [median(abs(r.relative_error or 0.0) for r in known if r.group == n) for n in names]
    return GroupScore(
        name=name,
        rows=len(known),
        median_error=median(errors),
        median_absolute_error=median(map(abs, errors)),
        groups=len(names),
        group_mean=fsum(medians) / len(medians),
        group_median=median(medians),
        refused=sum(bool(r.refused) for r in rows),
        too_large=sum(r.fits is False for r in known),
        worst_absolute_error=max(map(abs, errors)),
        covered=1.0 - (sum(below) + sum(above)) / len(bands) if bands else None,
        below=sum(below) / len(bands) if bands else None,
        above=sum(above) / len(bands) if bands else None,
        interval_width=median(widths) if bands else None,
        inside_bounds=sum(bounded) / len(bounded),
        host_bound_rows=sum(r.host_bound for r in known),
        memory_rows=len(memory),
        memory_absolute_error=median(memory) if memory else None,
    )
