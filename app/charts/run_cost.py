"""Charts of a whole run: overhead GPU-hours, causes of interruption, finish date and cost by part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import plotly.graph_objects as go

from moesim.app.charts.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    SERIES,
    YELLOW,
    add_points,
    bars,
    styled,
)
from moesim.simulator.run.report import CauseReport, GpuHours, OutlookRow

OVERHEADS: Mapping[str, tuple[str, str]] = {
    "startup": ("start-up", GREEN),
    "checkpoints": ("checkpoints", YELLOW),
    "lost": ("done again", RED),
    "detection": ("detection", ORANGE),
    "restart": ("restart", PURPLE),
    "waiting_for_spares": ("waiting for spares", GREY),
    "slow_nodes": ("slow nodes", YELLOW),
    "fewer_groups": ("groups away", GREY),
    "fault_tolerance": ("fault tolerance", BLUE),
    "planned": ("maintenance", BLUE),
}
"""Name and colour of each part of the job's GPU-hours that is not productive training."""

STOPS: Mapping[str, tuple[str, str]] = {
    "lost_gpu_hours": ("done again", RED),
    "detection_gpu_hours": ("detection", ORANGE),
    "restart_gpu_hours": ("restart", PURPLE),
    "waiting_gpu_hours": ("waiting for spares", GREY),
    "planned_gpu_hours": ("planned stop", BLUE),
}


def overheads(hours: GpuHours) -> go.Figure:
    """GPU-hours that are paid for but are not productive training, one bar per part."""
    parts = [(name, getattr(hours, key), colour) for key, (name, colour) in OVERHEADS.items()]
    names, values, colours = zip(*(part for part in parts if part[1] > 0.0), strict=True)
    texts = [f"{value:,.0f}" for value in values]
    chart = bars(names, values, texts, "%{y}: %{x:,.0f} GPU-hours<extra></extra>", colours)
    chart.update_xaxes(title="GPU-hours besides productive ones, predicted")
    return styled(chart, 110 + 40 * max(1, len(names)))


def causes(rows: Sequence[CauseReport], most: int = 10) -> go.Figure:
    """GPU-hours that each cause of interruption takes, the costliest first, with its count."""
    ranked = sorted(rows, key=lambda row: -row.gpu_hours.predicted)
    shown = ranked[:most][::-1]
    names = [f"{row.cause} ({row.interruptions:.1f}x)" for row in shown]
    chart = go.Figure()
    for key, (label, colour) in STOPS.items():
        chart.add_bar(
            name=label,
            x=[getattr(row, key) for row in shown],
            y=names,
            orientation="h",
            marker_color=colour,
            hovertemplate="%{y}, " + label + ": %{x:,.0f} GPU-hours<extra></extra>",
        )
    chart.update_layout(barmode="stack")
    chart.update_xaxes(title="GPU-hours, predicted")
    return styled(chart, 90 + 32 * max(3, len(shown)))


def outlook(rows: Sequence[OutlookRow]) -> go.Figure:
    """Probability that the run is done by each day, with the bill of that day.

    The hover text shows dates where the plan has a start date.
    """
    told = [f"{row.days:.1f} days" if row.finish is None else row.finish for row in rows]
    bills = ["" if row.cost_usd is None else f", ${row.cost_usd:,.0f}" for row in rows]
    chart = go.Figure(
        go.Scatter(
            x=[row.days for row in rows],
            y=[row.share for row in rows],
            mode="lines+markers",
            line={"color": BLUE, "width": 3},
            marker={"size": 5},
            fill="tozeroy",
            fillcolor="rgba(86, 180, 233, 0.2)",
            customdata=[[day, bill] for day, bill in zip(told, bills, strict=True)],
            hovertemplate="%{y:.0%} by %{customdata[0]}%{customdata[1]}<extra></extra>",
        )
    )
    for share, name in ((0.1, "P10"), (0.5, "P50"), (0.9, "P90")):
        chart.add_hline(y=share, line_dash="dot", line_color=GREY, annotation_text=name)
    chart.update_xaxes(title="days on the clock")
    chart.update_yaxes(title="chance to be done", tickformat=".0%", range=[0.0, 1.0])
    return styled(chart, 300)


