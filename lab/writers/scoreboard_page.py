"""The section of docs/validation.md with the open scoreboard and the five H200 runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lab.scoring.ablations import (
    ROWS_OF_A_GROUP,
    AblationScore,
    score_ablations,
)

from moesim.simulator.scoring.scoreboard import Board, ScoredRow, open_rows, score_all
from moesim.simulator.scoring.scoreboard.runs import ScoredRun, runs, score_run
from moesim.simulator.scoring.scoreboard.score import GroupScore

BEGIN, END = "<!-- open scoreboard -->", "<!-- end of open scoreboard -->"
SHOWN_MISSES = 20
NOTES = Path(__file__).resolve().parents[2] / "lab" / "docs" / "scoreboard-notes.md"
GIB = 2.0**30


def section_on(text: str) -> str:
    """The section as it stands on a page, marks included; empty marks where the page has none."""
    if BEGIN not in text:
        return f"{BEGIN}\n{END}"
    return BEGIN + text.split(BEGIN)[1].split(END)[0] + END


def scoreboard_section() -> str:
    """The section from fresh predictions."""
    board = score_all(workers=2)
    without = score_ablations(open_rows(), board.rows, workers=2)
    return section([score_run(run) for run in runs()], board, without)


def section(scored: list[ScoredRun], board: Board, without: Mapping[str, Sequence[AblationScore]]) -> str:
    """Markdown of runs, groups, sets, misses and refusals."""
    lines = [
        BEGIN,
        "## Five real runs on 8x H200",
        "",
        "The runs used torchtitan 0.2.2 unmodified; the predictions use the profile `h200-8gpu`. Active",
        "bytes are the peak of live tensors in PyTorch's allocator, reserved bytes what it took from the",
        "device. Both are predicted by a replay of the step's allocations (eq. M43). *Needed* are the",
        "predicted tensors by kind with the framework's own bytes (eq. M5), which decide whether a plan",
        "fits.",
        "",
        "| run | step (s) | predicted | error | P10 to P90 | active (GiB) | predicted | error | "
        "reserved (GiB) | predicted | error | needed (GiB) | fits | exposed (s) | predicted |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
        *(_run(run) for run in scored),
        "",
        "Exposed communication was profiled for two of the runs. It is the time of collectives beside which",
        "nothing ran.",
        "",
        "## Published training steps",
        "",
        "`moesim validate --all` prints this table. Every row is predicted with the plan that was run and",
        "the published configuration behind it, taken whole ([decision",
        "0030](decisions/0030-published-configurations-as-data.md)). Assumptions are made by source,",
        "never by row ([decision 0020](decisions/0020-scoreboard-of-published-steps.md)), and nothing is",
        "fitted.",
        "",
        "Errors are those of the step. *In 80 %* counts the published steps inside the 80 % interval (P10",
        "to P90) of their prediction; the aim is 70 to 90 %. *Faster* and *slower* count the published",
        "steps below P10 and above P90. *Width* is the median of P90 - P10 over the predicted step. What",
        "an interval contains was decided first ([decision",
        "0024](decisions/0024-what-an-interval-contains.md)).",
        "",
        "| rows of | n | refused | median error | median absolute | worst | in 80 % | faster | slower | "
        "width | in bounds | memory: n | median absolute | do not fit |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
        *(_score(group) for group in board.groups),
        *(_score(group, bold=True) for group in board.totals),
        "",
    ]
    lines += [
        "Rows that *do not fit* ran, but are predicted not to. They count as misses of the memory model.",
        "",
        "Sources differ in size (BLOOM has 88 rows), so the median over rows is one statistic and the",
        "medians of the groups (model family and hardware generation) are another:",
        "",
        "| rows of | rows | median absolute, over rows | groups | mean of groups' medians | median of them |",
        "|---|---|---|---|---|---|",
        *(
            f"| {t.name} | {t.rows} | {t.median_absolute_error:.1%} | {t.groups} | {t.group_mean:.1%} | "
            f"{t.group_median:.1%} |"
            for t in board.totals
        ),
        "",
    ]
    if board.group_covered is not None:
        lines += [
            f"Mean over the groups of the share in the 80 % interval: {board.group_covered:.0%}.",
            "",
        ]
    known = sorted((r for r in board.rows if r.relative_error is not None), key=_worst_first)
    bound = [r.id for r in board.rows if r.host_bound]
    lines += [
        "Rows marked (host) are predicted to lose at least a tenth of the step to launch stalls: "
        f"{', '.join(bound) or 'none'}.",
        "",
        "Largest misses:",
        "",
        "| row | group | published (s) | predicted | P10 to P90 | error |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.id}{_host(r.host_bound)} | {r.group} | {r.published_step_s:.4g} | {r.predicted_step_s:.4g} | "
        f"{_between(r)} | {r.relative_error:+.1%} |"
        for r in known[:SHOWN_MISSES]
    ]
    lines += [
        *_ablations(without),
        *_refused(board),
        *_left_out(board),
        *_memory(board),
        "",
        notes(board),
        END,
    ]
    return "\n".join(lines)


def _ablations(without: Mapping[str, Sequence[AblationScore]]) -> list[str]:
    """Table of the mechanisms: medians of the complete rows of each set with the mechanism and without it."""
    sets = ("all rows", "Hopper", "Hopper, MoE", "Blackwell", "A100")
    lines = [
        "",
        "### Without one mechanism",
        "",
        "Each line switches one mechanism off, in every row that uses it, and leaves the others as they are.",
        f"At most {ROWS_OF_A_GROUP} complete rows of each group are predicted again, evenly spaced. The",
        "figures are medians of absolute errors over those of a set, without the mechanism and (in",
        "brackets) with it; a dash means that none of them uses it. A mechanism is in the model because",
        "the frameworks do that work, and some medians would be lower without it.",
        "",
        f"| mechanism | rows | {' | '.join(sets)} |",
        f"|---|---|{'---|' * len(sets)}",
    ]
    for name, scores in without.items():
        by_set = {score.name: score for score in scores}
        cells = [
            f"{by_set[one].without:.1%} ({by_set[one].with_it:.1%})" if one in by_set else "-" for one in sets
        ]
        rows = by_set["all rows"].rows if "all rows" in by_set else 0
        lines.append(f"| {name} | {rows} | {' | '.join(cells)} |")
    return lines


def notes(board: Board) -> str:
    """lab/docs/scoreboard-notes.md with the figures of the board in the places of its placeholders."""
    scores = {score.name: score for score in (*board.groups, *board.totals)}
    return (
        NOTES.read_text("utf-8")
        .strip()
        .format(
            rows={name: score.rows for name, score in scores.items()},
            median={name: score.median_error for name, score in scores.items()},
            worst={name: score.worst_absolute_error for name, score in scores.items()},
            memory={name: score.memory_absolute_error or 0.0 for name, score in scores.items()},
            covered={name: score.covered or 0.0 for name, score in scores.items()},
            above={name: score.above or 0.0 for name, score in scores.items()},
            below={name: score.below or 0.0 for name, score in scores.items()},
            width={name: score.interval_width or 0.0 for name, score in scores.items()},
            group_covered=board.group_covered or 0.0,
        )
    )


def _refused(board: Board) -> list[str]:
    scored = sum(r.relative_error is not None for r in board.rows)
    return [
        "",
        f"Scored: {scored} of {len(board.rows)} rows. Refused:",
        "",
        "| rows | accelerators | model | why |",
        "|---|---|---|---|",
        *(f"| {r.rows} | {r.family} | {r.arch} | {r.reason} |" for r in board.refusals),
    ]


def _left_out(board: Board) -> list[str]:
    rows: dict[str, list[str]] = {}
    for row in board.rows:
        for note in row.left_out:
            rows.setdefault(note, []).append(row.id)
    return [
        "",
        "Sources state the following, and the prediction does not express it:",
        "",
        "| what | rows |",
        "|---|---|",
        *(f"| {note} | {', '.join(ids)} |" for note, ids in sorted(rows.items(), key=lambda i: -len(i[1]))),
    ]


def _memory(board: Board) -> list[str]:
    known = [r for r in board.rows if r.needed_bytes and r.capacity_bytes]
    lines = [
        "",
        f"Memory of every row that ran ({sum(not r.fits for r in known)} of {len(known)} do not fit) is the",
        "predicted peak with the framework's own bytes, compared with the accelerator's memory.",
        "",
        "| row | group | predicted (GiB) | of | fits |",
        "|---|---|---|---|---|",
    ]
    for r in known:
        needed, capacity = (r.needed_bytes or 0.0) / GIB, (r.capacity_bytes or 0.0) / GIB
        fits = "yes" if r.fits else "**no**"
        lines.append(f"| {r.id} | {r.group} | {needed:.1f} | {capacity:.0f} | {fits} |")
    return lines


def _host(bound: bool) -> str:
    return " (host)" if bound else ""


def _worst_first(row: ScoredRow) -> float:
    return -abs(row.relative_error or 0.0)


def _run(run: ScoredRun) -> str:
    exposed = "" if run.exposed_s is None else f"{run.exposed_s:.3f}"
    return (
        f"| {run.name}{_host(run.host_bound)} | "
        f"{run.step_s:.3f} | {run.predicted_step_s:.3f} | {run.step_error:+.1%} | "
        f"{run.interval_s[0]:.3f} to {run.interval_s[1]:.3f} | "
        f"{run.memory_bytes / GIB:.1f} | {run.predicted_memory_bytes / GIB:.1f} | {run.memory_error:+.1%} | "
        f"{run.reserved_bytes / GIB:.1f} | {run.predicted_reserved_bytes / GIB:.1f} | "
        f"{run.reserved_error:+.1%} | {run.needed_bytes / GIB:.1f} | {'yes' if run.fits else 'no'} | "
        f"{exposed} | {run.predicted_exposed_s:.3f} |"
    )


def _score(group: GroupScore, bold: bool = False) -> str:
    name = f"**{group.name}**" if bold else group.name
    memory = "" if group.memory_absolute_error is None else f"{group.memory_absolute_error:.1%}"
    return (
        f"| {name} | {group.rows} | {group.refused or ''} | {group.median_error:+.1%} | "
        f"{group.median_absolute_error:.1%} | {group.worst_absolute_error:.1%} | "
        f"{_share(group.covered)} | {_share(group.below)} | "
        f"{_share(group.above)} | {_share(group.interval_width)} | {group.inside_bounds:.0%} | "
        f"{group.memory_rows or ''} | "
        f"{memory} | {group.too_large or ''} |"
    )


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _between(row: ScoredRow) -> str:
    return "" if row.interval_s is None else f"{row.interval_s[0]:.4g} to {row.interval_s[1]:.4g}"
