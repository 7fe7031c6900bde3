"""The page Evidence: every published figure beside its prediction, and the source of every number."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import streamlit as st

import moesim
from moesim.app import exports, jobs, runs_and_scores, state, widgets
from moesim.app.charts import evidence as charts
from moesim.app.escaping import escaped
from moesim.hwmodels.units import format_quantity
from moesim.simulator.predict.result_parts import ProvenanceEntry
from moesim.simulator.scoring.published import Row
from moesim.simulator.scoring.published_collectives import TITLES, CollectiveRow, summarise

KEY = f"evidence/{moesim.__version__}"


def show() -> None:
    """Draw the page."""
    board, collectives, numbers = st.tabs(["Scoreboard", "Collectives", "Where every number comes from"])
    with numbers:
        widgets.guard(_numbers)
    with board:
        _scores(lambda found: _board(found.rows))
    with collectives:
        st.session_state["evidence shown"] = True
        found = jobs.cache.get(KEY)
        if found is None:
            st.info("The scoreboard is being computed, see the first tab.")
        else:
            _collectives(found.collectives)


# -- the scoreboards -----------------------------------------------------------------------------------


def _scores(draw: Callable[[runs_and_scores.Scoreboards], None]) -> None:
    """Draw the scoreboards, or compute them in a job of about twenty simulations (more than a minute)."""
    found = jobs.cache.get(KEY)
    if found is not None:
        draw(found)
        return
    stopped = st.session_state.get("evidence stopped", False)
    st.markdown(
        "Every figure is simulated now by this version, nothing is stored: three profiles, each with the "
        "home case, its variants and the whole run."
    )
    if stopped:
        st.button("Compute the scoreboard", type="primary", on_click=_start)
        return
    if "evidence job" not in st.session_state:
        _start()
    _wait()


def _start() -> None:
    st.session_state["evidence stopped"] = False
    st.session_state["evidence job"] = jobs.submit(
        KEY, runs_and_scores.evidence, lane="long", with_progress=True
    )


def _stop() -> None:
    job = st.session_state.pop("evidence job", None)
    if job is not None:
        job.cancel()
    st.session_state["evidence stopped"] = True


@st.fragment(run_every=1.0)
def _wait() -> None:
    """Show progress and a cancel button; redraw the rest of the page when the work is done."""
    job = st.session_state.get("evidence job")
    if job is None:
        return
    if not job.done:
        st.progress(job.progress.share or 0.0, f"Simulating: {escaped(job.progress.text)}")
        if st.button("Stop"):
            _stop()
            st.rerun(scope="app")
        return
    del st.session_state["evidence job"]
    try:
        job.result()
    except jobs.JobError as error:
        st.session_state["evidence stopped"] = True
        st.error(escaped(error), icon=":material/error:")
        return
    st.rerun()


def _board(rows: Sequence[Row]) -> None:
    profiles = sorted({row.id.partition("@")[2] or "stand-alone" for row in rows})
    left, right = st.columns([2, 1])
    profile = left.pills("Profile", profiles, selection_mode="multi", key="score profiles") or profiles
    hide = right.checkbox("Leave out what a profile was calibrated on", value=True, key="score calibrated")
    text = st.text_input("Filter by words", key="score words", max_chars=100).lower().split()
    shown = [
        row
        for row in rows
        if (row.id.partition("@")[2] or "stand-alone") in profile
        and not (hide and row.used_for_calibration)
        and all(word in f"{row.id} {row.quantity} {row.source}".lower() for word in text)
    ]
    st.caption(
        f"{len(shown)} of {len(rows)} figures, the largest errors first; {charts.MOST} at most are drawn."
        " All are in the table."
    )
    if shown:
        widgets.figure(charts.errors(shown), "Relative error of every prediction", key="errors")
    header = ("figure", "quantity", "unit", "published", "predicted", "error", "source")
    cells = [
        (r.id, r.quantity, r.unit, r.published, r.predicted, f"{r.relative_error:+.1%}", r.source)
        for r in sorted(shown, key=lambda row: -abs(row.relative_error))
    ]
    _table(header, cells, "scoreboard")


def _collectives(rows: Sequence[CollectiveRow]) -> None:
    st.dataframe(
        {
            "class": [TITLES[group.use] for group in summarise(rows)],
            "group": [group.group for group in summarise(rows)],
            "rows": [group.rows for group in summarise(rows)],
            "median |error|": [f"{group.median_absolute_error:.1%}" for group in summarise(rows)],
            "signed median": [f"{group.signed_median_error:+.1%}" for group in summarise(rows)],
            "worst": [f"{group.worst_error:+.1%} ({group.worst_row})" for group in summarise(rows)],
        },
        width="stretch",
        hide_index=True,
    )
    uses = list(dict.fromkeys(row.use for row in rows))
    wanted = st.pills("Class", uses, selection_mode="multi", key="collective uses") or uses
    shown = [row for row in rows if row.use in wanted]
    widgets.figure(charts.collectives(shown), "Predicted against measured times", key="collectives")
    header = ("row", "class", "group", "unit", "measured", "predicted", "error of the time", "how", "source")
    cells = [
        (r.id, r.use, r.group, r.unit, r.measured, r.predicted, f"{r.relative_error:+.1%}", r.how, r.source)
        for r in shown
    ]
    _table(header, cells, "collectives")


# -- provenance ----------------------------------------------------------------------------------------


def _numbers() -> None:
    result = state.result()
    if result is None:
        return
    st.markdown(
        f"What the prediction of **{escaped(result.scenario)}** stands on. "
        f"{escaped(result.confidence_reason)}"
    )
    entries = result.provenance
    kinds = sorted({entry.kind for entry in entries})
    wanted = st.pills("Kind of evidence", kinds, selection_mode="multi", key="number kinds") or kinds
    words = st.text_input("Filter by words", key="number words", max_chars=100).lower().split()
    shown = [
        entry
        for entry in entries
        if entry.kind in wanted
        and all(word in f"{entry.path} {entry.kind} {entry.source}".lower() for word in words)
    ]
    st.caption(f"{len(shown)} of {len(entries)} numbers.")
    header = ("number", "value", "kind", "source", "date")
    _table(header, [_cells(entry) for entry in shown], "provenance")
    st.subheader("Extrapolated, or without a measurement")
    st.markdown("\n".join(f"- {escaped(text)}" for text in result.extrapolated) or "Nothing.")


def _cells(entry: ProvenanceEntry) -> tuple[str, str, str, str, str]:
    value = "see source" if entry.value is None else format_quantity(entry.value, entry.unit)
    return entry.path, value, entry.kind, entry.source, entry.date


def _table(header: Sequence[str], rows: Sequence[Sequence[exports.Cell]], name: str) -> None:
    st.dataframe(
        {title: [row[number] for row in rows] for number, title in enumerate(header)},
        width="stretch",
        hide_index=True,
    )
    st.download_button(
        "Table (CSV)",
        exports.csv_text(header, rows),
        exports.file_name(name, "csv"),
        "text/csv",
        key=f"download {name}",
        on_click="ignore",
    )
