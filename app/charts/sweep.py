"""Charts of a sweep: one figure over one key, or over two keys as a heat map, with the best point marked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import plotly.graph_objects as go

from moesim.app.charts.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    RED,
    SCALE,
    add_points,
    rows_axis,
    styled,
    whiskers,
)

Value = str | int | float | bool
"""The value of a key; anything else is shown as text."""


def line(
    key: str, title: str, points: Sequence[tuple[Value, float, bool]], best: Value | None, now: Value | None
) -> go.Figure:
    """A figure over the values of one key; `points` are (value, figure, whether the plan fits).

    `best` is the value of the best point, and `now` that of the scenario where it is among the points.
    """
    chart = go.Figure()
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v, _, _ in points)
    place = [v if numbers else str(v) for v, _, _ in points]
    for name, fits, colour, symbol in (("fits", True, BLUE, "circle"), ("does not fit", False, GREY, "x")):
        own = [(x, y) for x, (_, y, ok) in zip(place, points, strict=True) if ok == fits]
        marker: dict[str, Any] = {"color": colour, "symbol": symbol, "size": 9}
        hover = f"{key} %{{x}}: %{{y:.4g}}<extra>{name}</extra>"
        mode, line = "lines+markers" if fits and numbers else "markers", {"color": colour}
        add_points(chart, name, [x for x, _ in own], [y for _, y in own], marker, hover, mode, line=line)
    for name, value, colour, symbol in (
        ("best", best, ORANGE, "star"),
        ("the scenario now", now, RED, "diamond-open"),
    ):
        mine = [(x, y) for x, (v, y, _) in zip(place, points, strict=True) if v == value][:1]
        marker = {"color": colour, "symbol": symbol, "size": 16, "line": {"width": 2}}
        if value is not None:
            hover = f"{name}: {key} %{{x}}: %{{y:.4g}}<extra></extra>"
            add_points(chart, name, [x for x, _ in mine], [y for _, y in mine], marker, hover)
    chart.update_xaxes(title=key, type=None if numbers else "category")
    chart.update_yaxes(title=title)
    return styled(chart, 380)


def grid(
    keys: tuple[str, str],
    title: str,
    points: Sequence[tuple[Value, Value, float | None, str]],
    best: tuple[Value, Value] | None,
) -> go.Figure:
    """A figure over the values of two keys; `points` are (across, up, figure or None, status).

    Numbers stand on a true scale, so that cells are as wide as the steps between the values.
    """
    across, horizontal = _key_axis(keys[0], [x for x, _, _, _ in points])
    up, vertical = _key_axis(keys[1], [y for _, y, _, _ in points])
    cells = {(x, y): (z, status) for x, y, z, status in points}
    empty = (None, "not computed yet")
    chart = go.Figure(
        go.Heatmap(
            x=across if horizontal["type"] != "category" else list(map(str, across)),
            y=up if vertical["type"] != "category" else list(map(str, up)),
            z=[[cells.get((x, y), empty)[0] for x in across] for y in up],
            customdata=[[cells.get((x, y), empty)[1] for x in across] for y in up],
            colorscale=SCALE,
            colorbar={"title": {"text": title, "side": "right"}},
            hoverongaps=True,
            xgap=2,
            ygap=2,
            hovertemplate=f"{keys[0]} %{{x}}, {keys[1]} %{{y}}: %{{z:.4g}}, %{{customdata}}<extra></extra>",
        )
    )
    tight = [(x, y) for x, y, z, status in points if status == "does not fit" and z is not None]
    for name, places, colour, symbol, size in (
        ("does not fit", tight, RED, "x", 8),
        ("best", [] if best is None else [best], ORANGE, "star", 16),
    ):
        if places:
            x = [place[0] if horizontal["type"] != "category" else str(place[0]) for place in places]
            y = [place[1] if vertical["type"] != "category" else str(place[1]) for place in places]
            edge = {"width": 1, "color": "#0e1117"}
            marker = {"color": colour, "symbol": symbol, "size": size, "line": edge}
            chart.add_scatter(name=name, x=x, y=y, mode="markers", marker=marker, hoverinfo="skip")
    chart.update_layout(xaxis=horizontal, yaxis=vertical)
    return styled(chart, 180 + 34 * max(5, len(up)))


def _key_axis(key: str, values: Sequence[Value]) -> tuple[list[Value], dict[str, Any]]:
    """(the different values in order, the axis): a true scale for two numbers and more, else categories."""
    found: list[Any] = list(dict.fromkeys(values))
    if len(found) < 2 or not all(isinstance(v, int | float) and not isinstance(v, bool) for v in found):
        return found, {"title": key, "type": "category"}
    found.sort()
    log, _, kept = _scale(found, 0)
    title = f"{key}, logarithmic scale" if log else key
    ticks = {"tickvals": [found[n] for n in kept], "ticktext": [f"{found[n]:g}" for n in kept]}
    return found, {"title": title, "type": "log" if log else "linear", "tickmode": "array", **ticks}


def _scale(at: Sequence[float], own: int) -> tuple[bool, list[float], list[int]]:
    """(whether an axis of ascending values is logarithmic, their places on it, those with room for a tick).

    The value at `own` always has its tick.
    """
    log = at[0] > 0.0 and at[-1] >= LOG_FROM * at[0]
    places = [math.log10(value) for value in at] if log else list(at)
    room = TICK_ROOM * (places[-1] - places[0])
    kept = [own]
    for n in sorted(range(len(at)), key=lambda n: abs(n - own)):
        if all(abs(places[n] - places[other]) >= room for other in kept):
            kept.append(n)
    return log, places, sorted(kept)


# -- curves ------------------------------------------------------------------------------------------
# Small charts of one figure against one input, with the present value marked.

HEIGHT = 250
LOG_FROM = 8.0
"""Ratio of the largest to the least value from which an axis is logarithmic."""
TICK_ROOM = 0.09
"""Part of an axis that a tick takes."""
MOST_REASON = 150
"""Characters of a reason that fit beside the pointer."""


class Mark(NamedTuple):
    """One point: its place on the axis, the value in words, the figure and its words, and a reason.

    `figure` is None where the value is illegal; `fits` tells whether the plan has the memory; `band` is P10
    and P90 of the figure.
    """

    place: int
    value: str
    figure: float | None
    text: str
    reason: str
    fits: bool
    band: tuple[float, float] | None = None


@lru_cache(maxsize=256)
def curve(
    marks: tuple[Mark, ...],
    ticks: tuple[str, ...],
    own: int,
    label: str,
    ends: tuple[float, float] | None = None,
    values: tuple[float, ...] = (),
) -> go.Figure:
    """A line through the legal values on a true scale, with gaps where a value is illegal.

    `ticks`: every value in words, in order. `values`: the values themselves; from a factor of
    `LOG_FROM` the axis is logarithmic. `own`: place of the present value. `ends`: range of the y
    axis, where charts share it. Charts are kept, because a page with eight of them is drawn anew whenever a
    point is known.
    """
    places = sorted(marks, key=lambda mark: mark.place)
    legal = [mark for mark in places if mark.figure is not None]
    # Illegal values are marked at the lower end of the chart.
    low = min((mark.figure for mark in legal if mark.figure is not None), default=0.0)
    if ends is not None:
        low = ends[0] + 0.04 * (ends[1] - ends[0])
    at = values or tuple(range(len(ticks)))
    line = {
        "type": "scatter",
        "x": [at[mark.place] for mark in places],
        "y": [mark.figure for mark in places],
        "mode": "lines",
        "line": {"color": BLUE, "width": 2},
        "hoverinfo": "skip",
    }
    illegal = [mark._replace(figure=low) for mark in places if mark.figure is None]
    data = [
        line,
        _marks(at, [m for m in legal if m.fits and m.place != own], BLUE, "circle", 8),
        _marks(at, [m for m in legal if not m.fits and m.place != own], RED, "circle-open", 10),
        _marks(at, illegal, ORANGE, "x", 9),
        _marks(at, [m for m in legal if m.place == own], PURPLE, "diamond", 13),
    ]
    return go.Figure({"data": data, "layout": _layout(at, _without_unit(ticks), own, label, ends)})


def _layout(
    at: Sequence[float], ticks: Sequence[str], own: int, label: str, ends: tuple[float, float] | None
) -> dict[str, Any]:
    log, places, kept = _scale(at, own)
    margin = 0.06 * (places[-1] - places[0])
    shown = [ticks[n] for n in kept]
    title = {"text": label, "font": {"size": 11}}
    vertical: dict[str, Any] = {"title": title, "automargin": True, "nticks": 5, "tickfont": {"size": 11}}
    if ends is not None:
        vertical["range"] = list(ends)
    line = {"color": GREY, "dash": "dot", "width": 1}
    return {
        **_common(),
        "showlegend": False,
        "dragmode": False,
        "clickmode": "event+select",
        "xaxis": {
            "automargin": True,
            "tickmode": "array",
            "type": "log" if log else "linear",
            "title": {"text": "logarithmic scale" if log else "", "font": {"size": 10}, "standoff": 4},
            "tickvals": [at[n] for n in kept],
            "ticktext": shown,
            "tickfont": {"size": 11},
            "tickangle": 0 if max(map(len, shown)) <= 5 else -35,
            "range": [places[0] - margin, places[-1] + margin],
        },
        "yaxis": vertical,
        "shapes": [
            {"type": "line", "x0": at[own], "x1": at[own], "y0": 0, "y1": 1, "yref": "paper", "line": line}
        ],
    }


@lru_cache(maxsize=1)
def _common() -> dict[str, Any]:
    """What all charts share, as plain data: building it anew takes longer than all the rest."""
    found: dict[str, Any] = styled(go.Figure(), HEIGHT).to_dict()["layout"]
    return {key: value for key, value in found.items() if key not in ("xaxis", "yaxis", "template")}


def _without_unit(ticks: tuple[str, ...]) -> tuple[str, ...]:
    """The values without their unit, where all have the same; the title of the chart names it."""
    split = [tick.split(" ", 1) for tick in ticks]
    units = {parts[1] if len(parts) > 1 else "" for parts in split}
    return tuple(parts[0] for parts in split) if len(units) == 1 else ticks


def _marks(at: Sequence[float], marks: Sequence[Mark], colour: str, symbol: str, size: int) -> dict[str, Any]:
    values = [mark.figure or 0.0 for mark in marks]
    ends = [mark.band or (value, value) for mark, value in zip(marks, values, strict=True)]
    bars = whiskers([low for low, _ in ends], values, [high for _, high in ends], colour)
    return {
        "type": "scatter",
        "x": [at[mark.place] for mark in marks],
        "y": [mark.figure for mark in marks],
        "error_y": {**bars, "thickness": 1.5, "width": 3},
        "mode": "markers",
        "marker": {"color": colour, "symbol": symbol, "size": size, "line": {"width": 2, "color": colour}},
        "customdata": [[mark.value, mark.text, _cut(mark.reason)] for mark in marks],
        "hovertemplate": "<b>%{customdata[0]}</b>: %{customdata[1]}%{customdata[2]}<extra></extra>",
        "selected": {"marker": {"opacity": 1.0}},
        "unselected": {"marker": {"opacity": 0.75}},
    }


def _cut(reason: str) -> str:
    """A reason in lines that a tooltip can show; angle brackets would be read as markup."""
    plain = reason.replace("<", "less than ").replace(">", "more than ")
    plain = plain if len(plain) <= MOST_REASON else f"{plain[:MOST_REASON].rsplit(' ', 1)[0]} …"
    words, lines = plain.split(), [""]
    for word in words:
        if len(lines[-1]) + len(word) > 48:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "".join(f"<br>{line}" for line in lines if line)


# -- hardware ----------------------------------------------------------------------------------------
# Chart of one figure of several clusters: bars with P10 to P90, coloured by the evidence behind them.

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
        values, p10, p90 = zip(*(bar.values for bar in own), strict=True)
        pattern = {"shape": hatch, "fgcolor": "white", "size": 6, "fillmode": "overlay"}
        chart.add_bar(
            name=confidence,
            orientation="h",
            y=[bar.name for bar in own],
            x=values,
            marker={"color": colour, "pattern": pattern},
            error_x=whiskers(p10, values, p90, INK),
            customdata=[[bar.text] for bar in own],
            hovertemplate="%{y}: %{customdata[0]}<extra></extra>",
        )
    chart.update_layout(barmode="overlay", showlegend=True)
    chart.update_xaxes(title=f"{label}, whiskers P10 to P90", rangemode="tozero")
    chart.update_yaxes(**rows_axis(names))
    return styled(chart, 120 + 44 * len(bars))
