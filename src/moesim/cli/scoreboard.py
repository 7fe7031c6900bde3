"""The command `validate --all`: prints the open scoreboard as tables or JSON."""

from __future__ import annotations

from collections import Counter

from moesim.cli.console import percent, print_json, print_table, print_text, working
from moesim.simulator.scoring.scoreboard import Board, score_all
from moesim.simulator.scoring.scoreboard.runs import ScoredRun, runs, score_run
from moesim.simulator.scoring.scoreboard.score import GroupScore

GIB = 2.0**30


def scoreboard(as_json: bool, workers: int) -> None:
    """Score every row and every run, and print the scores."""
    with working("scoring") as say:
        say("five runs on 8x H200")
        scored = [score_run(run) for run in runs()]
        say("open rows")
        board = score_all(workers=workers)
    if as_json:
        print_json({"runs": [run.model_dump() for run in scored], **board.model_dump()})
        return
    print_runs(scored)
    print_board(board)


def print_runs(scored: list[ScoredRun]) -> None:
    """Print the five runs, with the predicted peaks of the allocator, active and reserved, beside theirs."""
    cells = [
        (
            run.name,
            f"{run.step_s:.3f}",
            f"{run.predicted_step_s:.3f}",
            percent(run.step_error),
            f"{run.memory_bytes / GIB:.1f}",
            f"{run.predicted_memory_bytes / GIB:.1f}",
            percent(run.memory_error),
            f"{run.reserved_bytes / GIB:.1f}",
            f"{run.predicted_reserved_bytes / GIB:.1f}",
            percent(run.reserved_error),
            f"{run.needed_bytes / GIB:.1f}",
            "yes" if run.fits else "no",
            f"{run.interval_s[0]:.3f} to {run.interval_s[1]:.3f}",
        )
        for run in scored
    ]
    headers = (
        "run", "step (s)", "predicted", "error", "active (GiB)", "predicted", "error", "reserved (GiB)",
        "predicted", "error", "needed (GiB)", "fits", "P10 to P90 (s)",
    )  # fmt: skip
    print_table(headers, cells, right=tuple(range(1, 11)))
    print_text(
        "active: the allocator's peak of live tensors; reserved: what it took from the device; both "
        "predicted by a replay of its allocations; needed: predicted tensors by kind and the framework's own "
        "bytes, which decide whether a plan fits"
    )


def print_board(board: Board) -> None:
    """Print errors by group and set, refusals, the memory of every row, and the largest misses."""
    print_text("")
    headers = (
        "rows of", "n", "refused", "median", "median |error|", "worst", "in 80 %", "width", "in bounds",
        "memory |error|", "do not fit",
    )  # fmt: skip
    print_table(headers, [_cells(g) for g in (*board.groups, *board.totals)], right=tuple(range(1, 11)))
    print_text(
        "in 80 %: published steps inside the 80 % interval; width: of it, over the predicted step, median; "
        "do not fit: rows that ran and are predicted not to"
    )
    print_text("\nmedian |error|, over rows and over groups of sources")
    over = [
        (t.name, str(t.rows), percent(t.median_absolute_error), str(t.groups), percent(t.group_mean),
         percent(t.group_median))
        for t in board.totals
    ]  # fmt: skip
    print_table(
        ("rows of", "rows", "over rows", "groups", "mean of group medians", "median of them"),
        over,
        right=(1, 2, 3, 4, 5),
    )
    if board.group_covered is not None:
        print_text(f"mean over groups of the share in the 80 % interval: {board.group_covered:.0%}")
    print_refusals(board)
    print_memory(board)
    missed = sorted(
        (r for r in board.rows if r.relative_error is not None), key=lambda r: -abs(r.relative_error or 0)
    )
    print_text("\nlargest misses")
    lines = [(r.id, r.group, percent(r.relative_error or 0.0), r.recompute) for r in missed[:10]]
    print_table(("row", "group", "error", "recompute"), lines, right=(2,))
    print_text("\nstated by the source and not expressed")
    notes = Counter(note for r in board.rows for note in r.left_out)
    print_table(("rows", "what"), [(str(n), note) for note, n in notes.most_common()], right=(0,))


def print_refusals(board: Board) -> None:
    """Print the rows that were not predicted, by reason, accelerator family and kind of model."""
    scored = sum(r.relative_error is not None for r in board.rows)
    print_text(f"\nscored {scored} of {len(board.rows)} rows; refused:")
    cells = [(str(r.rows), r.family, r.arch, r.reason) for r in board.refusals]
    print_table(("rows", "accelerators", "model", "why"), cells, right=(0,))


def print_memory(board: Board) -> None:
    """Print whether each row is predicted to fit; every row ran, so a row that does not fit is a miss."""
    known = [r for r in board.rows if r.needed_bytes and r.capacity_bytes]
    print_text(f"\nmemory of every row that ran; {sum(not r.fits for r in known)} of {len(known)} do not fit")
    cells = [
        (
            r.id,
            r.group,
            f"{(r.needed_bytes or 0.0) / GIB:.1f}",
            f"{(r.capacity_bytes or 0.0) / GIB:.0f}",
            "yes" if r.fits else "no",
        )
        for r in known
    ]
    print_table(("row", "group", "predicted (GiB)", "of", "fits"), cells, right=(2, 3))


def _cells(g: GroupScore) -> tuple[str, ...]:
    memory = "" if g.memory_absolute_error is None else percent(g.memory_absolute_error)
    return (
        g.name,
        str(g.rows),
        str(g.refused or ""),
        percent(g.median_error),
        percent(g.median_absolute_error),
        percent(g.worst_absolute_error),
        "" if g.covered is None else f"{g.covered:.0%}",
        "" if g.interval_width is None else f"{g.interval_width:.0%}",
        f"{g.inside_bounds:.0%}",
        memory,
        str(g.too_large or ""),
    )
