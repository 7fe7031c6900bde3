"""Colours and layout that all charts share; the colours are colour-blind-safe and never the only cue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, RED, YELLOW, GREY = "#56B4E9", "#D55E00", "#F0E442", "#999999"
SERIES = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED, YELLOW, GREY)
"""The palette of Okabe and Ito."""
TEAL, WINE, OLIVE, INDIGO, INK = "#44AA99", "#AA3377", "#999933", "#8C80E0", "#6B6B6B"
"""Further colours for charts with many kinds; from Tol's palettes, readable on light and dark."""

SCALE = "Cividis"
"""Sequential colour scale that is readable with every kind of colour vision and in grey."""

MEMORY: Mapping[str, str] = {
    "weights": BLUE,
    "gradients": ORANGE,
    "optimizer": GREEN,
    "activations": PURPLE,
    "workspace": SKY,
    "communication_buffers": YELLOW,
    "framework": GREY,
}
"""Kinds of memory; a kind has the same colour for every model and plan."""

CATEGORIES: Mapping[str, tuple[str, str]] = {
    "forward": ("forward", BLUE),
    "backward_input": ("backward, input gradient", ORANGE),
    "backward_weight": ("backward, weight gradient", YELLOW),
    "forward_backward": ("overlapped pairs", GREEN),
    "bubble": ("bubble", GREY),
    "optimizer": ("gradients and optimizer", PURPLE),
}
"""Name and colour of each part of a step, in stacking order."""


def rows_axis(names: Sequence[str]) -> dict[str, Any]:
    """A y axis of names, the last on top, without the margin that Plotly leaves around categories."""
    order = {"categoryorder": "array", "categoryarray": list(names)}
    return {"type": "category", "range": [-0.7, len(names) - 0.3], **order}


def styled(figure: go.Figure, height: int, title: str | None = None) -> go.Figure:
    """Set margins, legend and height; fonts and background come from the page.

    The legend stands at the bottom, and the margin at the top holds the browser's toolbar: it covers nothing.
    """
    figure.update_layout(
        height=height,
        title=None if title is None else {"text": title, "font": {"size": 15}},
        margin={"l": 8, "r": 8, "t": 48 if title else 30, "b": 8},
        legend={
            "orientation": "h",
            "yref": "container",
            "yanchor": "bottom",
            "y": 0.0,
            "x": 0.0,
            "title": None,
            "font": {"size": 12},
            "traceorder": "normal",
        },
        bargap=0.25,
        hoverlabel={"namelength": -1},
    )
    figure.update_xaxes(automargin=True)
    figure.update_yaxes(automargin=True)
    return figure


def bars(
    names: Sequence[str],
    values: Sequence[float],
    texts: Sequence[str],
    hover: str,
    colour: str | Sequence[str] = BLUE,
    **more: Any,
) -> go.Figure:
    """One horizontal bar a name with its text, the first name on top."""
    colours = colour if isinstance(colour, str) else list(colour)[::-1]
    bar: dict[str, Any] = {"x": list(values)[::-1], "y": list(names)[::-1], "marker_color": colours}
    words = {"text": list(texts)[::-1], "textposition": "auto", "hovertemplate": hover}
    return go.Figure(go.Bar(orientation="h", **bar, **(words | more)))


def add_points(
    figure: go.Figure,
    name: str | None,
    x: Sequence[Any],
    y: Sequence[Any],
    marker: Mapping[str, Any],
    hover: str,
    mode: str = "markers",
    **more: Any,
) -> None:
    """Add a series of points; nothing where it has none."""
    if x:
        series = {"name": name, "x": list(x), "y": list(y), "mode": mode, "marker": marker}
        figure.add_scatter(**series, hovertemplate=hover, **more)


def whiskers(
    low: Sequence[float], middle: Sequence[float], high: Sequence[float], colour: str
) -> dict[str, Any]:
    """Error bars from P10 to P90."""
    ends = {
        "array": [top - value for top, value in zip(high, middle, strict=True)],
        "arrayminus": [value - bottom for bottom, value in zip(low, middle, strict=True)],
    }
    return {"type": "data", "symmetric": False, **ends, "color": colour}


THIN = 4
"""Width of a line, at most, that is dotted where it stands on a roofline."""


def muted(figure: go.Figure, roofline: bool) -> go.Figure:
    """Hatch bars and dot lines of a chart that stands on a roofline, and write that into its corner."""
    if not roofline:
        return figure
    hatch = {"shape": "/", "size": 6, "solidity": 0.25, "fillmode": "overlay"}
    figure.update_traces(selector={"type": "bar"}, marker={"pattern": hatch, "opacity": 0.75})
    # A wide line is an interval: dotted it would look like points.
    figure.for_each_trace(
        lambda trace: trace.line.update(dash="dot") if (trace.line.width or 2) <= THIN else None,
        selector={"mode": "lines"},
    )
    corner = {"xref": "paper", "yref": "paper", "x": 0.0, "y": 1.0, "yanchor": "bottom"}
    words = "roofline: no rate was measured here"
    figure.add_annotation(text=words, **corner, showarrow=False, font={"size": 11})
    return figure.update_layout(margin={"t": 32})
