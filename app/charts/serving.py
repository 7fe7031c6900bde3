"""Charts of serving: parts of a decode step, sequences over time, and throughput against speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from moesim.app.charts.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    TEAL,
    add_points,
    styled,
)
from moesim.hwmodels.units import in_unit
from moesim.simulator.serving.results import Moment
from moesim.simulator.serving.step import StepPart

KINDS: Mapping[str, str] = {
    "attention": PURPLE,
    "linear": BLUE,
    "experts": SKY,
    "other": TEAL,
    "exchange": ORANGE,
    "host": GREY,
}
"""Kinds of parts of a step, in stacking order."""


def decode_step(parts: Sequence[StepPart]) -> go.Figure:
    """One bar: what of each kind of work nothing hides, which adds up to the step, its parts in the hover."""
    chart = go.Figure()
    for kind, colour in KINDS.items():
        own = sorted((part for part in parts if part.kind == kind), key=lambda part: -part.exposed_s)
        seconds = sum(part.exposed_s for part in own)
        if not seconds:
            continue
        lines = [
            f"{part.name} {in_unit(part.exposed_s, 'ms', 's'):.3f} ms" for part in own[:8] if part.exposed_s
        ]
        chart.add_bar(
            name=kind,
            x=[in_unit(seconds, "ms", "s")],
            y=["step"],
            orientation="h",
            marker_color=colour,
            hovertemplate=f"<b>{kind}: %{{x:.3f}} ms</b><br>{'<br>'.join(lines)}<extra></extra>",
        )
    chart.update_layout(barmode="stack")
    chart.update_xaxes(title="exposed time of a decode step (ms)")
    chart.update_yaxes(showticklabels=False)
    return styled(chart, 190)


def sequences(moments: Sequence[Moment]) -> go.Figure:
    """Running and waiting sequences of all replicas over time."""
    chart, times = go.Figure(), [moment.time_s for moment in moments]
    for name, values, colour, dash in (
        ("running", [moment.running for moment in moments], BLUE, "solid"),
        ("waiting", [moment.waiting for moment in moments], RED, "dot"),
    ):
        line = {"color": colour, "dash": dash, "shape": "hv"}
        hover = f"{name}: %{{y:,}} at %{{x:.2f}} s<extra></extra>"
        add_points(chart, name, times, values, {"size": 3}, hover, "lines", line=line)
    chart.update_xaxes(title="time since the first arrival (s)", rangemode="tozero")
    chart.update_yaxes(title="sequences, all replicas", rangemode="tozero")
    return styled(chart, 300)


def frontier(
    points: Sequence[tuple[str, float, float]], plans: Sequence[tuple[str, float, float]]
) -> go.Figure:
    """Output tokens/s a GPU against tokens/s of a user; points are (plan, of a user, of a GPU).

    `points`: the frontier in closed form; `plans`: what was served request by request.
    """
    chart, hover = go.Figure(), "%{text}<br>%{x:.1f} tokens/s a user, %{y:,.0f} a GPU<extra></extra>"
    for name, rows, marker, mode in (
        ("frontier, closed form", points, {"size": 9, "color": BLUE}, "lines+markers"),
        ("served request by request", plans, {"size": 14, "color": GREEN, "symbol": "diamond"}, "markers"),
    ):
        names, users, gpus = zip(*rows, strict=True) if rows else ((), (), ())
        line = {"color": GREY, "dash": "dot"}
        add_points(chart, name, users, gpus, marker, hover, mode, text=names, line=line)
    chart.update_xaxes(title="tokens/s of a user", rangemode="tozero")
    chart.update_yaxes(title="output tokens/s of a GPU", rangemode="tozero")
    return styled(chart, 380)
