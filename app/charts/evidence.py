"""Charts of the scoreboards: the error of every prediction against its published or measured value."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from moesim.app.charts.style import BLUE, GREY, ORANGE, SERIES, rows_axis, styled
from moesim.simulator.scoring.published import Row
from moesim.simulator.scoring.published_collectives import CollectiveRow

MOST = 30
"""Number of errors that are drawn."""


def errors(rows: Sequence[Row], most: int = MOST) -> go.Figure:
    """Relative errors, the largest first; figures that a profile was calibrated on are hollow and grey."""
    shown = sorted(rows, key=lambda row: -abs(row.relative_error))[:most][::-1]
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
                y=[row.id for row in own],
                mode="markers",
                marker={"color": colour, "size": 10, "symbol": symbol},
                customdata=[(row.quantity, row.published, row.predicted, row.unit) for row in own],
                hovertemplate="%{customdata[0]}: published %{customdata[1]:.4g}, "
                "predicted %{customdata[2]:.4g} %{customdata[3]} (%{x:+.1f} %)<extra></extra>",
            )
    chart.add_vline(x=0.0, line={"color": ORANGE, "dash": "dot"})
    chart.update_yaxes(rows_axis([row.id for row in shown]))
    chart.update_xaxes(title="error: predicted against published (%)", ticksuffix=" %")
    return styled(chart, 110 + 22 * max(4, len(shown)))


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
