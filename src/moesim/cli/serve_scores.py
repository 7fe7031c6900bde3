"""The command `serve validate`: measured serving beside predictions, the order of plans first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from moesim.cli.console import print_json, print_table, print_text, working
from moesim.cli.scores import print_order
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.summary_text import percent
from moesim.simulator.scoring.serving import METRICS, ErrorScore, ScoredServing, ServingBoard, score_serving
from moesim.simulator.scoring.serving_operators import FamilyScore, all_cases
from moesim.simulator.scoring.serving_operators import scores as score_families
from moesim.simulator.scoring.serving_published import (
    ScoredFigure,
    overlap_gains,
    score_figures,
    score_logged,
)
from moesim.simulator.scoring.serving_rows import serving_rows

MOST_SHOWN = 10


def validate_serving(file: Path | None, as_json: bool, workers: int) -> None:
    """Score shipped or own runs; the shipped ones with published figures and logged runs beside."""
    with working("scoring served runs") as say:
        say("TTFT and TPOT")
        board = score_serving(serving_rows(file), workers)
        figures: list[ScoredFigure] = []
        gains: dict[int, float] = {}
        if file is None:
            say("published figures and logged runs")
            figures, gains = [*score_figures(), *score_logged()], overlap_gains()
    if as_json:
        plain = {"figures": [one.model_dump() for one in figures], "overlap_gains": gains}
        print_json({**board.model_dump(), **plain})
        return
    print_board(board)
    if figures:
        print_figures(figures, gains)


def validate_operators(folder: Path, as_json: bool) -> None:
    """Score the kernels of the tables in a folder (`validation/serving` and `facts` of the shared data)."""
    try:
        with working("pricing kernels"):
            families = score_families(all_cases(folder))
    except OSError as error:
        raise InputError(
            f"{folder}: {error.strerror or error} ({error.filename}); give the folder that has "
            "validation/serving/*-open.csv and facts/h800-kernels"
        ) from None
    if as_json:
        print_json([family._asdict() for family in families])
        return
    print_families(families)


def print_families(families: Iterable[FamilyScore]) -> None:
    """Print errors of kernels by family: of the shapes that calibrated, and of those left out."""
    lines = [
        (one.family, str(one.fitted), f"{one.fitted_median:.1%}", str(one.left_out),
         f"{one.left_out_median:.1%}", f"{one.left_out_p90:.1%}")
        for one in families
    ]  # fmt: skip
    headers = ("kernels", "calibrated", "median |error|", "left out", "median |error|", "P90")
    print_table(headers, lines, right=range(1, 6))


def print_board(board: ServingBoard) -> None:
    """Print the order of plans, errors by set and group, refusals and the largest misses."""
    print_order(board.order, SERVED)
    for title, found in (("runs", board.totals), ("runs by model, machine and engine", board.groups)):
        print_table((title, *HEADERS), [_cells(score) for score in found], right=range(1, len(HEADERS) + 1))
        print_text("")
    print_text(
        "errors of the mean TPOT and TTFT, predicted / measured - 1; in 80 %: measured inside the interval; "
        "`all runs` leaves out those of which nobody says whether they had drafts"
    )
    refused = Counter(run.refused for run in board.runs if run.refused)
    print_table(("refused", "why"), [(str(n), why) for why, n in refused.most_common()], right=(0,))
    notes = Counter(note for run in board.runs for note in run.notes)
    print_table(
        ("runs", "read how"), [(str(n), note) for note, n in notes.most_common(MOST_SHOWN)], right=(0,)
    )
    missed = sorted(_known(board.runs), key=lambda run: -abs(run.error("tpot") or 0.0))
    lines = [(run.title, *(percent(run.error(metric) or 0.0) for metric in METRICS)) for run in missed]
    print_table(("largest misses", "TPOT", "TTFT"), lines[:MOST_SHOWN], right=(1, 2))


SERVED = (
    "family: one model, machine and lengths, at one number of requests under way or at any; regret: what the "
    "plan that is predicted to be best costs, over the best"
)
HEADERS = ("n", "refused", "TPOT", "|TPOT|", "in 80 %", "width", "TTFT", "|TTFT|", "in 80 %", "width")


def _known(runs: Iterable[ScoredServing]) -> list[ScoredServing]:
    return [run for run in runs if run.known and not run.refused]


def _cells(score: ErrorScore) -> tuple[str, ...]:
    def figures(metric: str) -> tuple[str, ...]:
        if metric not in score.median:
            return ("", "", "", "")
        return (
            percent(score.median[metric]), f"{score.absolute[metric]:.1%}", f"{score.covered[metric]:.0%}",
            f"{score.width[metric]:.0%}",
        )  # fmt: skip

    return (score.name, str(score.rows), str(score.refused or ""), *figures("tpot"), *figures("ttft"))


def print_figures(figures: Sequence[ScoredFigure], gains: dict[int, float]) -> None:
    """Print published figures and logged runs, and the gain of two micro-batches."""
    lines = [
        (one.name, one.what, f"{one.measured:.4g}", "" if one.predicted is None else f"{one.predicted:.4g}",
         "" if one.error is None else percent(one.error), "" if one.within is None else f"{one.within:.0%}",
         one.refused)
        for one in figures
    ]  # fmt: skip
    print_table(("figure", "of", "measured", "predicted", "error", "allowed", ""), lines, right=(2, 3, 4, 5))
    for tokens, gain in gains.items():
        print_text(f"two micro-batches at {tokens} decode tokens a rank: {gain:.2f} times as fast")
