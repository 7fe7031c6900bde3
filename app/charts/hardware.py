"""Chart of one figure of several clusters: bars with P10 to P90, coloured by the evidence behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import plotly.graph_objects as go

from moesim.app.charts.style import BLUE, GREEN, GREY, INK, rows_axis, styled

COLOURS: Mapping[str, tuple[str, str]] = {
    "measured": (GREEN, ""),
    "published": (BLUE, "."),
    "roofline": (GREY, "/"),
}
"""Colour and hatch of each word of confidence."""


class ClusterBar(NamedTuple):
    """One cluster: its name, the figure in words, (predicted, P10, P90) and the word of its confidence."""

    name: str
    text: str
    values: tuple[float, float, float]
    confidence: str


def intervals(bars: Sequence[ClusterBar], label: str) -> go.Figure:
    """Horizontal bars from zero, the first cluster on top, with whiskers from P10 to P90."""
    names = [bar.name for bar in bars][::-1]
    chart = go.Figure()
    for confidence, (colour, hatch) in COLOURS.items():
        own = [bar for bar in bars if bar.confidence == confidence]
        if not own:
            continue
        chart.add_bar(
            name=confidence,
            orientation="h",
            y=[bar.name for bar in own],
            x=[bar.values[0] for bar in own],
            marker={
                "color": colour,
                "pattern": {"shape": hatch, "fgcolor": "white", "size": 6, "fillmode": "overlay"},
            },
            error_x={
                "type": "data",
                "symmetric": False,
                "array": [bar.values[2] - bar.values[0] for bar in own],
                "arrayminus": [bar.values[0] - bar.values[1] for bar in own],
                "color": INK,
            },
            customdata=[[bar.text] for bar in own],
            hovertemplate="%{y}: %{customdata[0]}<extra></extra>",
        )
    chart.update_layout(barmode="overlay", showlegend=True)
    chart.update_xaxes(title=f"{label}, whiskers P10 to P90", rangemode="tozero")
    chart.update_yaxes(**rows_axis(names))
    return styled(chart, 120 + 44 * len(bars))
