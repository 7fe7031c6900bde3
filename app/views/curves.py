"""The page Curves: one figure against each input alone, with the present value marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from moesim.app import forms, page_switch, state, widgets
from moesim.app.charts import sweep as charts
from moesim.app.curve_points import CurveRun, curve_run
from moesim.app.texts import escaped, written
from moesim.app.views import headline
from moesim.simulator.studies.curves import CurveAxis, CurvePoint, axes, overrides_at

FIGURES = {
    "step_time_s": "Step time",
    "tokens_per_s_per_gpu": "Tokens/s/GPU",
    "mfu_causal": "MFU",
    "days": "Days",
    "cost_usd": "Cost",
}
UNITS = {"step_time_s": "step time (s)", "tokens_per_s_per_gpu": "tokens/s/GPU", "cost_usd": "cost ($)"}
POLL_S = 0.7
SPAN_LATER = "  \n:small[range follows]"
"""Holds the place of a range, so that no chart moves when it comes."""
COLUMNS = 3


def show() -> None:
    """Draw the page."""
    scenario = state.current()
    found = axes(scenario)
    left, right = st.columns([5, 2], vertical_alignment="center")
    names = list(FIGURES)
    figure = forms.one_of(
        left.segmented_control,
        "Figure",
        "curves.figure",
        names,
        names[0],
        key="curves figure",
        format_func=FIGURES.__getitem__,
        label_visibility="collapsed",
    )
    same = forms.switch(
        right.toggle,
        "One scale for all",
        "curves.same",
        key="curves same",
        help="All charts have the same y axis: what matters most is the steepest",
    )
    key = state.cache_key(scenario)
    run: CurveRun | None = st.session_state.get("curves")
    if run is None or run.key != key:
        if run is not None:
            run.stop()  # work for an earlier scenario is given up
        run = st.session_state["curves"] = curve_run(key, scenario, found)
    run.step()
    if run.done:
        (_still if run.whole else _widening)(run, found, figure or names[0], same)
    else:
        _growing(run, found, figure or names[0], same)


@page_switch.redrawn(POLL_S)
def _growing(run: CurveRun, axes: Sequence[CurveAxis], figure: str, same: bool) -> None:
    """Draw the curves while points are still computed."""
    run.step()
    if run.done:
        st.rerun(scope="app")
    st.caption(f":material/hourglass_top: {len(run.points)} of {run.total} points, the nearest ones first")
    _charts(run, axes, figure, same)


@page_switch.redrawn(3.0 * POLL_S)
def _widening(run: CurveRun, axes: Sequence[CurveAxis], figure: str, same: bool) -> None:
    """Draw the curves while the intervals of their points are still computed."""
    run.step()
    if run.whole:
        st.rerun(scope="app")
    _known(run, axes, figure, same)


@st.fragment
def _still(run: CurveRun, axes: Sequence[CurveAxis], figure: str, same: bool) -> None:
    """Draw the curves when everything is known."""
    _known(run, axes, figure, same)


def _known(run: CurveRun, axes: Sequence[CurveAxis], figure: str, same: bool) -> None:
    ready = "" if run.whole else f" ({len(run.bands) / run.total:.0%} are ready)"
    st.caption(
        ":material/diamond: the present value · open circles do not fit into memory · "
        f":material/close: illegal (hover for the reason) · bars: P10 to P90 of each point{ready}; the "
        "points of a curve share most of it. Choose a point to use its value."
    )
    _charts(run, axes, figure, same)
    _table(run, axes, figure)


def _charts(
    run: CurveRun,
    axes: Sequence[CurveAxis],
    figure: str,
    same: bool,
) -> None:
    ends = None
    values = [v for p in run.points.values() if p.status == "ok" and (v := p.figures.get(figure)) is not None]
    if same and values:  # the range of all values that fit, with a margin
        low, high = min(values), max(values)
        margin = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
        ends = low - margin, high + margin
    for first in range(0, len(axes), COLUMNS):
        row = axes[first : first + COLUMNS]
        for place, axis in zip(st.columns(COLUMNS, gap="medium"), row, strict=False):
            with place, st.container(key=f"curve of {axis.name}"):
                _one(run, axis, figure, ends)


def _one(
    run: CurveRun,
    axis: CurveAxis,
    figure: str,
    ends: tuple[float, float] | None,
) -> None:
    points = run.of(axis)
    st.markdown(f"**{escaped(axis.label)}** = {escaped(axis.words[axis.own])}{_span(points, axis, figure)}")
    marks = tuple(
        charts.Mark(
            place,
            axis.words[place],
            point.figures.get(figure),
            _words(point, figure),
            point.reason,
            point.status != "does not fit",
            _band(run, axis, place, figure),
        )
        for place, point in points.items()
    )
    spoken = "; ".join(f"{axis.words[n]}: {_words(point, figure)}" for n, point in points.items())
    event = widgets.figure(
        charts.curve(marks, axis.words, axis.own, _unit(run, figure), ends, axis.values),
        f"{FIGURES[figure]} against {axis.label}: {spoken}",
        f"curve {axis.name}",
        on_select="rerun",
        selection_mode="points",
    )
    picked = event["selection"]["points"] if event else []
    chosen = None
    if picked:
        chosen = min(range(len(axis.values)), key=lambda n: abs(axis.values[n] - picked[0]["x"]))
    if chosen is not None and chosen in points and chosen != axis.own:
        _offer(run, axis, points[chosen], axis.words[chosen])


def _band(run: CurveRun, axis: CurveAxis, place: int, figure: str) -> tuple[float, float] | None:
    """P10 and P90 of the figure at one value; None while they are unknown."""
    band = run.bands.get((axis.name, place), {}).get(figure)
    return None if band is None else (band.p10, band.p90)


def _unit(run: CurveRun, figure: str) -> str:
    """The title of the y axis; a cost says how it is paid."""
    paid = f", {headline.price_words(run.scenario)}" if figure == "cost_usd" else ""
    return f"{UNITS.get(figure, FIGURES[figure])}{paid}"


def _offer(run: CurveRun, axis: CurveAxis, point: CurvePoint, words: str, place: str = "chart") -> None:
    """The button that gives the scenario the value of a point; why not, where the value is illegal."""
    if point.status in ("illegal", "infeasible", "failed"):
        st.caption(f":material/block: {escaped(words)}: {escaped(point.reason)}")
        return
    if st.button(f"Use {escaped(words)}", key=f"use {place} {axis.name}", type="primary"):
        changed = run.scenario.overridden(*overrides_at(run.scenario, axis.name, point.value))
        state.adopt(changed, new=False)
        st.rerun(scope="app")  # the head of the page and the address too


def _span(points: Mapping[int, CurvePoint], axis: CurveAxis, figure: str) -> str:
    """How far the figure goes over the legal values that fit, against the present one."""
    now = points.get(axis.own)
    base = None if now is None else now.figures.get(figure)
    if not base:
        return SPAN_LATER
    values = [v for p in points.values() if p.status == "ok" and (v := p.figures.get(figure)) is not None]
    if len(values) < 2:
        return SPAN_LATER
    low, high = min(values) / base - 1.0, max(values) / base - 1.0
    return f"  \n:small[{low:+.1%} to {high:+.1%}]"


def _words(point: CurvePoint, figure: str) -> str:
    value = point.figures.get(figure)
    if value is not None:
        return written(figure, value)
    return "no price" if point.status in ("ok", "does not fit") else point.status


def _interval(run: CurveRun, axis: CurveAxis, place: int, figure: str) -> str:
    ends = _band(run, axis, place, figure)
    return "" if ends is None else " to ".join(written(figure, end) for end in ends)


def _table(run: CurveRun, axes: Sequence[CurveAxis], figure: str) -> None:
    """All points as a table, from which a value can be chosen by the keyboard too."""
    with st.expander("The same as a table"):
        listed = [(axis, place, point) for axis in axes for place, point in run.of(axis).items()]
        event: Any = st.dataframe(
            [
                {
                    "input": axis.label,
                    "value": axis.words[place],
                    FIGURES[figure]: _words(point, figure),
                    "P10 to P90": _interval(run, axis, place, figure),
                    "": "now" if place == axis.own else "" if point.status == "ok" else point.status,
                    "why": point.reason,
                }
                for axis, place, point in listed
            ],
            hide_index=True,
            key="curves table",
            on_select="rerun",
            selection_mode="single-row",
        )
        chosen = event["selection"]["rows"] if event else []
        if chosen and chosen[0] < len(listed):
            axis, place, point = listed[chosen[0]]
            if place != axis.own:
                _offer(run, axis, point, f"{axis.label} {axis.words[place]}", "table")
