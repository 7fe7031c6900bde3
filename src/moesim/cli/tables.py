"""Prints schedules, scores, presets and hardware."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from moesim.cli.console import print_json, print_table, print_text, working, wrapped
from moesim.cli.console import width as console_width
from moesim.hwmodels.summary_text import percent, short
from moesim.simulator.scoring.scoreboard import Board, score_all
from moesim.simulator.scoring.scoreboard.runs import ScoredRun, runs, score_run
from moesim.simulator.scoring.scoreboard.score import GroupScore

if TYPE_CHECKING:
    from moesim.simulator.schedules import Schedule
    from moesim.simulator.scoring.published import Placement, Row
    from moesim.simulator.scoring.published_collectives import GroupSummary
    from moesim.simulator.scoring.published_full_resolution import FullChecks


def schedule_text(schedule: Schedule, width: int | None = None) -> str:
    """The drawing of a schedule, with its bubble and the published formula for the same durations."""
    from moesim.simulator.schedules import Durations, draw, idle, published_bubble, unit_times, validate

    report = validate(schedule)
    peaks = sorted(set(report.peak_in_flight))
    shown = str(peaks[0]) if len(peaks) == 1 else f"{peaks[0]} to {peaks[-1]}"
    bubbles = idle(unit_times(schedule))
    published = published_bubble(schedule.name, schedule.pp, Durations(), schedule.vpp)
    formula = "no published formula" if published is None else f"published formula {published:g}"
    drawing = draw(schedule, width or console_width()).split("\n")
    lines = [
        *drawing,
        f"bubble: {sum(bubbles) / len(bubbles):g} on the mean rank, {bubbles[0]:g} on rank 0; {formula} "
        "(F, I, W = 1, B = 2, pair = 3)",
        f"micro-batches in flight on a rank: at most {shown}",
    ]
    return "\n".join(
        part for line in lines for part in ([line] if line.startswith("rank ") else wrapped(line))
    )


def print_scores(rows: Sequence[Row], placements: Sequence[Placement]) -> None:
    """Print the scores, and the step times under other placements of the layers."""
    sources = {source: number for number, source in enumerate(dict.fromkeys(row.source for row in rows), 1)}
    headers = ("published", "predicted", "error", "source")
    for profile, group in groupby(rows, key=lambda row: row.id.partition("@")[2]):
        cells = [
            (
                f"{row.quantity}{'' if row.unit == '1' else f', {row.unit}'}"
                f"{' *' if row.used_for_calibration else ''}",
                f"{row.published:,.4g}" if row.published < 1e5 else short(row.published, 4),
                f"{row.predicted:,.4g}" if row.predicted < 1e5 else short(row.predicted, 4),
                f"{100 * row.relative_error:+.1f} %",
                f"[{sources[row.source]}]",
            )
            for row in group
        ]
        print_table((f"with profile {profile}" if profile else "quantity", *headers), cells, right=(1, 2, 3))
        print_text("")
    print_text("* calibrated on it, so no test of the prediction")
    for source, number in sources.items():
        print_text(f"[{number}] {source}")
    if placements:
        print_text("\nstep time under other placements of the layers, which the reports do not publish")
        lines = [
            (p.name, f"{p.time_s:.3f}", f"{100 * p.relative_to_default:+.1f} %", " ".join(map(str, p.layers)))
            for p in placements
        ]
        print_table(("placement", "seconds", "change", "layers per stage"), lines, right=(1, 2))


def print_full_checks(checks: FullChecks) -> None:
    """Print full resolution against the folded run, two measured networks and a published timeline."""
    print_text("\nfull resolution: relative differences, published and predicted")
    cells = [
        (
            row.quantity,
            f"{100 * row.published:+.2f} %",
            f"{100 * row.predicted:+.2f} %",
            f"{100 * row.limit:.1f} %",
            "holds" if row.holds else "MISSED",
        )
        for row in checks.differences
    ]
    headers = ("difference", "published", "predicted", "within", "")
    print_table(headers, cells, right=(1, 2, 3))
    print_text(
        "\nwait at the barriers of a pair, ms: one GPU of the published timeline, all GPUs of the full run"
    )
    rows = [
        (
            row.phase,
            str(row.layer),
            f"{1e3 * row.published_s:.2f}",
            *(f"{1e3 * v:.2f}" for v in (row.predicted.p10_s, row.predicted.p50_s, row.predicted.p90_s)),
        )
        for row in checks.notify
    ]
    print_table(("transfer", "layer", "published", "10 %", "50 %", "90 %"), rows, right=(1, 2, 3, 4, 5))


def print_collectives(groups: Sequence[GroupSummary]) -> None:
    """Print the errors of the collectives' times by group; single rows are in the JSON."""
    if not groups:
        return
    print_text("\ncollectives: error of the predicted time, by group (single rows: --json)")
    cells = [
        (
            group.use,
            group.group,
            str(group.rows),
            f"{100 * group.median_absolute_error:.1f} %",
            f"{100 * group.signed_median_error:+.1f} %",
            f"{100 * group.worst_error:+.1f} %",
            group.worst_row,
        )
        for group in groups
    ]
    headers = ("class", "group", "rows", "median |error|", "signed median", "worst", "worst row")
    print_table(headers, cells, right=(2, 3, 4, 5))


def print_presets(as_json: bool) -> None:
    """Print every shipped scenario with its confidence."""
    from moesim.simulator.scenario.presets import shipped_presets

    rows = shipped_presets()
    if as_json:
        print_json([row.model_dump() for row in rows])
        return
    headers = ("preset", "model", "GPUs", "accelerator", "confidence", "description")
    cells = [(r.preset, r.model, f"{r.n_gpus:,}", r.accelerator, r.confidence, r.description) for r in rows]
    print_table(headers, cells, right=(2,))


def print_hardware(name: str | None, as_json: bool) -> None:
    """Print every shipped description, or every figure of one."""
    from moesim.hwmodels.hardware_text import describe, hardware_rows

    rows: Sequence[Any] = hardware_rows() if name is None else describe(name)
    if as_json:
        print_json([row._asdict() for row in rows])
    elif name is None:
        print_table(("what", "name", "summary", "confidence", "figures not found"), rows)
    else:
        print_table(("figure", "value", "kind", "source", "date", "note"), rows)


# -- scoreboard --------------------------------------------------------------------------------------
# The command `validate --all`: prints the open scoreboard as tables or JSON.

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
    heads = ("rows of", "rows", "over rows", "groups", "mean of group medians", "median of them")
    print_table(heads, over, right=(1, 2, 3, 4, 5))
    if board.group_covered is not None:
        print_text(f"mean over groups of the share in the 80 % interval: {board.group_covered:.0%}")
    print_refusals(board)
    print_memory(board)
    known = [r for r in board.rows if r.relative_error is not None]
    missed = sorted(known, key=lambda r: -abs(r.relative_error or 0))
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
