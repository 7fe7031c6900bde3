"""The kept medians of the open scoreboard, and the names of its rows."""

from __future__ import annotations

import importlib
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
from moesim.simulator.scoring.scoreboard.score import board_of


@pytest.fixture
def boards() -> ModuleType:
    """The script that keeps the scoreboard's rows."""
    return importlib.import_module("lab.writers.boards")


def test_kept_medians_are_those_of_the_kept_rows(boards: ModuleType) -> None:
    script = importlib.import_module("lab.writers.kept_board")
    board = boards.board(boards.kept())
    assert script.kept_board(board, kept_board().computed) == kept_board()
    assert script.current(board) == script.FILE.read_text("utf-8")
    slower = board.rows[0].model_copy(update={"relative_error": 0.99})
    assert script.current(board_of([slower, *board.rows[1:]])) != script.current(board)


def test_rows_read_back_as_they_were_written(boards: ModuleType) -> None:
    files = boards.kept()
    board = boards.board(files)
    assert boards.rows_text(board.rows) == files[boards.ROWS]
    assert boards.runs_text(boards.scored_runs(files)) == files[boards.RUNS]
    assert {row.id for row in board.rows} == {row.id for row in open_rows()}


def test_the_pages_of_the_scoreboard_are_written_from_the_kept_rows(boards: ModuleType) -> None:
    pages = importlib.import_module("lab.writers.scoreboard_page")
    files = boards.kept()
    for path, text in pages.board_pages(files, boards.board(files)).items():
        assert path.read_text("utf-8") == text, f"{path.name}: run make pages"


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
