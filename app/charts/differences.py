"""Charts of differences: waterfall between two scenarios, tornado of one, Pareto front of many plans."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from moesim.app.charts.step import words
from moesim.app.charts.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    RED,
    SERIES,
    add_points,
    bars,
    styled,
    whiskers,
)


def waterfall(
    first: str,
    first_s: float,
    changes: Sequence[tuple[str, float]],
    other: str,
    other_s: float,
    most: int = 9,
    sure: bool = True,
) -> go.Figure:
    """Waterfall from one step time to another, cause by cause; `changes` in seconds.

    Small causes are summed into one bar, and causes too small for any shown digit are left out. `sure` says
    whether the difference exceeds its own uncertainty; otherwise its causes are grey.
    """
    ordered = sorted(changes, key=lambda change: -abs(change[1]))
    largest = abs(ordered[0][1]) if ordered else 0.0
    # Decimal places that show two digits of the largest change.
    digits = 2 if largest <= 0.0 else min(6, max(2, 1 - math.floor(math.log10(largest))))
    visible = 0.5 * 10.0**-digits
    shown = [change for change in ordered[:most] if abs(change[1]) >= visible]
    rest = sum(seconds for _, seconds in ordered[len(shown) :])
    if abs(rest) >= visible:
        shown.append(("the rest", rest))
    longer, shorter = (RED, GREEN) if sure else (GREY, GREY)
    chart = go.Figure(
        go.Waterfall(
            x=[first, *(words(name) for name, _ in shown), other],
            y=[first_s, *(seconds for _, seconds in shown), other_s],
            measure=["absolute", *("relative" for _ in shown), "absolute"],
            text=[
                f"{first_s:.{digits}f}",
                *(f"{seconds:+.{digits}f}" for _, seconds in shown),
                f"{other_s:.{digits}f}",
            ],
            textposition="outside",
            increasing={"marker": {"color": longer}},
            decreasing={"marker": {"color": shorter}},
            totals={"marker": {"color": BLUE}},
            connector={"line": {"color": GREY, "width": 1}},
            hovertemplate="%{x}: %{text} s<extra></extra>",
        )
    )
    values = [first_s, other_s]
    chart.update_yaxes(
        title="step time (s), axis not from zero", range=[0.9 * min(values), 1.06 * max(values)]
    )
    if any(abs(seconds) > 0.1 * min(values) for _, seconds in shown):
        chart.update_yaxes(title="step time (s)", range=None, rangemode="tozero")
    chart.update_xaxes(title="cause of the difference", tickangle=-30)
    return styled(chart, 420)


def tornado(rows: Sequence[tuple[str, str, float, float]], now_s: float, most: int = 12) -> go.Figure:
    """Step time with each uncertain source alone at its low and high end.

    A row is (source, its two ends in words, step time at the low end in s, at the high end in s).
    """
    shown = sorted(rows, key=lambda row: abs(row[3] - row[2]))[-most:]
    chart = go.Figure()
    for name, place, colour in (("low end", 2, ORANGE), ("high end", 3, BLUE)):
        chart.add_bar(
            name=name,
            orientation="h",
            base=now_s,
            x=[row[place] - now_s for row in shown],  # type: ignore[operator]
            y=[row[0] for row in shown],
            customdata=[[row[1], row[place]] for row in shown],
            marker_color=colour,
            hovertemplate="%{y} (%{customdata[0]}): %{customdata[1]:.3f} s<extra></extra>",
        )
    chart.add_vline(x=now_s, line={"color": GREY, "dash": "dash"})
    chart.update_layout(barmode="overlay")
    chart.update_xaxes(title="step time (s)")
    return styled(chart, 120 + 26 * max(4, len(shown)))


def side_by_side(
    names: Sequence[str],
    values: Sequence[float],
    label: str,
    intervals: Sequence[tuple[float, float]] | None = None,
) -> go.Figure:
    """Bars of one figure for several scenarios, the first on top; `intervals` holds P10 and P90 of each."""
    texts = [f"{value:.3f}" for value in values]
    more = {"textposition": "inside", "insidetextanchor": "start"}
    chart = bars(names, values, texts, "%{y}: %{x:.3f}<extra></extra>", SERIES[: len(names)], **more)
    if intervals is not None:
        low, high = zip(*intervals[::-1], strict=True)
        chart.update_traces(error_x=whiskers(low, values[::-1], high, INK))
        label = f"{label}, whiskers P10 to P90"
    chart.update_xaxes(title=label, rangemode="tozero")
    chart.update_yaxes(title="scenario")
    return styled(chart, 80 + 38 * len(names))


def pareto(
    points: Sequence[tuple[str, float, float]], own: tuple[str, float, float] | None, value_label: str
) -> go.Figure:
    """The Pareto front: plans that no other plan beats in both figures.

    A point is (plan, step time in s, other value); `own` is the present plan.
    """
    chart, hover = go.Figure(), "%{text}<br>%{x:.3f} s, %{y:.1f}<extra></extra>"
    names, times, values = zip(*points, strict=True) if points else ((), (), ())
    marker: dict[str, Any] = {"size": 13, "color": BLUE, "symbol": "circle"}
    line = {"shape": "hv", "color": GREY, "dash": "dot"}
    add_points(chart, "best trade-offs", times, values, marker, hover, "lines+markers", text=names, line=line)
    if own is not None:
        marker = {"size": 15, "color": PURPLE, "symbol": "star"}
        add_points(chart, "the present plan", own[1:2], own[2:3], marker, hover, text=own[:1])
    chart.update_xaxes(title="step time (s)")
    chart.update_yaxes(title=value_label)
    return styled(chart, 380)
