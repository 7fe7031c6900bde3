"""Differences: waterfall between two scenarios, tornado of one, Pareto front of many plans."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from moesim.app.charts.style import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SERIES, styled


def waterfall(
    first: str,
    first_s: float,
    changes: Sequence[tuple[str, float]],
    other: str,
    other_s: float,
    most: int = 9,
) -> go.Figure:
    """From one step time to another, cause by cause; `changes` in seconds, small ones together."""
    ordered = sorted(changes, key=lambda change: -abs(change[1]))
    shown, rest = ordered[:most], [seconds for _, seconds in ordered[most:]]
    if rest:
        shown.append(("the rest", sum(rest)))
    chart = go.Figure(
        go.Waterfall(
            x=[first, *(name for name, _ in shown), other],
            y=[first_s, *(seconds for _, seconds in shown), other_s],
            measure=["absolute", *("relative" for _ in shown), "total"],
            text=[f"{first_s:.2f}", *(f"{seconds:+.2f}" for _, seconds in shown), f"{other_s:.2f}"],
            textposition="outside",
            increasing={"marker": {"color": RED}},
            decreasing={"marker": {"color": GREEN}},
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
    """Step time with each source alone at its low and high end: (source, ends in words, low s, high s)."""
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


def side_by_side(names: Sequence[str], values: Sequence[float], label: str) -> go.Figure:
    """One figure of several scenarios, the first on top."""
    chart = go.Figure(
        go.Bar(
            x=list(values)[::-1],
            y=list(names)[::-1],
            orientation="h",
            marker_color=list(SERIES[: len(names)])[::-1],
            text=[f"{value:.3f}" for value in values][::-1],
            textposition="auto",
            hovertemplate="%{y}: %{x:.3f}<extra></extra>",
        )
    )
    chart.update_xaxes(title=label, rangemode="tozero")
    chart.update_yaxes(title="scenario")
    return styled(chart, 80 + 38 * len(names))


def pareto(
    points: Sequence[tuple[str, float, float]], own: tuple[str, float, float] | None, value_label: str
) -> go.Figure:
    """Plans of which none is better in both: (plan, step time in s, other value)."""
    chart = go.Figure()
    chart.add_scatter(
        name="best trade-offs",
        x=[point[1] for point in points],
        y=[point[2] for point in points],
        text=[point[0] for point in points],
        mode="lines+markers",
        line={"shape": "hv", "color": GREY, "dash": "dot"},
        marker={"size": 13, "color": BLUE, "symbol": "circle"},
        hovertemplate="%{text}<br>%{x:.3f} s, %{y:.1f}<extra></extra>",
    )
    if own is not None:
        chart.add_scatter(
            name="the present plan",
            x=[own[1]],
            y=[own[2]],
            text=[own[0]],
            mode="markers",
            marker={"size": 15, "color": PURPLE, "symbol": "star"},
            hovertemplate="%{text}<br>%{x:.3f} s, %{y:.1f}<extra></extra>",
        )
    chart.update_xaxes(title="step time (s)")
    chart.update_yaxes(title=value_label)
    return styled(chart, 380)
