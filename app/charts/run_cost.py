"""Charts of a whole run: where its GPU-hours go, what stops it, when it ends, what it is paid for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from moesim.app.charts.style import BLUE, GREY, ORANGE, PURPLE, RED, SERIES, SKY, YELLOW, styled
from moesim.simulator.run.report import CauseReport, GpuHours, Spread

OVERHEADS: Mapping[str, tuple[str, str]] = {
    "checkpoints": ("checkpoints", YELLOW),
    "lost": ("done again", RED),
    "detection": ("detection", ORANGE),
    "restart": ("restart", PURPLE),
    "waiting_for_spares": ("waiting for spares", GREY),
}
"""Parts of the job's GPU-hours that are no training that counts: name and colour."""

STOPS: Mapping[str, tuple[str, str]] = {
    "lost_gpu_hours": ("done again", RED),
    "detection_gpu_hours": ("detection", ORANGE),
    "restart_gpu_hours": ("restart", PURPLE),
}


def overheads(hours: GpuHours) -> go.Figure:
    """GPU-hours that are paid for and do not count as training, a bar a part."""
    parts = [(name, getattr(hours, key), colour) for key, (name, colour) in OVERHEADS.items()]
    shown = [part for part in parts if part[1] > 0.0][::-1]
    chart = go.Figure(
        go.Bar(
            x=[value for _, value, _ in shown],
            y=[name for name, _, _ in shown],
            orientation="h",
            marker_color=[colour for _, _, colour in shown],
            text=[f"{value:,.0f}" for _, value, _ in shown],
            textposition="auto",
            hovertemplate="%{y}: %{x:,.0f} GPU-hours<extra></extra>",
        )
    )
    chart.update_xaxes(title="GPU-hours besides productive ones, mean")
    return styled(chart, 110 + 40 * max(1, len(shown)))


def causes(rows: Sequence[CauseReport], most: int = 10) -> go.Figure:
    """GPU-hours that each cause of interruption takes, the costliest first, with its count."""
    ranked = sorted(
        rows, key=lambda row: -(row.lost_gpu_hours + row.detection_gpu_hours + row.restart_gpu_hours)
    )
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
    chart.update_xaxes(title="GPU-hours of the job, mean")
    return styled(chart, 90 + 32 * max(3, len(shown)))


def spreads(rows: Sequence[tuple[str, Spread]]) -> go.Figure:
    """P10 to P90 with the median and the mean of quantities of one unit (days)."""
    chart = go.Figure()
    names = [name for name, _ in rows]
    chart.add_scatter(
        name="P10 to P90, median",
        x=[spread.p50 for _, spread in rows],
        y=names,
        mode="markers",
        marker={"color": BLUE, "size": 12, "symbol": "diamond"},
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [spread.p90 - spread.p50 for _, spread in rows],
            "arrayminus": [spread.p50 - spread.p10 for _, spread in rows],
            "thickness": 4,
            "width": 10,
            "color": SKY,
        },
    )
    chart.add_scatter(
        name="mean",
        x=[spread.mean for _, spread in rows],
        y=names,
        mode="markers",
        marker={"color": ORANGE, "size": 10, "symbol": "x"},
    )
    chart.update_xaxes(title="days on the clock")
    return styled(chart, 120 + 40 * len(rows))


def cost_parts(parts_usd: Mapping[str, float]) -> go.Figure:
    """Dollars by part, mean over the simulated runs."""
    names = list(parts_usd)[::-1]
    chart = go.Figure(
        go.Bar(
            x=[parts_usd[name] for name in names],
            y=names,
            orientation="h",
            marker_color=[SERIES[number % len(SERIES)] for number in range(len(names))],
            text=[f"${parts_usd[name]:,.0f}" for name in names],
            textposition="auto",
            hovertemplate="%{y}: $%{x:,.0f}<extra></extra>",
        )
    )
    chart.update_xaxes(title="cost, mean (US dollars)", tickprefix="$")
    return styled(chart, 110 + 36 * max(1, len(names)))
