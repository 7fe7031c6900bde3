"""Charts of the scoreboards: medians and coverage by set, and the error of every prediction."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from moesim.app.charts.style import BLUE, GREEN, GREY, ORANGE, SERIES, rows_axis, styled
from moesim.simulator.scoring.published import Row
from moesim.simulator.scoring.published_collectives import CollectiveRow
from moesim.simulator.scoring.scoreboard.rows import KeptScore

MOST = 30
"""Number of errors that are drawn."""
AIM = (0.7, 0.9)
"""Share of the published steps that an 80 % interval should contain (docs/validation.md)."""


def errors(rows: Sequence[Row], most: int = MOST) -> go.Figure:
    """Relative errors, the largest first; figures that a profile was calibrated on are hollow and grey."""
    shown = sorted(rows, key=lambda row: -abs(row.relative_error))[:most][::-1]
    names = readable(shown)
    chart = go.Figure()
    for name, calibrated, colour, symbol in (
        ("prediction", False, BLUE, "circle"),
        ("calibrated on this figure: no prediction", True, GREY, "circle-open"),
    ):
        own = [row for row in shown if row.used_for_calibration == calibrated]
        if own:
            chart.add_scatter(
                name=name,
                x=[100.0 * row.relative_error for row in own],
                y=[names[row.id] for row in own],
                mode="markers",
                marker={"color": colour, "size": 10, "symbol": symbol},
                customdata=[(row.quantity, row.published, row.predicted, row.unit) for row in own],
                hovertemplate="%{customdata[0]}: published %{customdata[1]:,.4r}, "
                "predicted %{customdata[2]:,.4r} %{customdata[3]} (%{x:+.1f} %)<extra></extra>",
            )
    chart.add_vline(x=0.0, line={"color": ORANGE, "dash": "dot"})
    chart.update_yaxes(rows_axis([names[row.id] for row in shown]))
    chart.update_xaxes(title="error: predicted against published (%)", ticksuffix=" %")
    return styled(chart, 110 + 22 * max(4, len(shown)))


def readable(rows: Sequence[Row]) -> dict[str, str]:
    """Names of rows for people, unique: quantity and profile, with the row's source where two are alike."""
    names: dict[str, str] = {}
    for row in rows:
        source, _, profile = row.id.partition("@")
        name = f"{row.quantity}, {profile}" if profile else row.quantity
        names[row.id] = name if name not in names.values() else f"{name} ({source})"
    return names


def medians(scores: Sequence[KeptScore]) -> go.Figure:
    """Median absolute error of each set of published steps, with the share inside the 80 % interval."""
    shown = list(scores)[::-1]
    chart = go.Figure(
        go.Bar(
            x=[score.median_absolute_error for score in shown],
            y=[f"{score.name} ({score.rows})" for score in shown],
            orientation="h",
            marker_color=BLUE,
            text=[f"{score.median_absolute_error:.1%}" for score in shown],
            textposition="outside",
            cliponaxis=False,
            customdata=[(score.median_error, score.covered) for score in shown],
            hovertemplate="%{y}: median %{x:.1%}, signed %{customdata[0]:+.1%}, inside the interval "
            "%{customdata[1]:.0%}<extra></extra>",
        )
    )
    most = max((score.median_absolute_error for score in scores), default=0.1)
    chart.update_xaxes(title="median absolute error of the step", tickformat=".0%", range=[0.0, 1.2 * most])
    return styled(chart, 80 + 26 * max(4, len(shown)))


def coverage(scores: Sequence[KeptScore]) -> go.Figure:
    """Share of the published steps inside the 80 % interval of their prediction; the aim is shaded."""
    shown = list(scores)[::-1]
    chart = go.Figure(
        go.Scatter(
            x=[score.covered for score in shown],
            y=[f"{score.name} ({score.rows})" for score in shown],
            mode="markers+text",
            marker={"color": GREEN, "size": 11, "symbol": "diamond"},
            text=[f"  {score.covered:.0%}" for score in shown],
            textposition="middle right",
            hovertemplate="%{y}: %{x:.0%} inside P10 to P90<extra></extra>",
        )
    )
    chart.add_vrect(x0=AIM[0], x1=AIM[1], fillcolor=GREY, opacity=0.2, line_width=0)
    chart.update_xaxes(title="published steps inside P10 to P90", tickformat=".0%", range=[0.5, 1.08])
    chart.update_yaxes(range=[-0.7, len(shown) - 0.3])
    return styled(chart, 80 + 26 * max(4, len(shown)))


def collectives(rows: Sequence[CollectiveRow]) -> go.Figure:
    """Predicted against measured times of collectives on logarithmic axes, with the line of equality."""
    timed = [row for row in rows if row.unit == "s"]
    chart = go.Figure()
    if timed:
        low = min(min(row.measured, row.predicted) for row in timed)
        high = max(max(row.measured, row.predicted) for row in timed)
        line = {"color": ORANGE, "dash": "dot"}
        chart.add_scatter(
            name="equal", x=[low, high], y=[low, high], mode="lines", line=line, hoverinfo="skip"
        )
    for number, use in enumerate(dict.fromkeys(row.use for row in timed)):
        own = [row for row in timed if row.use == use]
        chart.add_scatter(
            name=use,
            x=[row.measured for row in own],
            y=[row.predicted for row in own],
            mode="markers",
            marker={"color": SERIES[number % len(SERIES)], "size": 7, "symbol": number},
            customdata=[(row.id, row.how, 100.0 * row.relative_error) for row in own],
            hovertemplate="%{customdata[0]} (%{customdata[1]}): measured %{x:.3s}s, predicted %{y:.3s}s, "
            "%{customdata[2]:+.1f} %<extra></extra>",
        )
    for axis, title in (
        (chart.update_xaxes, "measured time (s)"),
        (chart.update_yaxes, "predicted time (s)"),
    ):
        axis(title=title, type="log", exponentformat="SI", ticksuffix="s", dtick=1)
    return styled(chart, 480)
