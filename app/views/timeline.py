"""The page Timeline: every rank's actions over the step, what is inside one of them, the critical path."""

from __future__ import annotations

from bisect import bisect_right

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
FIRST = "timeline first"
"""Key of the session with the action that was open when the whole page was last drawn."""
LAST = "timeline last"
"""Key of the session with what the component said last."""


def show() -> None:
    """Draw the page."""
    scenario = state.current()
    result = state.result_of(scenario)
    headline.shortage(result)
    _perfetto(scenario)
    _exposed(result)  # above the timeline, which grows when an action is opened in it
    st.session_state[FIRST] = None
    _canvas(scenario)
    with st.expander("Bubble and exposed communication of every rank"):
        widgets.figure(
            charts.breakdown(result.breakdown_by_rank_s), "Seconds of a step by part and rank", "exposed"
        )


def _perfetto(scenario: Scenario) -> None:
    """Offer the trace at once; nothing below draws it again, so that no click is lost."""
    left, right = st.columns([3, 1], vertical_alignment="center")
    left.caption(
        "The first GPU of every pipeline rank; gaps are the bubble. F is forward, B backward, I and W its "
        "input- and weight-gradient halves, F&B an overlapped pair. Click an action to open it below."
    )
    with right:
        widgets.download(
            "Perfetto trace (.json.gz)",
            lambda: state.trace_of(scenario),
            exports.file_name(scenario.name, ".trace.json.gz"),
            "application/gzip",
            icon=":material/download:",
            help="The same events for ui.perfetto.dev, or for chrome://tracing offline",
            width="stretch",
        )


@st.fragment
def _canvas(scenario: Scenario) -> None:
    """Draw the timeline, and remember the opened action in the address.

    What the component gets stays the same while its visitor opens actions: it opens them by itself, and a
    change of one argument would send all bytes again.
    """
    step = _packed(scenario, 0)
    kept = st.session_state.get(FIRST)
    first: int = _opened(step) if kept is None else kept
    if not step.whole:
        rank = bisect_right(step.first_action, first) - 1
        step = _packed(scenario, rank)
        st.caption(
            "The step has more events than a browser pans smoothly: all actions are shown, and the phases "
            f"of pipeline rank {rank}. The trace has all of them."
        )
    st.session_state[FIRST] = first
    with st.container(key="timeline-canvas"):  # its style keeps the place until the frame has its height
        opened = canvas.draw(step, first, key="timeline canvas")
    if opened is None or opened == st.session_state.get(LAST):
        return  # nothing new: a page that was drawn again, or Back
    st.session_state[LAST] = opened
    chosen = opened.action
    forms.put(ACTION, None if chosen == step.opened else chosen)
    state.publish()
    if not step.whole and bisect_right(step.first_action, chosen) - 1 != rank:
        st.session_state[FIRST] = None
        st.rerun(scope="fragment")


def _opened(step: PackedStep) -> int:
    """The action that the address names, or the step's default."""
    found: int = forms.value(
        ACTION, step.opened, lambda value: type(value) is int and 0 <= value < step.first_action[-1]
    )
    return found


def _packed(scenario: Scenario, rank: int) -> PackedStep:
    key = f"timeline/{state.cache_key(scenario)}/{rank}"
    found: PackedStep = state.compute(
        key, "Running the step for its timeline", predictions.timeline, scenario, rank
    )
    return found


def _exposed(result: Result) -> None:
    """The ranks that wait most, by name: rank 0 is seldom the worst."""
    ranks = result.breakdown_by_rank_s
    waits, bubbles = ([getattr(r, name) for r in ranks] for name in ("exposed_communication", "bubble"))
    tiles = {
        "Longest wait for communication": waits,
        "Longest bubble": bubbles,
    }
    places = st.columns(4)
    for place, (label, values) in zip(places, tiles.items(), strict=False):
        most = max(values)
        with place, st.container(gap=None):
            st.metric(label, f"{most:.3f} s", help=f"of {result.step.time_s:.3f} s")
            st.caption(f"pipeline rank {values.index(most)}; the least {min(values):.3f} s")
    own = result.breakdown_s
    for place, label, value in (
        (places[2], "Overlapped pairs", own.forward_backward),
        (places[3], "Gradients and optimizer", own.optimizer),
    ):
        with place, st.container(gap=None):
            st.metric(label, f"{value:.3f} s", help=f"of {result.step.time_s:.3f} s")
            st.caption("pipeline rank 0")
