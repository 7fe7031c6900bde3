"""The answer of a sweep: its picture, its best point, and its points as a table that can be filtered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import streamlit as st

from moesim.app import exports, forms, state, widgets
from moesim.app.charts import sweep as charts
from moesim.app.escaping import escaped
from moesim.app.views import headline
from moesim.hwmodels.units import in_unit
from moesim.simulator.scenario import Scenario
from moesim.simulator.studies.survey import Survey
from moesim.simulator.studies.sweep import SweepPoint

FIGURES: dict[str, tuple[str, bool]] = {
    "step_time_s": ("step time (s)", False),
    "tokens_per_s_per_gpu": ("tokens/s/GPU", True),
    "mfu_causal": ("MFU, causal", True),
    "cost_usd": ("cost ($ M)", False),
    "days": ("days", False),
    "memory_bytes": ("memory (GiB)", False),
    "bubble_s": ("bubble (s)", False),
    "exposed_communication_s": ("exposed comm. (s)", False),
}
"""Figures that can be drawn, with their titles, and whether more is better."""
MILLION = 1e6
FORMATS = {
    "step_time_s": "%.3f",
    "tokens_per_s_per_gpu": "%.0f",
    "mfu_causal": "percent",
    "cost_usd": "%.2f",
    "days": "%.1f",
    "memory_bytes": "%.1f",
    "bubble_s": "%.3f",
    "exposed_communication_s": "%.3f",
}
"""Formats of the table's columns."""


def show(scenario: Scenario, found: Survey) -> None:
    """Draw the known points of a sweep."""
    names = [n for n in FIGURES if any(p.figures.get(n) is not None for p in found.points)]
    name = st.selectbox(
        "Figure",
        names,
        format_func=lambda n: FIGURES[n][0],
        **forms.one_of("sweep.figure", names, names[0], "sweep figure"),
    )
    best = _best(found.points, name)
    _picture(scenario, found, name, best)
    if best is not None:
        with st.container(horizontal=True, vertical_alignment="center"):
            st.markdown(f"Best: **{escaped(_text(best))}**, {_written(name, best)}")
            _offer(best, "best")
    elif found.points:
        st.warning("No point that is computed so far fits into memory.")
    _table(found.points)


def _best(points: Sequence[SweepPoint], name: str) -> SweepPoint | None:
    """The possible point with the best value of a figure, or None."""
    possible = [p for p in points if p.status == "ok" and p.figures.get(name) is not None]
    sign = -1.0 if FIGURES[name][1] else 1.0
    return min(possible, key=lambda p: sign * _number(p, name), default=None)


def _number(point: SweepPoint, name: str) -> float:
    """A figure in the unit of its title."""
    value = float(point.figures[name] or 0.0)
    if name == "cost_usd":
        return value / MILLION
    return in_unit(value, "GiB", "bytes") if name == "memory_bytes" else value


def _written(name: str, point: SweepPoint) -> str:
    if name == "memory_bytes":
        return f"{_number(point, name):.1f} GiB"
    return headline.written(name, float(point.figures[name] or 0.0))


def _picture(scenario: Scenario, found: Survey, name: str, best: SweepPoint | None) -> None:
    keys = list(dict.fromkeys(key for point in found.points for key in point.values))
    title = FIGURES[name][0]
    have = [p for p in found.points if p.figures.get(name) is not None]
    if len(keys) == 1:
        chart = charts.line(
            keys[0],
            title,
            [(_shown(p.values[keys[0]]), _number(p, name), p.status == "ok") for p in have],
            None if best is None else _shown(best.values[keys[0]]),
            _now(scenario, keys[0]),
        )
        widgets.figure(chart, f"{title} over {keys[0]}", key="sweep picture")
        return
    across, up, *rest = keys
    points = list(found.points)
    if rest:
        slices = list(dict.fromkeys(str(p.values[rest[0]]) for p in have))
        start = slices[0] if best is None else str(best.values[rest[0]])
        chosen = st.segmented_control(rest[0], slices, default=start, key=f"sweep slice {rest[0]}") or start
        points = [p for p in points if str(p.values[rest[0]]) == chosen]
        if best is not None and str(best.values[rest[0]]) != chosen:
            st.caption(f"The best point has {escaped(rest[0])} = {escaped(best.values[rest[0]])}.")
            best = None
    chart = charts.grid(
        (across, up),
        title,
        [
            (
                _shown(p.values[across]),
                _shown(p.values[up]),
                None if p.figures.get(name) is None else _number(p, name),
                p.status,
            )
            for p in points
        ],
        None if best is None else (_shown(best.values[across]), _shown(best.values[up])),
    )
    widgets.figure(chart, f"{title} over {across} and {up}", key="sweep picture")


def _shown(value: Any) -> charts.Value:
    return value if isinstance(value, str | int | float | bool) else str(value)


def _now(scenario: Scenario, key: str) -> charts.Value | None:
    """The scenario's own value of a key, or None where it has none that can be drawn."""
    value: Any = scenario
    for part in key.split("."):
        value = getattr(value, part, None)
    value = getattr(value, "value", value)
    return value if isinstance(value, str | int | float | bool) else None


def _text(point: SweepPoint) -> str:
    return ", ".join(f"{key} = {value}" for key, value in point.values.items())


def _offer(point: SweepPoint, name: str) -> None:
    st.button("Open as the scenario", key=f"open sweep {name}", on_click=_open, args=(point,), type="primary")


def _open(point: SweepPoint) -> None:
    for key, value in point.values.items():
        state.set_override(key, value)


def _table(points: Sequence[SweepPoint]) -> None:
    st.header("Points")
    kinds = list(dict.fromkeys(point.status for point in points))
    chosen = kinds
    if len(kinds) > 1:
        chosen = st.pills("Show", kinds, selection_mode="multi", key="sweep status") or kinds
    shown = [point for point in points if point.status in chosen]
    header = ["place", *dict.fromkeys(key for p in points for key in p.values), "status"]
    figures = [n for n in FIGURES if any(p.figures.get(n) is not None for p in points)]
    rows: list[list[exports.Cell]] = [
        [
            number,
            *(_shown(p.values.get(key, "")) for key in header[1:-1]),
            p.status,
            *(None if p.figures.get(n) is None else _number(p, n) for n in figures),
            p.reason,
        ]
        for number, p in enumerate(shown, start=1)
    ]
    titles = [*header, *(FIGURES[n][0] for n in figures), "reason"]
    event: Any = st.dataframe(
        {title: [row[n] for row in rows] for n, title in enumerate(titles)},
        hide_index=True,
        key="sweep table",
        on_select="rerun",
        selection_mode="single-row",
        column_config={FIGURES[n][0]: st.column_config.NumberColumn(format=FORMATS[n]) for n in figures},
    )
    picked = event["selection"]["rows"] if event else []
    if picked and picked[0] < len(shown):
        point = shown[picked[0]]
        with st.container(horizontal=True, vertical_alignment="center"):
            st.markdown(escaped(_text(point)))
            _offer(point, "row")
    else:
        st.caption("Choose a row to open its plan.")
    with st.container(horizontal=True):
        st.download_button(
            "Points (CSV)", exports.csv_text(titles, rows), "sweep.csv", "text/csv", on_click="ignore"
        )
        texts = [
            [v if n >= len(header) and n < len(titles) - 1 else str(v) for n, v in enumerate(row)]
            for row in rows
        ]
        parquet = exports.table_parquet(titles, texts)
        st.download_button(
            "Points (Parquet)",
            parquet or exports.NO_PARQUET,
            "sweep.parquet",
            "application/octet-stream",
            on_click="ignore",
        )
