"""The commands `validate --all` and `validate --rows`: scores of measured steps, their order first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

from moesim.cli.console import print_json, print_table, print_text, working
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.summary_text import percent
from moesim.simulator.common.processes import worker_pool
from moesim.simulator.scoring import case_rows, dispatcher_rows, file_records
from moesim.simulator.scoring.case_rows import ScoredCase, score_cases
from moesim.simulator.scoring.dispatcher_rows import (
    ScoredDispatcherRow,
    dispatcher_order,
    score_dispatcher_row,
)
from moesim.simulator.scoring.expert_gap import expert_gaps, summary
from moesim.simulator.scoring.order import APART, OrderScore, published_order
from moesim.simulator.scoring.reliability import (
    RELIABILITY_COLUMNS,
    LlamaRow,
    ReliabilityRow,
    llama_rows,
    reliability_rows,
)
from moesim.simulator.scoring.scoreboard import Board, open_rows, score_all
from moesim.simulator.scoring.scoreboard.runs import ScoredRun, runs, score_run
from moesim.simulator.scoring.scoreboard.score import GroupScore
from moesim.simulator.scoring.scoreboard.tables import is_table, read_rows
from moesim.simulator.trace.parts import FAR, LARGE, median_gap, score_all_parts

GIB = 2.0**30
MOST_FAMILIES = 10


def scoreboard(as_json: bool, workers: int) -> None:
    """Score the shipped rows and runs, and print the order of plans, then the errors."""
    with working("scoring") as say:
        say("five runs on 8x H200")
        scored = [score_run(run) for run in runs()]
        say("steps by dispatcher")
        rows, dispatched = _dispatched(None, workers)
        say("open rows")
        board = score_all(workers=workers)
    order = [*published_order(open_rows(), board.rows), *dispatcher_order(rows, dispatched)]
    if as_json:
        plain = {
            "order": [score.model_dump() for score in order],
            "runs": [run.model_dump() for run in scored],
        }
        print_json({**plain, "dispatchers": [row.model_dump() for row in dispatched], **board.model_dump()})
        return
    print_order(order)
    print_dispatched(dispatched)
    print_runs(scored)
    print_board(board)


def score_file(file: Path, as_json: bool, workers: int) -> None:
    """Score a table of the user's own measurements, of the kind that its columns tell.

    Raises InputError for other columns.
    """
    columns = file_records(file)[0].keys()
    order: list[OrderScore] = []
    show: Callable[[], None]
    scored: Sequence[Frozen]
    with working(f"scoring {file.name}") as say:
        say("predicting")
        if columns >= dispatcher_rows.COLUMNS:
            rows, steps = _dispatched(file, workers)
            order, show, scored = dispatcher_order(rows, steps), partial(print_dispatched, steps), list(steps)
        elif columns >= case_rows.COLUMNS:
            cases = score_cases(file)
            show, scored = partial(print_cases, cases), list(cases)
        elif columns >= RELIABILITY_COLUMNS:
            outcomes = reliability_rows(file)
            show, scored = partial(print_reliability, outcomes, []), list(outcomes)
        elif is_table(columns):
            own = read_rows(file)
            board = score_all(own, workers=workers)
            order = published_order(own, board.rows)
            show, scored = partial(print_board, board), list(board.rows)
        else:
            raise InputError(
                f"{file.name}: no table that is scored has the columns {', '.join(list(columns)[:8])} ...; "
                "give those of simulator/data/published/open-rows.csv, of moe-dispatchers-efa.csv or "
                "reliability-rows.csv there, or "
                "scenario, source, framework, metric, value, unit, scored, remark"
            )
    if as_json:
        print_json(
            {"order": [score.model_dump() for score in order], "rows": [r.model_dump() for r in scored]}
        )
        return
    print_order(order)
    show()


def validate_reliability(as_json: bool) -> None:
    """Print published restarts, blocking times and goodputs beside their predictions, and Llama 3's stops."""
    with working("scoring reliability"):
        rows, stops = reliability_rows(), llama_rows()
    if as_json:
        print_json({"rows": [r.model_dump() for r in rows], "llama3": [r.model_dump() for r in stops]})
        return
    print_reliability(rows, stops)


