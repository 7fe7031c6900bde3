"""Small charts of one figure against one input, with the present value marked."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import plotly.graph_objects as go

from moesim.app.charts.style import BLUE, GREY, ORANGE, PURPLE, RED, styled

HEIGHT = 235
MOST_REASON = 150
"""Characters of a reason that fit beside the pointer."""


class Mark(NamedTuple):
    """One point: its place on the axis, the value in words, the figure and its words, and a reason.

    `figure` is None where the value is illegal; `fits` tells whether the plan has the memory.
    """

    place: int
    value: str
    figure: float | None
    text: str
    reason: str
    fits: bool


@lru_cache(maxsize=256)
def curve(
    marks: tuple[Mark, ...],
    ticks: tuple[str, ...],
    own: int,
    label: str,
    ends: tuple[float, float] | None = None,
    band: tuple[float, float] | None = None,
) -> go.Figure:
    """A line through the legal values, evenly spaced, with gaps where a value is illegal.

    `ticks`: every value in words, in order. `own`: place of the present value. `ends`: range of the y
    axis, where charts share it. `band`: P10 and P90 at the present value. Charts are kept, because a page
    with eight of them is drawn anew whenever a point is known.
    """
    places = sorted(marks, key=lambda mark: mark.place)
    legal = [mark for mark in places if mark.figure is not None]
    low = _low([mark.figure for mark in legal if mark.figure is not None], ends)
    now = _marks([m for m in legal if m.place == own], PURPLE, "diamond", 13)
    value = next((m.figure for m in legal if m.place == own), None)
    if band is not None and value is not None:
        now["error_y"] = {
            "type": "data",
            "symmetric": False,
            "array": [band[1] - value],
            "arrayminus": [value - band[0]],
            "color": PURPLE,
        }
    line = {
        "type": "scatter",
        "x": [mark.place for mark in places],
        "y": [mark.figure for mark in places],
        "mode": "lines",
        "line": {"color": BLUE, "width": 2},
        "hoverinfo": "skip",
    }
    illegal = [mark._replace(figure=low) for mark in places if mark.figure is None]
    data = [
        line,
        _marks([m for m in legal if m.fits and m.place != own], BLUE, "circle", 8),
        _marks([m for m in legal if not m.fits and m.place != own], RED, "circle-open", 10),
        _marks(illegal, ORANGE, "x", 9),
        now,
    ]
    return go.Figure({"data": data, "layout": _layout(_without_unit(ticks), own, label, ends)})


def _layout(ticks: Sequence[str], own: int, label: str, ends: tuple[float, float] | None) -> dict[str, Any]:
    vertical: dict[str, Any] = {
        "title": {"text": label, "font": {"size": 11}},
        "automargin": True,
        "nticks": 5,
    }
    if ends is not None:
        vertical["range"] = list(ends)
    return {
        **_common(),
        "showlegend": False,
        "dragmode": False,
        "clickmode": "event+select",
        "xaxis": {
            "automargin": True,
            "tickmode": "array",
            "tickvals": list(range(len(ticks))),
            "ticktext": list(ticks),
            "tickfont": {"size": 11},
            "tickangle": 0 if max(map(len, ticks)) <= 4 else -35,
            "range": [-0.5, len(ticks) - 0.5],
        },
        "yaxis": {**vertical, "tickfont": {"size": 11}},
        "shapes": [
            {
                "type": "line",
                "x0": own,
                "x1": own,
                "y0": 0,
                "y1": 1,
                "yref": "paper",
                "line": {"color": GREY, "dash": "dot", "width": 1},
            }
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


def _marks(marks: Sequence[Mark], colour: str, symbol: str, size: int) -> dict[str, Any]:
    return {
        "type": "scatter",
        "x": [mark.place for mark in marks],
        "y": [mark.figure for mark in marks],
        "mode": "markers",
        "marker": {"color": colour, "symbol": symbol, "size": size, "line": {"width": 2, "color": colour}},
        "customdata": [[mark.value, mark.text, _cut(mark.reason)] for mark in marks],
        "hovertemplate": "<b>%{customdata[0]}</b>: %{customdata[1]}%{customdata[2]}<extra></extra>",
        "selected": {"marker": {"opacity": 1.0}},
        "unselected": {"marker": {"opacity": 0.75}},
    }


def _low(values: Sequence[float], ends: tuple[float, float] | None) -> float:
    """Where illegal values are marked: the lower end of the chart."""
    if ends is not None:
        return ends[0] + 0.04 * (ends[1] - ends[0])
    return min(values, default=0.0)


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
