"""The page Timeline: the actions of every pipeline rank over the step, and the phases inside one action."""

from __future__ import annotations

from typing import Any

import streamlit as st

from moesim.app import exports, forms, predictions, state, widgets
from moesim.app.charts import gantt
from moesim.app.charts import step as charts
from moesim.app.views import headline
from moesim.simulator.predict.result import Result
from moesim.simulator.scenario import Scenario

RANK = "timeline.rank"
"""Form field with the pipeline rank that is shown in detail."""


def show() -> None:
    """Draw the page."""
    scenario = state.current()
    result = state.result_of(scenario)
    headline.shortage(result)
    ranks = len(result.breakdown_by_rank_s)
    rank: int = forms.value(RANK, 0, lambda found: type(found) is int and 0 <= found < ranks)
    key = f"timeline/{state.cache_key(scenario)}/{rank}"
    found = state.compute(key, "Running the step for its timeline", predictions.timeline, scenario, rank)
    _pipeline(found)
    _exposed(result)
    _zoom(found, ranks)
    _perfetto(scenario)


def _pipeline(found: Any) -> None:
    st.subheader("Pipeline")
    begin, end = st.slider(
        "Window of the step (s)",
        0.0,
        found.step_s,
        (0.0, found.step_s),
        step=found.step_s / 200,
        format="%.2f",
        key="timeline window",
        help="The first GPU of every pipeline rank; gaps are the bubble",
    )
    bars, left_out = gantt.window(found.actions, begin, end)
    widgets.figure(
        gantt.gantt(bars, [str(rank) for rank in range(found.ranks)], "pipeline rank", begin, end),
        "Gantt chart: schedule actions of every pipeline rank over the step",
        "pipeline",
    )
    st.caption(
        "F is forward, B backward, I and W its input- and weight-gradient halves, F&B an overlapped pair; "
        "gaps are the bubble."
    )
    if left_out:
        st.caption(f"{left_out:,} of the shortest bars are left out: narrow the window, or open the trace.")


def _exposed(result: Result) -> None:
    own, step_s = result.breakdown_s, result.step.time_s
    columns = st.columns(4)
    for place, (label, value) in zip(
        columns,
        (
            ("Bubble of rank 0", own.bubble),
            ("Waiting for communication, rank 0", own.exposed_communication),
            ("Overlapped pairs of rank 0", own.forward_backward),
            ("Gradients and optimizer", own.optimizer),
        ),
        strict=True,
    ):
        place.metric(label, f"{value:.3f} s", help=f"of {step_s:.3f} s")
    with st.expander("Bubble and exposed communication of every rank"):
        widgets.figure(
            charts.breakdown(result.breakdown_by_rank_s), "Seconds of a step by part and rank", "exposed"
        )


def _zoom(found: Any, ranks: int) -> None:
    st.subheader("Inside one action")
    if ranks > 1:
        st.slider("Pipeline rank", 0, ranks - 1, **forms.number(RANK, 0, ranks - 1, 0, "zoom rank"))
    if not found.zoomed:
        st.info("This rank runs nothing.")
        return
    begin = min(bar.start_s for bar in found.zoomed)
    end = max(bar.end_s for bar in found.zoomed)
    rows = list(dict.fromkeys(bar.row for bar in found.zoomed))
    widgets.figure(
        gantt.gantt(found.zoomed, rows, "stream", begin, end),
        "Phases of one action on the compute and communication streams",
        "zoomed",
    )
    st.caption(
        f"An action from the middle of the step on pipeline rank {found.zoomed_rank}: compute SMs above, "
        "communication SMs below. Gaps on the compute stream are exposed communication."
    )


def _perfetto(scenario: Scenario) -> None:
    st.subheader("All of it")
    st.markdown(
        "The whole step as a trace: open the file at ui.perfetto.dev, or in chrome://tracing offline."
    )
    st.download_button(
        "Perfetto trace (.json.gz)",
        lambda: state.trace_of(scenario),
        exports.file_name(scenario.name, ".trace.json.gz"),
        "application/gzip",
        on_click="ignore",
        icon=":material/download:",
    )
