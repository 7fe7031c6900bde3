"""The kept medians of the open scoreboard, and the names of its rows."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from moesim.simulator.scoring.scoreboard import open_rows
from moesim.simulator.scoring.scoreboard.rows import (
    FRAMEWORKS,
    framework_of,
    kept_board,
    publication_of,
    title_of,
)

DOCS = Path(__file__).resolve().parents[3] / "docs"


def writer() -> ModuleType:
    """The script that writes the kept file."""
    return importlib.import_module("lab.writers.kept_board")


def test_what_is_kept_is_what_the_page_says() -> None:
    page = (DOCS / "validation.md").read_text("utf-8")
    script = writer()
    assert script.kept_board(page, kept_board().computed) == kept_board()
    assert script.current(page) == script.FILE.read_text("utf-8")
    every = kept_board().named("all rows, complete")
    assert f"| **all rows, complete** | {every.rows} |" in page
    assert f"| {every.median_absolute_error:.1%} |" in page


def test_another_median_on_the_page_changes_the_file_and_its_day() -> None:
    page = (DOCS / "validation.md").read_text("utf-8")
    script = writer()
    line = next(text for text in page.splitlines() if text.startswith("| **all rows, complete** |"))
    changed = page.replace(line, line.replace(line.split("|")[4], " +99.0% "), 1)
    assert script.current(changed) != script.current(page) and "0.99" in script.current(changed)


def test_a_set_that_there_is_not_is_an_error() -> None:
    with pytest.raises(KeyError):
        kept_board().named("all rows of next year")
    assert 0.0 < kept_board().named("Hopper, complete").median_absolute_error < 1.0


def test_every_row_has_a_framework_a_name_and_a_publication() -> None:
    rows = open_rows()
    assert {framework_of(row) for row in rows} >= {"Megatron-LM", "MaxText", "NeMo", "LLM Foundry"}
    assert {row.id.rpartition("-")[0] for row in rows} == set(FRAMEWORKS)
    for row in rows:
        assert row.model in title_of(row) and row.hardware in title_of(row) and row.id not in title_of(row)
        assert 0 < len(publication_of(row)) <= 64
