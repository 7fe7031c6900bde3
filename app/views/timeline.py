"""The page Timeline: every rank's actions over the step, what is inside one of them, the critical path."""

from __future__ import annotations

import streamlit as st

from moesim.app import exports, forms, predictions, state, widgets
from moesim.app.charts import step as charts
from moesim.app.components.timeline import canvas
from moesim.app.components.timeline.packing import PackedStep
from moesim.app.views import headline
from moesim.simulator.predict.result import Result
from moesim.simulator.scenario import Scenario

ACTION = "timeline.action"
"""Form field with the number of the opened action, counted over all pipeline ranks."""


def show() -> None:
    """Draw the page."""
    scenario = state.current()
    result = state.result_of(scenario)
    headline.shortage(result)
    _perfetto(scenario)
    _canvas(scenario)
    _exposed(result)


def _perfetto(scenario: Scenario) -> None:
    """Offer the trace at once; nothing below draws it again, so that no click is lost."""
    left, right = st.columns([3, 1], vertical_alignment="center")
    left.caption(
        "The first GPU of every pipeline rank; gaps are the bubble. F is forward, B backward, I and W its "
        "input- and weight-gradient halves, F&B an overlapped pair. Click an action to open it below."
    )
    right.download_button(
        "Perfetto trace (.json.gz)",
        lambda: state.trace_of(scenario),
        exports.file_name(scenario.name, ".trace.json.gz"),
        "application/gzip",
        on_click="ignore",
        icon=":material/download:",
        help="The same events for ui.perfetto.dev, or for chrome://tracing offline",
        width="stretch",
    )


@st.fragment
def _canvas(scenario: Scenario) -> None:
    """Draw the timeline, and remember the opened action in the address."""
    step = _packed(scenario, 0)
    opened: int = forms.value(
        ACTION, step.opened, lambda found: type(found) is int and 0 <= found < step.first_action[-1]
    )
    if not step.whole:
        rank = next(r for r, first in enumerate(step.first_action[1:]) if opened < first)
        step = _packed(scenario, rank)
        st.caption(
            "The step has more events than a browser pans smoothly: all actions are shown, and the phases "
            f"of pipeline rank {rank}. The trace has all of them."
        )
    chosen = canvas.draw(step, opened, key="timeline canvas")
    if chosen is not None and chosen != st.session_state.get("timeline chosen", opened):
        st.session_state["timeline chosen"] = chosen
        forms.put(ACTION, chosen)
        state.publish()
        if not step.whole:
            st.rerun(scope="fragment")


def _packed(scenario: Scenario, rank: int) -> PackedStep:
    key = f"timeline/{state.cache_key(scenario)}/{rank}"
    found: PackedStep = state.compute(
        key, "Running the step for its timeline", predictions.timeline, scenario, rank
    )
    return found


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
