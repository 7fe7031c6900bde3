"""Writes simulator/data/scoreboard.yaml from the open scoreboard's table in docs/validation.md.

    python -m lab.writers.kept_board

`make scoreboard` does it too. The dashboard shows these medians at once; computing them takes minutes.
"""

from __future__ import annotations

import datetime
import json
import re
from pathlib import Path

import moesim
from moesim.simulator.scoring.scoreboard.rows import KeptBoard, KeptScore

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "validation.md"
FILE = ROOT / "simulator" / "data" / "scoreboard.yaml"
HEADER = "rows of | n | refused | median error"
"""First columns of the table that is read."""


def kept_board(page: str, computed: datetime.date) -> KeptBoard:
    """The board of a page's table; names in bold are sets of rows, the others groups of sources."""
    table = page.partition(HEADER)[2].partition("\n\n")[0]
    sets, groups = [], []
    for line in table.splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        name = cells[0].strip("*")
        if not cells[6]:
            continue  # a set without intervals
        score = KeptScore(
            name=name,
            rows=int(cells[1]),
            median_error=_share(cells[3]),
            median_absolute_error=_share(cells[4]),
            worst_absolute_error=_share(cells[5]),
            covered=_share(cells[6]),
            interval_width=_share(cells[9]),
        )
        (sets if cells[0].startswith("**") else groups).append(score)
    return KeptBoard(computed=computed, version=moesim.__version__, sets=tuple(sets), groups=tuple(groups))


def _share(text: str) -> float:
    return round(float(text.rstrip("%")) / 100.0, 6)


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


def current(page: str) -> str:
    """The file's text for a page; the day stays where no figure changed."""
    old = FILE.read_text("utf-8") if FILE.is_file() else ""
    kept = yaml_of(kept_board(page, day_of(old))) if old else ""
    return old if old and kept == old else yaml_of(kept_board(page, datetime.date.today()))


def main() -> None:
    """Write the file."""
    FILE.write_text(current(PAGE.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
