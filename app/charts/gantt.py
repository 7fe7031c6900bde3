"""Timelines as horizontal bars, capped to what a browser can draw."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from moesim.app.charts.style import (
    ACTIONS,
    BLUE,
    GREEN,
    GREY,
    INDIGO,
    OLIVE,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    TEAL,
    WINE,
    YELLOW,
    styled,
)
from moesim.hwmodels.units import format_quantity
from moesim.simulator.predict.timeline import Bar

MOST_BARS = 3000
"""Bars that a browser draws in a few seconds without a graphics card."""

PHASES = {
    "attn F": BLUE,
    "mlp F": SKY,
    "attn I": ORANGE,
    "mlp I": YELLOW,
    "attn W": PURPLE,
    "mlp W": WINE,
    "dispatch F": GREEN,
    "dispatch B": OLIVE,
    "combine F": INDIGO,
    "combine B": TEAL,
    "wait for": RED,
    "prepare": GREY,
}

WORDS = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "F&B": "F&B pair",
    "F&I": "F&I pair",
}
"""Schedule actions in the words of the field."""

HOVER = "<b>%{customdata[0]}</b>%{customdata[1]}<br>%{customdata[2]}<extra></extra>"
"""The hover text uses prepared words, because Plotly's x of a bar with a base is its end, not its length."""


def window(bars: Sequence[Bar], begin_s: float, end_s: float, most: int = MOST_BARS) -> tuple[list[Bar], int]:
    """(bars that overlap a window, how many were left out); where there are too many, the longest stay."""
    found = [bar for bar in bars if bar.end_s > begin_s and bar.start_s < end_s]
    if len(found) <= most:
        return found, 0
    longest = sorted(found, key=lambda bar: bar.start_s - bar.end_s)[:most]
    return sorted(longest, key=lambda bar: (bar.row, bar.start_s)), len(found) - most


def gantt(
    bars: Sequence[Bar], rows: Sequence[str], row_title: str, begin_s: float, end_s: float
) -> go.Figure:
    """Bars on their rows; the first row is on top and gaps are idle time."""
    chart = go.Figure()
    for kind in dict.fromkeys(bar.kind for bar in bars):
        mine = [bar for bar in bars if bar.kind == kind]
        chart.add_bar(
            name=WORDS.get(kind, kind),
            orientation="h",
            base=[bar.start_s for bar in mine],
            x=[bar.end_s - bar.start_s for bar in mine],
            y=[bar.row for bar in mine],
            customdata=[_hover_texts(bar) for bar in mine],
            marker={"color": colour(kind), "line": {"width": 0.5, "color": "rgba(0,0,0,0.35)"}},
            hovertemplate=HOVER,
        )
    chart.update_layout(barmode="overlay", bargap=0.15)
    chart.update_xaxes(title="time from the start of the step (s)", range=[begin_s, end_s])
    chart.update_yaxes(
        title=row_title,
        type="category",
        categoryorder="array",
        categoryarray=list(rows)[::-1],
    )
    return styled(chart, 130 + 24 * max(4, len(rows)))


def _hover_texts(bar: Bar) -> list[str]:
    """Hover texts of a bar: its kind, its stage and micro-batch, its duration with begin and end."""
    length = format_quantity(bar.end_s - bar.start_s, "s")
    which = "" if bar.detail in ("", bar.kind) else f"<br>{bar.detail}"
    times = f"{length} long, from {bar.start_s:.6f} s to {bar.end_s:.6f} s"
    return [WORDS.get(bar.kind, bar.kind), which, times]


def colour(kind: str) -> str:
    """The colour of an action or a phase."""
    if kind in ACTIONS:
        return ACTIONS[kind]
    return next((value for name, value in PHASES.items() if kind.startswith(name)), GREY)
