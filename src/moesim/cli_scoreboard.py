"""`moesim validate --all`: the open scoreboard as tables or JSON."""

from __future__ import annotations

from moesim.cli_console import percent, print_json, print_table, print_text, working
from moesim.simulator.scoreboard import Board, score_all
from moesim.simulator.scoreboard.runs import ScoredRun, runs, score_run
from moesim.simulator.scoreboard.score import GroupScore


def scoreboard(as_json: bool, workers: int) -> None:
    """Score every row and run and print what came out."""
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
    """The five runs on one host."""
    cells = [
        (
            run.name,
            f"{run.step_s:.3f}",
            f"{run.predicted_step_s:.3f}",
            percent(run.step_error),
            f"{run.memory_bytes / 1e9:.1f}",
            f"{run.predicted_memory_bytes / 1e9:.1f}",
            percent(run.memory_error),
            f"{run.interval_s[0]:.3f} to {run.interval_s[1]:.3f}",
        )
        for run in scored
    ]
    headers = ("run", "step (s)", "predicted", "error", "memory (GB)", "predicted", "error", "P10 to P90 (s)")
    print_table(headers, cells, right=(1, 2, 3, 4, 5, 6, 7))


def print_board(board: Board) -> None:
    """Errors by group and set, then what misses most and what was not predicted."""
    print_text("")
    headers = (
        "rows of", "n", "median", "median |error|", "worst", "in 80 %", "width", "in bounds", "memory |error|"
    )  # fmt: skip
    print_table(headers, [_cells(g) for g in (*board.groups, *board.totals)], right=tuple(range(1, 9)))
    print_text(
        "in 80 %: published steps inside the 80 % interval; width: of it, over the predicted step, median"
    )
    if board.group_mean is not None:
        print_text(f"mean over groups of the median |error|: {percent(board.group_mean)}")
    if board.group_covered is not None:
        print_text(f"mean over groups of the share in the 80 % interval: {board.group_covered:.0%}")
    missed = sorted(
        (r for r in board.rows if r.relative_error is not None), key=lambda r: -abs(r.relative_error or 0)
    )
    print_text("\nlargest misses")
    lines = [(r.id, r.group, percent(r.relative_error or 0.0), r.recompute) for r in missed[:10]]
    print_table(("row", "group", "error", "recompute"), lines, right=(2,))
    for row in board.rows:
        if row.refused:
            print_text(f"not predicted: {row.refused}")


def _cells(g: GroupScore) -> tuple[str, ...]:
    memory = "" if g.memory_absolute_error is None else percent(g.memory_absolute_error)
    return (
        g.name,
        str(g.rows),
        percent(g.median_error),
        percent(g.median_absolute_error),
        percent(g.worst_absolute_error),
        "" if g.covered is None else f"{g.covered:.0%}",
        "" if g.interval_width is None else f"{g.interval_width:.0%}",
        f"{g.inside_bounds:.0%}",
        memory,
    )