def print_reliability(rows: Sequence[ReliabilityRow], stops: Sequence[LlamaRow]) -> None:
    """Tables of both."""
    cells = [
        (row.source, row.quantity, "" if row.n_gpus is None else f"{row.n_gpus:,}",
         f"{row.published:g} {row.unit}", "none" if row.predicted is None else f"{row.predicted:.3g}",
         reliability_error(row), {True: "yes", False: "no", None: "not judged"}[row.within], row.basis)
        for row in rows
    ]  # fmt: skip
    print_table(
        ("source", "quantity", "GPUs", "published", "predicted", "error", "within", "basis"), cells,
        right=range(2, 6),
    )  # fmt: skip
    judged = [row for row in rows if row.judged]
    print_text(
        f"{sum(row.within is True for row in judged)} of {len(judged)} judged rows are within 30 % (times) "
        f"or 3 points (percentages); {sum(row.predicted is None for row in rows)} of {len(rows)} have no "
        "prediction, since inputs are not stated"
    )
    if stops:
        print_table(
            ("Llama 3, 16,384 H100, 54 days: rate of", "", "stops (published: 419)", "goodput (above 90 %)"),
            [(row.rate, row.kind, f"{row.stops:.0f}", percent(row.goodput)) for row in stops],
            right=range(2, 4),
        )


def reliability_error(row: ReliabilityRow) -> str:
    """Relative error, or points of a percentage."""
    if row.error is None:
        return ""
    return f"{row.error:+.1f} points" if row.unit.startswith("%") else f"{row.error:+.0%}"


def print_parts(as_json: bool) -> None:
    """Print predicted and traced time by class of every traced run, then the sums over runs."""
    with working("predicting the traced runs"):
        scored = list(score_all_parts())
    if as_json:
        print_json([one.model_dump() for one in scored])
        return
    for one in scored:
        shown = [row for row in one.rows if max(row.traced_ns, row.predicted_ns) > 0.01 * one.traced_s * 1e9]
        cells = [
            (row.part + ", ".join(("", row.kind)) * (row.kind != "compute"), f"{row.traced_ns / 1e6:.1f}",
             f"{row.predicted_ns / 1e6:.1f}", f"{row.difference_ns / 1e6:+.1f}",
             percent(row.error) if row.traced_ns else "")
            for row in shown
        ]  # fmt: skip
        print_text(f"{one.name}: {one.title}, {one.hardware}; parts above 1 % of the traced step, ms")
        print_table(("part", "traced", "predicted", "difference", ""), cells, right=range(1, 5))
    by_run = [
        (one.name, one.hardware, percent(one.step_error), percent(one.gap), f"{one.parts_gap:.1%}",
         f"{one.compute_gap:.1%}", ", ".join(row.part for row in one.far))
        for one in scored
    ]  # fmt: skip
    headers = ("run", "hardware", "step", "traced step", "parts, sum", "computing", "large and off")
    print_table(headers, by_run, right=range(2, 6))
    print_text(
        "step: error on the measured step; traced step: on the profiled one, whose host is slower; parts, "
        "sum: absolute differences of the parts over the traced step, median "
        f"{median_gap(scored):.1%}; computing: of computing parts alone; large and off: parts above "
        f"{LARGE:.0%} of the step that are off by more than {FAR:.0%}"
    )


def _dispatched(
    file: Path | None, workers: int
) -> tuple[tuple[dispatcher_rows.DispatcherRow, ...], list[ScoredDispatcherRow]]:
    rows = dispatcher_rows.dispatcher_rows(file)
    if workers == 1:
        return rows, [score_dispatcher_row(row) for row in rows]
    with worker_pool(workers) as pool:
        return rows, list(pool.map(score_dispatcher_row, rows))


TRAINED = (
    "family: one model, hardware, GPUs, sequence, batch and precision; regret: measured step of the plan "
    "that is predicted to be fastest, over that of the fastest"
)


