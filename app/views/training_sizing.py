"""The page Training sizing: how many GPUs, which and for how much, within a deadline and a budget."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, get_args

import streamlit as st

from moesim.app import forms, long_work, page_switch, predictions, state, widgets
from moesim.app.charts import run_cost as charts
from moesim.app.texts import escaped, money
from moesim.app.views.hardware import PAID
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.yaml_io import shipped_names
from moesim.simulator.planner.hardware import PAYMENTS
from moesim.simulator.planner.sized import (
    SIZED_HEADS,
    WINS,
    Curve,
    SizedPlan,
    Sizing,
    SizingSearch,
    bend_text,
    limits_text,
    listed_sizes,
    sized_cells,
    sized_text,
)
from moesim.simulator.scenario import load_scenario
from moesim.simulator.scenario.defaults import has_node

SEARCHES: dict[SizingSearch, str] = {"narrow": "quick", "own": "the scenario's plan", "whole": "every plan"}
CURVES = {"none": "no curve", "strong": "strong: same batch", "weak": "weak: same batch per GPU"}
FIGURES = {"step_time_s": "step (s)", "mfu": "MFU, causal (%)", "exposed": "exposed communication (%)"}
MOST_DAYS, MOST_USD = 36_500.0, 1e12
MOST_TEXT = 120


def show() -> None:
    """Draw the page."""
    scenario = state.current()
    st.markdown(
        f"{escaped(scenario.shape.name)} with the batch and tokens of this scenario: how many GPUs, which, "
        "and what they cost. Days and cost include the interruptions of the run."
    )
    options = _options()
    if options is None:
        return
    asked = f"{state.cache_key(scenario)}/{sorted(options.items())}"
    key = f"training sizing/{hashlib.sha256(asked.encode()).hexdigest()[:32]}"
    work = (predictions.sized, scenario, options)
    sizing: Sizing | None = long_work.long_work("training sizing", key, "Size the run", *work)
    if sizing is not None:
        _answer(sizing)


def _options() -> dict[str, Any] | None:
    """What is asked, as arguments of `moesim.size`; None where the sizes cannot be read, which is said."""
    first, second, third, fourth = st.columns([3, 3, 2, 2])
    known = [name for name in shipped_names("accelerators") if has_node(name)]
    accelerators = forms.some_of(
        first.multiselect, "Accelerators", "training_sizing.accelerators", known, key="run accelerators",
        placeholder="the scenario's cluster",
    )  # fmt: skip
    sizes = forms.text(
        second.text_input, "GPUs", "training_sizing.gpus", "", MOST_TEXT, key="run gpus",
        placeholder="automatic, or 512..4096:x2",
        help="Empty: sizes that double, and those next to the deadline. Or sizes as 512,768 or 512..4096:x2",
    )  # fmt: skip
    days = forms.number(
        third.number_input, "Deadline (days)", "training_sizing.days", 0.0, MOST_DAYS, 60.0, key="run days",
        help="0: none",
    )  # fmt: skip
    usd = forms.number(
        fourth.number_input, "Budget ($)", "training_sizing.usd", 0.0, MOST_USD, 0.0, key="run budget",
        help="0: none",
    )  # fmt: skip
    choices: tuple[tuple[str, str, dict[Any, str], str], ...] = (
        ("Look for", "objective", WINS, "cost"),
        ("Payment", "payment", {name: PAID[name] for name in PAYMENTS}, "as stated"),
        ("Search", "search", SEARCHES, "narrow"),
        ("Scaling curve", "curve", CURVES, "none"),
    )
    chosen = [
        forms.one_of(place.selectbox, label, f"training_sizing.{name}", list(names), default,
                     key=f"run {name}", format_func=names.__getitem__)
        for place, (label, name, names, default) in zip(st.columns(4), choices, strict=True)
    ]  # fmt: skip
    try:
        gpus = listed_sizes(sizes, "GPUs") if sizes.strip() else None
    except InputError as error:
        st.error(escaped(error), icon=":material/error:")
        return None
    return {
        "accelerators": tuple(accelerators),
        "gpus": gpus,
        "deadline_days": days or None,
        "budget_usd": usd or None,
        "objective": chosen[0],
        "payment": chosen[1],
        "search": chosen[2],
        "curve": chosen[3] if chosen[3] in get_args(Curve) else None,
    }


def _answer(sizing: Sizing) -> None:
    limits = limits_text(sizing.deadline_days, sizing.budget_usd)
    st.caption(escaped(f"{len(sizing.points)} legal sizes, {len(sizing.illegal)} illegal; limits: {limits}"))
    if sizing.winners:
        for place, (key, row) in zip(st.columns(len(sizing.winners)), sizing.winners.items(), strict=True):
            _tile(place, f"{WINS[key][0].upper()}{WINS[key][1:]}", row)
    if sizing.objective not in sizing.winners:
        st.warning(escaped(sizing.reason()), icon=":material/event_busy:")
    for side in sizing.sides:
        rows = [row for row in (side.misses, side.keeps) if row is not None]
        verbs = ["keeps" if row is side.keeps else "misses" for row in rows]
        told = [f"{sized_text(row)}, which {v} the {side.limit}" for row, v in zip(rows, verbs, strict=True)]
        st.caption(escaped("; ".join([*told, *([side.between] if side.between else [])])))
    if sizing.frontier:
        st.header("Cost against days", anchor=False)
        dots = [
            charts.SizeDot(row.accelerator, row.n_gpus, row.days, row.cost_usd, row in sizing.frontier)
            for row in sizing.points
            if row.cost_usd is not None
        ]
        chart = charts.size_frontier(dots, sizing.deadline_days, sizing.budget_usd)
        widgets.figure(chart, "Cost of the run against days, one point for each size", "size frontier")
    _curves(sizing)
    st.header("Sizes", anchor=False)
    _sizes(sizing.points)
    if sizing.illegal:
        with st.expander(f"{len(sizing.illegal)} sizes without a legal plan"):
            cells = [(row.size, row.accelerator, row.reason) for row in sizing.illegal]
            widgets.table(("GPUs", "accelerator", "reason"), cells, key="illegal sizes")
    for note in sizing.notes:
        st.caption(escaped(note))
    text_file, rows_ = io.StringIO(), sizing.rows()
    if rows_:
        writer = csv.DictWriter(text_file, list(rows_[0]))
        writer.writeheader()
        writer.writerows(rows_)
        widgets.download("Sizes (CSV)", text_file.getvalue().encode(), "sizes.csv", key="sizes csv")


def _tile(place: Any, title: str, row: SizedPlan) -> None:
    place.metric(title, f"{row.n_gpus:,} x {row.accelerator}")
    days, cost = row.band("days"), row.band("cost_usd")
    parts = [f"{row.days:.1f} days" + ("" if days is None else f" (80 %: {days.p10:.1f} to {days.p90:.1f})")]
    parts.append(money(row.cost_usd) + ("" if cost is None else f" ({money(cost.p10)} to {money(cost.p90)})"))
    place.caption(escaped(f"{'; '.join(parts)}; {row.plan}"))


def _curves(sizing: Sizing) -> None:
    """The scaling curves with their bends."""
    if not sizing.curves:
        return
    st.header("Scaling curve", anchor=False)
    figure = forms.one_of(
        st.segmented_control, "Shown", "training_sizing.figure", list(FIGURES), "step_time_s",
        key="run figure", format_func=FIGURES.__getitem__, label_visibility="collapsed",
    )  # fmt: skip
    figure = figure or "step_time_s"
    lines: dict[str, list[tuple[int, float]]] = {}
    for curve in sizing.curves:
        for point in curve.points:
            values = {
                "step_time_s": point.step_time_s,
                "mfu": 100.0 * (point.mfu_causal or 0.0),
                "exposed": 100.0 * curve.exposed(point),
            }
            lines.setdefault(curve.accelerator, []).append((point.n_gpus, values[figure]))
    ideal = {"strong": -1.0, "weak": 0.0}[sizing.curves[0].kind] if figure == "step_time_s" else None
    chart = charts.scaling(lines, FIGURES[figure], ideal)
    widgets.figure(chart, f"{FIGURES[figure]} against GPUs, simulated", "scaling curve")
    for curve in sizing.curves:
        for bend in curve.bends:
            st.caption(escaped(f"{curve.accelerator}, {bend_text(bend)}"))
        for row in curve.illegal:
            st.caption(escaped(f"not on the curve: {row.size} {row.accelerator}: {row.brief}"))


def _sizes(points: Sequence[SizedPlan]) -> None:
    """The table of all sizes; a chosen one can be adopted as the scenario."""
    if not points:
        return
    heads = [
        "accelerator" if head == "of" else f"{before}, {head}" if head == "80 %" else head
        for before, head in pairwise(("", *SIZED_HEADS))
    ]
    event = widgets.table(
        heads, [sized_cells(row) for row in points], key="all sizes", on_select="rerun",
        selection_mode="single-row",
    )  # fmt: skip
    picked = event["selection"]["rows"] if event else []
    row = points[picked[0]] if picked and picked[0] < len(points) else None
    if row is None:
        st.caption("Choose a row to open its plan.")
    elif st.button(
        f"Open {row.n_gpus:,} x {escaped(row.accelerator)} as the scenario", key="adopt size", type="primary"
    ):
        state.adopt(load_scenario(row))
        page_switch.go("result")
