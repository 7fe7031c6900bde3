"""The published training steps of the page Evidence: search, filters, and any row predicted now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import streamlit as st

import moesim
from moesim.app import exports, forms, runs_and_scores, widgets
from moesim.app.escaping import escaped
from moesim.app.number_text import plain
from moesim.simulator.scoring.scoreboard import OpenRow, ScoredRow, open_rows
from moesim.simulator.scoring.scoreboard.rows import publication_of, title_of

KINDS = {"dense": "dense", "moe": "MoE"}
MOST_WORDS = 100
"""Characters of a search."""
HEADER = ("measurement", "published step (s)", "plan", "precision", "sequences", "length", "source", "row")


def show() -> None:
    """Draw the table with its filters, and the row that was chosen beside its prediction."""
    rows = open_rows()
    left, middle, right = st.columns([3, 3, 2], vertical_alignment="bottom")
    words = left.text_input(
        "Search model, framework, source",
        max_chars=MOST_WORDS,
        **forms.text("evidence.words", "", MOST_WORDS, "step words"),
    )
    families = list(dict.fromkeys(row.family for row in rows))
    family = middle.pills(
        "Accelerator", families, selection_mode="multi", **forms.some_of("evidence.family", families)
    )
    kind = right.pills(
        "Model",
        list(KINDS),
        selection_mode="multi",
        format_func=KINDS.__getitem__,
        **forms.some_of("evidence.model", list(KINDS)),
    )
    shown = [row for row in rows if _wanted(row, words.lower().split(), family or families, kind or KINDS)]
    st.caption(f"{len(shown)} of {len(rows)} published measurements. Choose a row to predict it now.")
    cells = [_cells(row) for row in shown]
    event: Any = st.dataframe(
        {title: [row[number] for row in cells] for number, title in enumerate(HEADER)},
        width="stretch",
        hide_index=True,
        on_select="rerun",
        selection_mode="single-row",
        key=f"published steps {len(shown)} {words}",
    )
    chosen = event.selection.rows
    if chosen and chosen[0] < len(shown):
        _beside(shown[chosen[0]])
    st.download_button(
        "Table (CSV)",
        exports.csv_text(HEADER, cells),
        exports.file_name("published-steps", "csv"),
        "text/csv",
        key="download published steps",
        on_click="ignore",
    )


def _wanted(row: OpenRow, words: Sequence[str], families: Sequence[str], kinds: Sequence[str] | Any) -> bool:
    text = f"{title_of(row)} {row.source} {row.id} {row.group}".lower()
    return row.family in families and row.arch in kinds and all(word in text for word in words)


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
    found: ScoredRow | None = widgets.long_work(
        "published step", key, "Predict this row now", runs_and_scores.published_step, row.id
    )
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
        st.caption("Not expressed: " + "; ".join(escaped(text) for text in found.left_out) + ".")
