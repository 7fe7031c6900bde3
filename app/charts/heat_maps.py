"""Heat maps, and the picture of a cluster."""

from __future__ import annotations

import plotly.graph_objects as go

from moesim.app.charts.style import BLUE, GREEN, GREY, ORANGE, PURPLE, SCALE, styled
from moesim.hwmodels.topologies.base import Picture
from moesim.simulator.engine.full_resolution.result import HeatMap

KINDS = {"gpu": (BLUE, "square"), "leaf": (ORANGE, "diamond"), "spine": (PURPLE, "diamond-wide")}


NAMES = {
    "gpu": "GPUs",
    "leaf": "leaf switches",
    "spine": "spine switches",
    "nvswitch": "NVSwitches",
    "nvlink": "NVLink",
    "nic": "NIC to leaf",
    "leaf-spine": "leaf to spine",
}
"""Kinds of parts and cables in words; other kinds keep their names."""


def heat_map(data: HeatMap) -> go.Figure:
    """A table of figures as a heat map; cells without a value stay blank."""
    chart = go.Figure(
        go.Heatmap(
            z=[list(row) for row in data.values],
            x=list(data.columns),
            y=list(data.rows),
            colorscale=SCALE,
            colorbar={"title": {"text": data.unit, "side": "right"}},
            hovertemplate=f"{data.row_label} %{{y}}, {data.column_label} %{{x}}: %{{z:,.4r}}<extra></extra>",
        )
    )
    chart.update_xaxes(title=data.column_label, type="category", nticks=24)
    chart.update_yaxes(title=data.row_label, type="category", autorange="reversed", nticks=24)
    return styled(chart, min(620, 220 + 9 * len(data.rows)), data.title)


def picture(data: Picture) -> go.Figure:
    """Draw part of a cluster in layers, with network switches above the GPUs and scale-up switches below."""
    chart = go.Figure()
    for kind in dict.fromkeys(cable.kind for cable in data.cables):
        mine = [cable for cable in data.cables if cable.kind == kind]
        x: list[float | None] = []
        y: list[float | None] = []
        for cable in mine:
            (x0, y0), (x1, y1) = data.places[cable.tail], data.places[cable.head]
            x += [x0, x1, None]
            y += [y0, y1, None]
        chart.add_scatter(
            name=f"{NAMES.get(kind, kind)}: {mine[0].rate} a direction",
            x=x,
            y=y,
            mode="lines",
            line={"width": 1, "color": GREEN if kind in data.scale_up_kinds else GREY},
            opacity=0.6,
            hoverinfo="skip",
        )
    for layer in data.layers:
        places = [data.places[name] for name in layer.shown]
        colour, symbol = KINDS.get(layer.kind, (GREEN, "circle"))
        chart.add_scatter(
            name=f"{layer.count:,} {NAMES.get(layer.kind, layer.kind)}"
            + (f" ({len(layer.shown)} shown)" if layer.left_out else ""),
            x=[place[0] for place in places],
            y=[place[1] for place in places],
            mode="markers",
            marker={"symbol": symbol, "size": 13, "color": colour, "line": {"width": 1, "color": "black"}},
            text=list(layer.shown),
            hovertemplate="%{text}<extra></extra>",
        )
    chart.update_xaxes(visible=False)
    chart.update_yaxes(visible=False)
    return styled(chart, 380)
