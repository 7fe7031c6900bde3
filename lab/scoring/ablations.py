"""What the scoreboard says without one mechanism: rows that use it are predicted again without it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from statistics import median
from typing import Any

from pydantic import Field

from lab.scoring.frozen_predictions import published_text
from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.validation import validate_model
from moesim.hwmodels.yaml_io import parse_mapping
from moesim.simulator.common.processes import worker_pool
from moesim.simulator.predict.driver import simulate
from moesim.simulator.scenario import Scenario
from moesim.simulator.scoring.scoreboard.rows import OpenRow
from moesim.simulator.scoring.scoreboard.score import SETS, ScoredRow, prepared_row

ROWS_OF_A_GROUP = 5
"""Rows of each group that are predicted without every mechanism."""


class Ablation(Frozen):
    """One mechanism, and the scenario keys and values that take it away."""

    name: str
    without: dict[str, str | bool | int | float | list[str] | None]
    """Scenario key and the value that stands for the mechanism being absent."""
    only: dict[str, str] = Field(default_factory=dict)
    """Scenario keys and the values that they must have for the mechanism to be in use; all others have it."""


class _Ablations(Frozen):
    ablations: tuple[Ablation, ...]


@lru_cache(maxsize=1)
def ablations() -> tuple[Ablation, ...]:
    """Every mechanism of lab/scoring/data/ablations.yaml, in its order."""
    name = "ablations.yaml"
    text = published_text(name)
    return validate_model(_Ablations, parse_mapping(text, name), name).ablations


class AblationScore(Frozen):
    """Median absolute errors of a set of rows with a mechanism and without it."""

    name: str
    rows: int
    """Rows of the set in which the mechanism is in use."""
    with_it: float
    without: float


def switched_off(scenario: Scenario, ablation: Ablation) -> Scenario | None:
    """The scenario without the mechanism; None where it is not in use, or cannot be taken away."""
    resolved = scenario.resolved()
    if any(_value(resolved, key) != value for key, value in ablation.only.items()):
        return None
    changes = {key: value for key, value in ablation.without.items() if _value(resolved, key) != value}
    try:
        return scenario.replace(**changes) if changes else None
    except InputError:
        return None


def _value(data: Mapping[str, Any], key: str) -> object:
    """The value of a dotted key; None where a section is missing."""
    value: Any = data
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def steps_without(row: OpenRow) -> dict[str, float]:
    """Predicted step (s) of a row without each mechanism that it uses and can go without, by name."""
    base = prepared_row(row)
    steps: dict[str, float] = {}
    for ablation in ablations():
        scenario = switched_off(base.scenario, ablation)
        if scenario is None:
            continue
        try:
            steps[ablation.name] = simulate(scenario).step.time_s
        except (InputError, InfeasibleError):
            continue
    return steps


def sampled(rows: Sequence[ScoredRow], most: int = ROWS_OF_A_GROUP) -> list[ScoredRow]:
    """At most `most` complete rows of each group, evenly spaced in the order of the source."""
    groups: dict[str, list[ScoredRow]] = {}
    for row in rows:
        if row.complete and row.relative_error is not None:
            groups.setdefault(row.group, []).append(row)
    chosen = []
    for members in groups.values():
        step = max(1.0, len(members) / most)
        chosen += [members[int(n * step)] for n in range(min(most, len(members)))]
    return chosen


def score_ablations(
    rows: Sequence[OpenRow], scored: Sequence[ScoredRow], workers: int = 1
) -> dict[str, tuple[AblationScore, ...]]:
    """Errors of sampled rows with and without every mechanism, by set; rows without it keep their errors."""
    known = {row.id: row for row in sampled(scored)}
    chosen = [row for row in rows if row.id in known]
    with worker_pool(workers) as pool:
        steps = dict(zip((row.id for row in chosen), pool.map(steps_without, chosen), strict=True))
    scores: dict[str, tuple[AblationScore, ...]] = {}
    for ablation in ablations():
        errors = {
            id_: by_name[ablation.name] / (known[id_].published_step_s or 1.0) - 1.0
            for id_, by_name in steps.items()
            if by_name.get(ablation.name, known[id_].predicted_step_s) != known[id_].predicted_step_s
        }
        found = (_of_set(label, is_in, known.values(), errors) for label, is_in in SETS.items())
        scores[ablation.name] = tuple(score for score in found if score is not None)
    return scores


def _of_set(
    label: str, is_in: Callable[[ScoredRow], bool], rows: Iterable[ScoredRow], errors: Mapping[str, float]
) -> AblationScore | None:
    """Score of the rows of a set; None where the mechanism is in none of them."""
    chosen = [row for row in rows if is_in(row)]
    own = [abs(row.relative_error or 0.0) for row in chosen]
    other = [abs(errors.get(row.id, row.relative_error or 0.0)) for row in chosen]
    in_use = sum(row.id in errors for row in chosen)
    if not in_use:
        return None
    return AblationScore(name=label, rows=in_use, with_it=median(own), without=median(other))
