"""Charts of a fleet: what each pool holds and costs, and how long its ranks are busy in a step."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from moesim.app.charts.style import BLUE, GREEN, GREY, ORANGE, styled


def busy(rows: Sequence[tuple[str, float, float]]) -> go.Figure:
    """Seconds of a step that the ranks of each pool are busy and idle; `rows` are (pool, busy, idle)."""
    chart = go.Figure()
    names = [name for name, _, _ in rows]
    for title, place, colour, ink in (("busy", 1, BLUE, "#ffffff"), ("idle", 2, GREY, "#0e1117")):
        values = [row[place] for row in rows]
        chart.add_bar(
            name=title,
            y=names,
            x=values,
            orientation="h",
            marker={"color": colour},
            text=[f"{value:.2f} s" for value in values],
            textposition="inside",
            insidetextanchor="middle",
            constraintext="none",
            textangle=0,
            textfont={"color": ink},
            hovertemplate=f"%{{y}}: {title} %{{x:.3f}} s<extra></extra>",
        )
    chart.update_layout(barmode="stack")
    chart.update_xaxes(title="seconds of a step")
    chart.update_yaxes(autorange="reversed", type="category")
    return styled(chart, 130 + 48 * max(2, len(rows)))


def shares(rows: Sequence[tuple[str, float, float, float | None]]) -> go.Figure:
    """Each pool's share of GPUs, layers and rent; `rows` are (pool, GPUs, layers, dollars or None)."""
    chart = go.Figure()
    names = [name for name, _, _, _ in rows]
    for title, place, colour in (("GPUs", 1, BLUE), ("layers", 2, GREEN), ("rent", 3, ORANGE)):
        values = [row[place] for row in rows]
        if all(value is not None for value in values):
            chart.add_bar(
                name=title,
                y=names,
                x=values,
                orientation="h",
                marker={"color": colour},
                text=[f"{value:.0%}" for value in values],
                textposition="auto",
                hovertemplate=f"%{{y}}: %{{x:.1%}} of the {title}<extra></extra>",
            )
    chart.update_layout(barmode="group")
    chart.update_xaxes(title="share of the fleet", tickformat=".0%", range=[0, 1])
    chart.update_yaxes(autorange="reversed", type="category")
    return styled(chart, 130 + 72 * max(2, len(rows)))