def print_order(scores: Sequence[OrderScore], meaning: str = TRAINED) -> None:
    """Print how well plans are ordered, and the families in which the predicted best plan costs most."""
    if not scores:
        return
    cells = [
        (s.name, str(len(s.families)), f"{s.pairs_right} of {s.pairs}", f"{s.pairs_right / s.pairs:.0%}",
         str(s.pairs_tied), f"{s.pairs_right - s.tied_right} of {s.pairs - s.pairs_tied}",
         f"{s.best_picked} of {len(s.families)}", percent(s.regret_median), percent(s.regret_worst))
        for s in scores
    ]  # fmt: skip
    headers = ("order of plans", "families", "pairs right", "share", "called tied", "right of the rest",
               "best picked", "regret, median", "worst")  # fmt: skip
    print_table(headers, cells, right=range(1, 9))
    print_text(
        f"{meaning}; pair: two of its plans that were measured to differ by more than {APART:.0%}; called "
        "tied: pairs that the interval of their predicted difference does not tell apart; best picked: a "
        f"regret of at most {APART:.0%}"
    )
    worst = sorted((f for s in scores for f in s.families if f.regret > APART), key=lambda f: -f.regret)
    if worst:
        lines = [(f.name, f.picked, f.best, percent(f.regret)) for f in worst[:MOST_FAMILIES]]
        print_table(("family", "picked", "fastest", "regret"), lines, right=(3,))
    print_text("")


def print_gaps(ids: Sequence[str], as_json: bool, workers: int) -> None:
    """Print what the planner claims over tuned plans, and the share of each key that differs."""
    with working("searching around tuned plans"):
        gaps = list(expert_gaps(ids, workers))
    if as_json:
        print_json({"gaps": [gap.model_dump() for gap in gaps], **summary(gaps)})
        return
    for gap in gaps:
        print_text(f"\n{gap.id}: {gap.title}, {gap.trainer}; tuned by {gap.team}")
        if gap.gain is None:
            print_text(f"  not searched: {gap.refused}")
            continue
        band = "" if gap.behind is None else f" ({percent(gap.behind.p10)} to {percent(gap.behind.p90)})"
        print_text(f"  tuned   {gap.tuned}: {gap.tuned_s:.3f} s")
        print_text(f"  planner {gap.winner}: {gap.winner_s:.3f} s, gain {percent(gap.gain)}{band}")
        for share in gap.shares:
            print_text(f"    {share}")
        if gap.remark:
            print_text(f"  {gap.remark}")
    found = summary(gaps)
    if found["plans"]:
        print_text(
            f"\n{found['plans']} tuned plans: gain {percent(found['median'])} at the median, "
            f"{percent(found['worst'])} at most"
        )


def print_dispatched(rows: Sequence[ScoredDispatcherRow]) -> None:
    """Print measured steps by dispatcher beside predicted ones."""
    cells = [
        (r.id, f"{r.measured_s:.2f}", "" if r.predicted_s is None else f"{r.predicted_s:.2f}",
         r.refused or percent(r.relative_error or 0.0),
         "" if r.lower_bound_s is None else f"{r.lower_bound_s:.2f} to {r.upper_bound_s:.2f}")
        for r in rows
    ]  # fmt: skip
    print_table(
        ("step by dispatcher", "measured (s)", "predicted", "error", "bounds"), cells, right=(1, 2, 3)
    )
    errors = [abs(r.relative_error) for r in rows if r.relative_error is not None]
    if errors:
        print_text(f"median |error| {median(errors):.1%} over {len(errors)} rows")
    notes = Counter(note for row in rows for note in row.left_out)
    print_table(("rows", "stated and not expressed"), [(str(n), note) for note, n in notes.most_common()])
    print_text("")


def print_cases(cases: Sequence[ScoredCase]) -> None:
    """Print reported figures beside predicted ones, and how many are right."""
    lines = [
        (c.scenario, c.metric, c.reported, c.predicted,
         c.refused or ("" if c.relative_error is None else percent(c.relative_error)),
         {True: "right", False: "wrong", None: ""}[c.right])
        for c in cases
    ]  # fmt: skip
    print_table(("case", "figure", "reported", "predicted", "error", ""), lines, right=(4,))
    for name, wanted in (("verdicts on memory", True), (f"figures within {case_rows.NEAR:.0%}", False)):
        judged = [c.right for c in cases if c.right is not None and (c.metric == case_rows.VERDICT) == wanted]
        print_text(f"{name}: {sum(judged)} of {len(judged)}")
    for note in dict.fromkeys(case.own_rates for case in cases if case.own_rates):
        print_text(f"Note: {note}")


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
