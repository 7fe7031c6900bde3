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
from moesim.simulator.predict.work_size import Band
from moesim.simulator.scenario import Scenario
from moesim.simulator.studies.compare import bands_of_draws
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
COLUMNS = 3


def show() -> None:
    """Draw the page."""
    scenario = state.current()
    found = axes(scenario)
    left, right = st.columns([5, 2], vertical_alignment="center")
    with left:
        names = list(FIGURES)
        figure = st.segmented_control(
            "Figure",
            names,
            format_func=FIGURES.__getitem__,
            label_visibility="collapsed",
            **forms.one_of("curves.figure", names, names[0], "curves figure"),
        )
    with right:
        same = st.toggle(
            "One scale for all",
            help="All charts have the same y axis: what matters most is the steepest",
            **forms.one_of("curves.same", [False, True], False, "curves same"),
        )
    run = _run(scenario, found)
    run.step()
    if run.done:
        _still(run, found, figure or names[0], same)
    else:
        _growing(run, found, figure or names[0], same)


def _run(scenario: Scenario, found: Sequence[CurveAxis]) -> CurveRun:
    """The curves of this scenario in this session; work for an earlier scenario is given up."""
    key = state.cache_key(scenario)
    run: CurveRun | None = st.session_state.get("curves")
    if run is None or run.key != key:
        if run is not None:
            run.stop()
        run = st.session_state["curves"] = curve_run(key, scenario, found)
    return run


@page_switch.redrawn(POLL_S)
def _growing(run: CurveRun, found: Sequence[CurveAxis], figure: str, same: bool) -> None:
    """Draw the curves while points are still computed."""
    run.step()
    if run.done:
        st.rerun(scope="app")
    st.caption(f":material/hourglass_top: {len(run.points)} of {run.total} points, the nearest ones first")
    _charts(run, found, figure, same, None)


@st.fragment
def _still(run: CurveRun, found: Sequence[CurveAxis], figure: str, same: bool) -> None:
    """Draw the curves when all points are known."""
    band = _band(run, figure)
    told = "" if band is None else f"; the bar at the present value is {headline.interval(figure, band)}"
    st.caption(
        ":material/diamond: the present value · open circles do not fit into memory · "
        f":material/close: illegal, the pointer says why{told}. Choose a point to use its value."
    )
    _charts(run, found, figure, same, None if band is None else (band.p10, band.p90))
    _table(run, found, figure)


def _band(run: CurveRun, figure: str) -> Band | None:
    """The interval of the figure of the scenario as it is; None while it is computed."""
    draws = headline.draws("curves", [run.scenario])
    if draws is None:
        return None
    return bands_of_draws(state.result_of(run.scenario), draws[0]).get(figure)


def _charts(
    run: CurveRun,
    found: Sequence[CurveAxis],
    figure: str,
    same: bool,
    band: tuple[float, float] | None,
) -> None:
    ends = _common_ends(run, figure) if same else None
    for first in range(0, len(found), COLUMNS):
        row = found[first : first + COLUMNS]
        for place, axis in zip(st.columns(COLUMNS, gap="medium"), row, strict=False):
            with place, st.container(key=f"curve of {axis.name}"):
                _one(run, axis, figure, ends, band)


def _one(
    run: CurveRun,
    axis: CurveAxis,
    figure: str,
    ends: tuple[float, float] | None,
    band: tuple[float, float] | None,
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
        )
        for place, point in points.items()
    )
    event = widgets.figure(
        charts.curve(marks, axis.words, axis.own, UNITS.get(figure, FIGURES[figure]), ends, band),
        f"{FIGURES[figure]} against {axis.label}: {_spoken(points, axis, figure)}",
        f"curve {axis.name}",
        on_select="rerun",
        selection_mode="points",
    )
    chosen = _chosen(event)
    if chosen is not None and chosen in points and chosen != axis.own:
        _offer(run, axis, points[chosen], axis.words[chosen])


def _chosen(event: Any) -> int | None:
    picked = event["selection"]["points"] if event else []
    return round(picked[0]["x"]) if picked else None


def _offer(run: CurveRun, axis: CurveAxis, point: CurvePoint, words: str, place: str = "chart") -> None:
    """The button that gives the scenario the value of a point; why not, where the value is illegal."""
    if point.status in ("illegal", "infeasible", "failed"):
        st.caption(f":material/block: {escaped(words)}: {escaped(point.reason)}")
        return
    if st.button(f"Use {escaped(words)}", key=f"use {place} {axis.name}", type="primary"):
        _use(run.scenario, axis, point.value)
        st.rerun(scope="app")  # the head of the page and the address too


def _use(scenario: Scenario, axis: CurveAxis, value: float) -> None:
    """Make a value the scenario's."""
    state.adopt(scenario.overridden(*overrides_at(scenario, axis.name, value)), new=False)


def _span(points: Mapping[int, CurvePoint], axis: CurveAxis, figure: str) -> str:
    """How far the figure goes over the legal values that fit, against the present one."""
    now = points.get(axis.own)
    base = None if now is None else now.figures.get(figure)
    if not base:
        return ""
    values = [v for p in points.values() if p.status == "ok" and (v := p.figures.get(figure)) is not None]
    if len(values) < 2:
        return ""
    low, high = min(values) / base - 1.0, max(values) / base - 1.0
    return f"  \n:small[{low:+.1%} to {high:+.1%}]"


def _words(point: CurvePoint, figure: str) -> str:
    value = point.figures.get(figure)
    if value is not None:
        return written(figure, value)
    return "no price" if point.status in ("ok", "does not fit") else point.status


def _spoken(points: Mapping[int, CurvePoint], axis: CurveAxis, figure: str) -> str:
    """The curve in words, for screen readers."""
    return "; ".join(f"{axis.words[n]}: {_words(point, figure)}" for n, point in points.items())


def _common_ends(run: CurveRun, figure: str) -> tuple[float, float] | None:
    """The range of all values that fit, with a margin."""
    values = [v for p in run.points.values() if p.status == "ok" and (v := p.figures.get(figure)) is not None]
    if not values:
        return None
    low, high = min(values), max(values)
    margin = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
    return low - margin, high + margin


def _table(run: CurveRun, found: Sequence[CurveAxis], figure: str) -> None:
    """All points as a table, from which a value can be chosen by the keyboard too."""
    with st.expander("The same as a table"):
        listed = [(axis, place, point) for axis in found for place, point in run.of(axis).items()]
        event: Any = st.dataframe(
            [
                {
                    "input": axis.label,
                    "value": axis.words[place],
                    FIGURES[figure]: _words(point, figure),
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
