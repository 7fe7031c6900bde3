"""simulator/data/scoreboard.yaml from the rows of lab/docs/boards/rows.csv.

The dashboard and the README show these medians at once; computing the rows takes half an hour.
"""

from __future__ import annotations

import datetime
import json
import re
from pathlib import Path

import moesim
from moesim.simulator.scoring.scoreboard import Board
from moesim.simulator.scoring.scoreboard.rows import KeptBoard, KeptScore
from moesim.simulator.scoring.scoreboard.score import GroupScore

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "simulator" / "data" / "scoreboard.yaml"


def kept_board(board: Board, computed: datetime.date) -> KeptBoard:
    """The medians of a board, rounded as the pages show them."""
    sets, groups = (
        tuple(_score(one) for one in scores if one.covered is not None)
        for scores in (board.totals, board.groups)
    )
    return KeptBoard(computed=computed, version=moesim.__version__, sets=sets, groups=groups)


def _score(score: GroupScore) -> KeptScore:
    shares = {
        key: round(getattr(score, key), digits)
        for key, digits in (
            ("median_error", 3), ("median_absolute_error", 3), ("worst_absolute_error", 3), ("covered", 2),
            ("interval_width", 2),
        )
    }  # fmt: skip
    return KeptScore(name=score.name, rows=score.rows, **shares)


def yaml_of(board: KeptBoard) -> str:
    """The file's text."""
    lines = [
        "# Medians of the open scoreboard (docs/validation.md), rounded as there. Written by",
        "# lab/writers/kept_board.py, never by hand.",
        f"computed: {board.computed.isoformat()}",
        f"version: {board.version}",
    ]
    for title, scores in (("sets", board.sets), ("groups", board.groups)):
        lines.append(f"{title}:")
        for score in scores:
            cells = ", ".join(f"{key}: {json.dumps(value)}" for key, value in score.model_dump().items())
            lines.append(f"  - {{{cells}}}")
    return "\n".join(lines) + "\n"


def day_of(text: str) -> datetime.date:
    """The day that a kept file states."""
    found = re.search(r"^computed: (\S+)$", text, re.M)
    assert found is not None
    return datetime.date.fromisoformat(found[1])


def current(board: Board) -> str:
    """The file's text for a board; the day stays where no figure changed."""
    old = FILE.read_text("utf-8") if FILE.is_file() else ""
    kept = yaml_of(kept_board(board, day_of(old))) if old else ""
    return old if old and kept == old else yaml_of(kept_board(board, datetime.date.today()))