def cost_parts(parts_usd: Mapping[str, float]) -> go.Figure:
    """Predicted cost of each part in dollars."""
    values = list(parts_usd.values())
    colours = [SERIES[number % len(SERIES)] for number in range(len(values))][::-1]
    texts = [f"${value:,.0f}" for value in values]
    chart = bars(list(parts_usd), values, texts, "%{y}: $%{x:,.0f}<extra></extra>", colours)
    chart.update_xaxes(title="predicted cost (US dollars)", tickprefix="$")
    return styled(chart, 110 + 36 * max(1, len(values)))


# -- sizes -------------------------------------------------------------------------------------------
# Charts of a sizing: cost against days, and the scaling curve.


class SizeDot(NamedTuple):
    """One size: its accelerator, GPUs, days and cost, and whether it is on the frontier."""

    accelerator: str
    gpus: int
    days: float
    usd: float
    on_front: bool


def size_frontier(dots: Sequence[SizeDot], days: float | None, usd: float | None) -> go.Figure:
    """Cost of the run against its days, a colour for each accelerator, with the frontier and the limits."""
    chart = go.Figure()
    front = sorted((dot.days, dot.usd) for dot in dots if dot.on_front)
    line = {"color": GREY, "dash": "dot"}
    days_of, usd_of = [x for x, _ in front], [y for _, y in front]
    add_points(chart, "frontier", days_of, usd_of, {}, "", "lines", line=line, hoverinfo="skip")
    for number, name in enumerate(dict.fromkeys(dot.accelerator for dot in dots)):
        own = [dot for dot in dots if dot.accelerator == name]
        marker = {"size": 10, "color": SERIES[number % len(SERIES)], "symbol": number % 8}
        add_points(
            chart, name, [dot.days for dot in own], [dot.usd for dot in own], marker,
            "%{text} GPUs: %{x:.1f} days, $%{y:,.0f}<extra>" + name + "</extra>", "markers+text",
            text=[f"{dot.gpus:,}" for dot in own], textposition="top center",
        )  # fmt: skip
    if days is not None:
        chart.add_vline(x=days, line={"color": RED, "dash": "dash"}, annotation_text="deadline")
    if usd is not None:
        chart.add_hline(y=usd, line={"color": RED, "dash": "dash"}, annotation_text="budget")
    chart.update_xaxes(title="days with interruptions, logarithmic scale", type="log")
    chart.update_yaxes(title="cost of the run ($)", type="log")
    return styled(chart, 420)


def scaling(
    lines: Mapping[str, Sequence[tuple[int, float]]], label: str, ideal_power: float | None
) -> go.Figure:
    """A figure against GPUs for each accelerator; with a power, the ideal from the smallest size on."""
    chart = go.Figure()
    for number, (name, points) in enumerate(lines.items()):
        colour = SERIES[number % len(SERIES)]
        gpus, values = [x for x, _ in points], [y for _, y in points]
        marker = {"size": 9, "color": colour}
        hover = f"{name}, %{{x:,}} GPUs: %{{y:.4g}}<extra></extra>"
        add_points(chart, name, gpus, values, marker, hover, "lines+markers")
        if ideal_power is not None and points:
            ideal = [values[0] * (x / gpus[0]) ** ideal_power for x in gpus]
            line = {"color": colour, "dash": "dot"}
            add_points(chart, f"{name}, ideal", gpus, ideal, {}, "", "lines", line=line, hoverinfo="skip")
    ticks = sorted({x for points in lines.values() for x, _ in points})
    chart.update_xaxes(
        title="GPUs, logarithmic scale", type="log", tickvals=ticks, ticktext=[f"{x:,}" for x in ticks]
    )
    chart.update_yaxes(title=label, type="log" if ideal_power is not None else "linear", rangemode="tozero")
    return styled(chart, 380)
