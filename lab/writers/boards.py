"""The open scoreboard as files in lab/docs/boards: what `make scoreboard` computes in half an hour, and what
every page about it is written from afterwards.

    rows.csv        every published training step beside its prediction
    runs.csv        our runs on 8x H200 beside their predictions
    mechanisms.csv  medians of the errors without one mechanism at a time
"""

from __future__ import annotations

import csv
import io
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moesim.simulator.scoring.scoreboard import Board, OpenRow, ScoredRow, open_rows, score_all
from lab.scoring.ablations import AblationScore, score_ablations
from moesim.simulator.scoring.scoreboard.rows import framework_of
from moesim.simulator.scoring.scoreboard.plan import policies_of, scenario_of
from moesim.simulator.scoring.scoreboard.runs import ScoredRun, runs, score_run
from moesim.simulator.scoring.scoreboard.score import board_of

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "lab" / "docs" / "boards"
ROWS, RUNS, MECHANISMS = (FOLDER / f"{name}.csv" for name in ("rows", "runs", "mechanisms"))
SETS = ("all rows", "Hopper", "Hopper, MoE", "Blackwell", "A100")
"""Sets of rows whose medians are kept for every mechanism."""

STATED = ("model", "hardware", "n_gpus", "framework", "dispatcher")
"""Columns of rows.csv that say what ran, beside those of a scored row."""
NUMBERS = (
    "published_step_s", "predicted_step_s", "relative_error", "p10_s", "p90_s", "lower_bound_s",
    "upper_bound_s", "needed_bytes", "capacity_bytes", "memory_bytes", "published_memory_bytes",
    "memory_error", "host_share",
)  # fmt: skip
WORDS = ("recompute", "fits", "host_bound", "left_out", "refused")
BETWEEN = " | "
"""Separates the notes of a row in one cell."""


def computed() -> dict[Path, str]:
    """The three files from fresh predictions."""
    board = score_all(workers=2)
    without = score_ablations(open_rows(), board.rows, workers=2)
    return {
        ROWS: rows_text(board.rows),
        RUNS: runs_text([score_run(run) for run in runs()]),
        MECHANISMS: mechanisms_text(without),
    }


def kept() -> dict[Path, str]:
    """The three files as they stand."""
    return {path: path.read_text("utf-8") for path in (ROWS, RUNS, MECHANISMS)}


def rows_text(rows: Iterable[ScoredRow]) -> str:
    """rows.csv: one line a published step, in the order of the published rows."""
    stated = {row.id: row for row in open_rows()}
    lines = []
    for row in rows:
        figures = row.model_dump() | dict(
            zip(("p10_s", "p90_s"), row.interval_s or (None, None), strict=True)
        )
        figures["left_out"] = BETWEEN.join(row.left_out)
        one = stated[row.id]
        lines.append(
            {
                "id": row.id,
                "group": row.group,
                "model": one.model,
                "hardware": one.hardware,
                "n_gpus": one.n_gpus,
                "framework": framework_of(one),
                "dispatcher": "" if row.refused else dispatcher_of(one),
                **{key: _cell(figures[key]) for key in (*NUMBERS, *WORDS)},
            }
        )
    return _csv(("id", "group", *STATED, *NUMBERS, *WORDS), lines)


def dispatcher_of(row: OpenRow) -> str:
    """What moves the tokens of a predicted row to their experts; nothing for dense models and without EP."""
    if row.arch == "dense":
        return ""
    scenario = scenario_of(row, policies_of(row)[-1])
    return scenario.communication.kernels if scenario.parallel.ep > 1 else "none (EP1)"


def board(files: Mapping[Path, str]) -> Board:
    """The scoreboard of rows.csv."""
    stated = {row.id: row for row in open_rows()}
    return board_of([_row(line, stated[line["id"]]) for line in lines_of(files[ROWS])])


def _row(line: Mapping[str, str], one: OpenRow) -> ScoredRow:
    figures: dict[str, Any] = {key: float(line[key]) if line[key] else None for key in NUMBERS}
    low, high = figures.pop("p10_s"), figures.pop("p90_s")
    return ScoredRow(
        id=one.id,
        group=one.group,
        arch=one.arch,
        family=one.family,
        source=one.source,
        complete=one.complete == "yes",
        interval_s=None if low is None else (low, high),
        fits={"yes": True, "no": False, "": None}[line["fits"]],
        host_bound=line["host_bound"] == "yes",
        left_out=tuple(filter(None, line["left_out"].split(BETWEEN))),
        recompute=line["recompute"],
        refused=line["refused"],
        **figures,
    )


def runs_text(scored: Sequence[ScoredRun]) -> str:
    """runs.csv: the fields of every run of ours."""
    lines = []
    for run in scored:
        figures = run.model_dump()
        figures["p10_s"], figures["p90_s"] = figures.pop("interval_s")
        lines.append({key: _cell(value) for key, value in figures.items()})
    return _csv(tuple(lines[0]), lines)


def scored_runs(files: Mapping[Path, str]) -> list[ScoredRun]:
    """The runs of runs.csv."""
    result = []
    for line in lines_of(files[RUNS]):
        figures: dict[str, Any] = dict(line)
        figures["interval_s"] = (figures.pop("p10_s"), figures.pop("p90_s"))
        result.append(ScoredRun(**{key: None if value == "" else value for key, value in figures.items()}))
    return result


def mechanisms_text(without: Mapping[str, Sequence[AblationScore]]) -> str:
    """mechanisms.csv: for every mechanism the medians of each set of rows without it and with it."""
    lines = []
    for name, scores in without.items():
        by_set = {score.name: score for score in scores}
        line = {"mechanism": name, "rows": str(by_set["all rows"].rows if "all rows" in by_set else 0)}
        for one in SETS:
            score = by_set.get(one)
            line[f"{one}: without"] = "" if score is None else f"{score.without:.3f}"
            line[f"{one}: with"] = "" if score is None else f"{score.with_it:.3f}"
        lines.append(line)
    return _csv(
        ("mechanism", "rows", *(f"{one}: {what}" for one in SETS for what in ("without", "with"))), lines
    )


def lines_of(text: str) -> list[dict[str, str]]:
    """The lines of a file by column."""
    return list(csv.DictReader(io.StringIO(text)))


def relinked(notes: str) -> str:
    """Notes whose links start from docs/, for a page of this folder."""
    here = FOLDER.relative_to(ROOT).as_posix()

    def turned(match: re.Match[str]) -> str:
        return f"]({posixpath.relpath(posixpath.normpath(f'docs/{match[1]}'), here)}"

    return re.sub(r"\]\(((?!https?:|#)[^)\s]+)", turned, notes)


def _cell(value: object) -> str:
    """A figure with seven digits, which is more than its error and the same on every machine."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.7g}" if isinstance(value, float) else str(value)


def _csv(columns: Sequence[str], lines: Iterable[Mapping[str, object]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()
