"""The functions of plain arguments that job processes run for the pages Run & cost and Evidence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import moesim
from moesim.app import budget
from moesim.app.exports import trace_bytes
from moesim.simulator.run.report import RunReport
from moesim.simulator.scenario import Scenario
from moesim.simulator.scoring.published import PROFILES, Row, score
from moesim.simulator.scoring.published_collectives import CollectiveRow, score_collectives
from moesim.simulator.scoring.scoreboard import ScoredRow, open_rows
from moesim.simulator.scoring.scoreboard.score import score_row

__all__ = ["Scoreboards", "evidence", "published_step", "run_report", "trace_bytes"]

STEPS = 4 * len(PROFILES) + 1
"""Number of progress messages of a scoreboard: four for each profile, and one for the collectives."""


@dataclass(frozen=True, slots=True)
class Scoreboards:
    """Both scoreboards."""

    rows: tuple[Row, ...]
    collectives: tuple[CollectiveRow, ...]


def run_report(scenario: Scenario, step_time_s: float) -> RunReport:
    """The whole run of a scenario whose step takes `step_time_s`, its uncertainty included."""
    return moesim.run(budget.admit(scenario), step_time_s=step_time_s, uncertainty=True)


def evidence(progress: Callable[[float | None, str], None]) -> Scoreboards:
    """Every published figure and every measured collective beside its prediction, computed now."""
    done = 0

    def say(what: str) -> None:
        nonlocal done
        progress(min(1.0, done / STEPS), what)
        done += 1

    rows = score(say)
    say("collectives")
    return Scoreboards(tuple(rows), tuple(score_collectives()))


def published_step(row_id: str) -> ScoredRow:
    """One published step beside its prediction with its interval, computed now."""
    return score_row(next(row for row in open_rows() if row.id == row_id))
