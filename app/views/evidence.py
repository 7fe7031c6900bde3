"""The page Evidence: how far predictions are off, row by row, and the source of every number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import streamlit as st

import moesim
from moesim.app import exports, forms, pages, predictions, state, widgets
from moesim.app.charts import evidence as charts
from moesim.app.explanations import sources
from moesim.app.texts import escaped, plain
from moesim.app.views import headline
from moesim.hwmodels.units import format_quantity
from moesim.simulator.common.texts import overridden_key
from moesim.simulator.predict.result_parts import ProvenanceEntry
from moesim.simulator.scoring.published import Row
from moesim.simulator.scoring.published_collectives import TITLES, CollectiveRow, summarise
from moesim.simulator.scoring.scoreboard import OpenRow, ScoredRow, open_rows
from moesim.simulator.scoring.scoreboard.rows import kept_board, publication_of, title_of

# -- published steps ---------------------------------------------------------------------------------
# The published training steps of the page Evidence: search, filters, and any row predicted now.

KINDS = {"dense": "dense", "moe": "MoE"}
MOST_WORDS = 100
"""Characters of a search."""
HEADER = ("measurement", "published step (s)", "plan", "precision", "sequences", "length", "source", "row")


def show_published_steps() -> None:
    """Draw the table with its filters, and the row that was chosen beside its prediction."""
    rows = open_rows()
    left, middle, right = st.columns([3, 3, 2], vertical_alignment="bottom")
    label = "Search model, framework, source"
    words = forms.text(left.text_input, label, "evidence.words", "", MOST_WORDS, key="step words").lower()
    families = list(dict.fromkeys(row.family for row in rows))
    more: dict[str, Any] = {"selection_mode": "multi"}
    family = forms.some_of(middle.pills, "Accelerator", "evidence.family", families, **more) or families
    more["format_func"] = KINDS.__getitem__
    kind = forms.some_of(right.pills, "Model", "evidence.model", list(KINDS), **more) or list(KINDS)
    shown = [
        row
        for row in rows
        if row.family in family
        and row.arch in kind
        and _has(f"{title_of(row)} {row.source} {row.id} {row.group}", words)
    ]
    st.caption(f"{len(shown)} of {len(rows)} published measurements. Choose a row to predict it now.")
    cells = [_cells(row) for row in shown]
    key = f"published steps {len(shown)} {words}"
    event = widgets.table(HEADER, cells, key=key, on_select="rerun", selection_mode="single-row")
    chosen = event.selection.rows
    if chosen and chosen[0] < len(shown):
        _beside(shown[chosen[0]])
    _csv(HEADER, cells, "published-steps", "published steps")


def _has(text: str, words: str) -> bool:
    """Whether a text holds every word of a search in small letters."""
    return all(word in text.lower() for word in words.split())


def _cells(row: OpenRow) -> tuple[exports.Cell, ...]:
    step_s = row.published_step_s
    degrees = (("TP", row.tp), ("PP", row.pp), ("VPP", row.vpp), ("CP", row.cp), ("EP", row.ep))
    plan = " ".join(f"{name}{number}" for name, number in degrees if number > 1)
    return (
        title_of(row),
        None if step_s is None else plain(step_s, 4),
        plan or "data parallel",
        row.precision,
        row.gbs_seqs or None,
        row.seq or None,
        publication_of(row),
        row.id,
    )


def _beside(row: OpenRow) -> None:
    """Predict one row now, and show the prediction, its interval and its error."""
    st.header(escaped(title_of(row)), anchor=False)
    st.caption(escaped(f"{row.id}: {row.source}. {row.notes}"))
    key = f"published step/{moesim.__version__}/{row.id}"
    work = (predictions.published_step, row.id)
    found: ScoredRow | None = widgets.long_work("published step", key, "Predict this row now", *work)
    if found is None:
        return
    if found.refused or found.predicted_step_s is None or found.relative_error is None:
        st.info(f"Not predicted: {escaped(found.refused)}")
        return
    left, middle, right = st.columns(3)
    left.metric("Published step", f"{found.published_step_s:.3f} s")
    middle.metric("Predicted step", f"{found.predicted_step_s:.3f} s")
    right.metric("Error", f"{found.relative_error:+.1%}")
    if found.interval_s is not None:
        low, high = found.interval_s
        inside = found.published_step_s is not None and low <= found.published_step_s <= high
        st.caption(
            f"P10 to P90: {low:.3f} s to {high:.3f} s; the published step is "
            f"{'inside' if inside else 'outside'}."
        )
    if found.left_out:
        st.caption("The prediction leaves out: " + "; ".join(escaped(text) for text in found.left_out) + ".")


KEY = f"evidence/{moesim.__version__}"

PARTS: Mapping[str, str] = {
    "steps": "Published steps",
    "home": "Home case",
    "collectives": "Collectives",
    "numbers": "Numbers of this scenario",
}
SETS = [
    f"{name}, complete" for name in ("all rows", "Hopper", "Hopper, MoE", "Blackwell", "A100", "dense", "MoE")
]
"""Sets of published steps whose medians are drawn."""


def show() -> None:
    """Draw the page."""
    _headline()
    names = list(PARTS)
    show: dict[str, Any] = {"format_func": PARTS.__getitem__, "key": "evidence part"}
    chosen = forms.one_of(st.segmented_control, "Rows of", "evidence.part", names, names[0], **show)
    if chosen == "home":
        _scores(lambda found: _board(found.rows))
    elif chosen == "collectives":
        _scores(lambda found: _collectives(found.collectives))
    elif chosen == "numbers":
        widgets.guard(_numbers)
    else:
        show_published_steps()


# -- the headline --------------------------------------------------------------------------------------


def _headline() -> None:
    """How far off, in four figures; the home case is predicted now, the medians are the committed ones."""
    board = kept_board()
    every, hopper = board.named("all rows, complete"), board.named("Hopper, complete")
    moe = board.named("Hopper, MoE, complete")
    # Before anything is drawn, so that nothing moves when it comes.
    scenario = moesim.load(pages.HOME)
    published = moesim.published(scenario, state.result_of(scenario))
    row = next(row for row in published if headline.FIGURES.get(row.quantity) == "step_time_s")
    home, steps, experts, covered = st.container(key="tiles-evidence").columns(4)
    with home, st.container(gap=None):
        st.metric("Home case, time per step", f"{row.relative_error:+.1%}")
        st.caption(f"{row.predicted:.3f} s, published {row.published:.3f} s (2,048 H800)")
    for place, label, value, words in (
        (
            steps,
            "Median error, published steps",
            f"{every.median_absolute_error:.1%}",
            f"of {every.rows} steps; Hopper {hopper.median_absolute_error:.1%} of {hopper.rows}",
        ),
        (
            experts,
            "Median error, MoE on Hopper",
            f"{moe.median_absolute_error:.1%}",
            f"of {moe.rows} steps; signed {moe.median_error:+.1%}",
        ),
        (
            covered,
            "Inside the 80 % interval",
            f"{every.covered:.0%}",
            f"of {every.rows} steps; the aim is 70 to 90 %",
        ),
    ):
        with place, st.container(gap=None):
            st.metric(label, value)
            st.caption(words)
    widgets.numbers_first()
    st.caption(
        f"The home case is predicted now. Medians and coverage come from the table of {board.computed} "
        f"(moesim {board.version}, docs/validation.md), as all rows take minutes to compute. No constant "
        "was fitted to any of these steps. In brackets: the number of steps."
    )
    left, right = st.columns([3, 2], gap="large")
    sets = [board.named(name) for name in SETS]
    with left:
        widgets.figure(charts.medians(sets), "Median absolute error by set of published steps", "medians")
    with right:
        widgets.figure(charts.coverage(sets), "Share inside the 80 % interval by set", "coverage")


# -- the scoreboards -----------------------------------------------------------------------------------


def _scores(draw: Callable[[predictions.Scoreboards], None]) -> None:
    """Draw the scoreboards, or offer to compute them in a job of about twenty simulations."""
    st.markdown(
        "Every figure is simulated now by this version: three profiles, each with the home case, its "
        "variants and the whole run, in a minute or more."
    )
    found: Any = widgets.long_work("evidence", KEY, "Compute the scoreboard", predictions.evidence)
    if found is not None:
        draw(found)


def _board(rows: Sequence[Row]) -> None:
    profiles = sorted({row.id.partition("@")[2] or "stand-alone" for row in rows})
    left, right = st.columns([2, 1], vertical_alignment="bottom")
    profile = left.pills("Profile", profiles, selection_mode="multi", key="score profiles") or profiles
    hide = right.checkbox("Leave out what a profile was calibrated on", value=True, key="score calibrated")
    text = st.text_input("Search", key="score words", max_chars=MOST_WORDS).lower()
    shown = [
        row
        for row in rows
        if (row.id.partition("@")[2] or "stand-alone") in profile
        and not (hide and row.used_for_calibration)
        and _has(f"{row.id} {row.quantity} {row.source}", text)
    ]
    st.caption(
        f"{len(shown)} of {len(rows)} figures, the largest errors first; {charts.MOST} at most are drawn."
        " All are in the table."
    )
    if shown:
        widgets.figure(charts.errors(shown), "Relative error of every prediction", key="errors")
    names = charts.readable(rows)
    header = ("figure", "unit", "published", "predicted", "error", "source", "row")
    cells = [
        (
            names[r.id],
            "" if r.unit == "1" else r.unit,
            plain(r.published, 4),
            plain(r.predicted, 4),
            f"{r.relative_error:+.1%}",
            r.source,
            r.id,
        )
        for r in sorted(shown, key=lambda row: -abs(row.relative_error))
    ]
    _table(header, cells, "scoreboard")


def _collectives(rows: Sequence[CollectiveRow]) -> None:
    groups = summarise(rows)
    st.dataframe(
        {
            "class": [TITLES[group.use] for group in groups],
            "group": [group.group for group in groups],
            "rows": [group.rows for group in groups],
            "median absolute error": [f"{group.median_absolute_error:.1%}" for group in groups],
            "median signed error": [f"{group.signed_median_error:+.1%}" for group in groups],
            "worst": [f"{group.worst_error:+.1%} ({group.worst_row})" for group in groups],
        },
        width="stretch",
        hide_index=True,
    )
    uses = list(dict.fromkeys(row.use for row in rows))
    wanted = st.pills("Class", uses, selection_mode="multi", key="collective uses") or uses
    shown = [row for row in rows if row.use in wanted]
    widgets.figure(charts.collectives(shown), "Predicted against measured times", key="collectives")
    header = ("row", "class", "group", "measured", "predicted", "error of the time", "how", "source")
    cells = [
        (
            r.id,
            r.use,
            r.group,
            _quantity(r.measured, r.unit),
            _quantity(r.predicted, r.unit),
            f"{r.relative_error:+.1%}",
            r.how,
            r.source,
        )
        for r in shown
    ]
    _table(header, cells, "collectives")


def _quantity(value: float, unit: str) -> str:
    return format_quantity(value, "s") if unit == "s" else f"{plain(value, 4)} {unit}"


# -- provenance ----------------------------------------------------------------------------------------


def _numbers() -> None:
    scenario = state.current()
    result = state.result_of(scenario)
    st.markdown(
        f"What the prediction of **{escaped(result.scenario)}** stands on. "
        f"{escaped(result.confidence_reason)}"
    )
    entries = sources(scenario, result, [overridden_key(text) for text in state.overrides()])
    left, right = st.columns([2, 3], vertical_alignment="bottom")
    words = forms.text(left.text_input, "Search", "evidence.find", "", MOST_WORDS, key="number words").lower()
    kinds = sorted({entry.kind for entry in entries})
    wanted = right.pills("Kind of evidence", kinds, selection_mode="multi", key="number kinds") or kinds
    shown = [
        entry
        for entry in entries
        if entry.kind in wanted and _has(f"{entry.path} {entry.kind} {entry.source}", words)
    ]
    st.caption(f"{len(shown)} of {len(entries)} numbers.")
    header = ("number", "value", "kind", "source", "date")
    _table(header, [_evidence_cells(entry) for entry in shown], "provenance")
    st.header("Extrapolated, or without a measurement")
    st.markdown("\n".join(f"- {escaped(text)}" for text in result.extrapolated) or "Nothing.")


def _evidence_cells(entry: ProvenanceEntry) -> tuple[str, str, str, str, str]:
    if entry.value is None:
        value = "see source"
    elif entry.unit in ("count", "layers"):
        value = f"{entry.value:,.0f}{' layers' if entry.unit == 'layers' else ''}"
    else:
        value = format_quantity(entry.value, entry.unit)
    return entry.path, value, entry.kind, entry.source, entry.date


def _table(header: Sequence[str], rows: Sequence[Sequence[exports.Cell]], name: str) -> None:
    widgets.table(header, rows)
    _csv(header, rows, name, name)


def _csv(header: Sequence[str], rows: Sequence[Sequence[exports.Cell]], name: str, key: str) -> None:
    text = exports.csv_text(header, rows)
    widgets.download("Table (CSV)", text, exports.file_name(name, "csv"), key=f"download {key}")
