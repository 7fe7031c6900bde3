"""Charts of a sweep: one figure over one key, or over two keys as a heat map, with the best point marked."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from moesim.app.charts.style import BLUE, GREY, ORANGE, RED, SCALE, styled

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
        if own:
            chart.add_scatter(
                name=name,
                x=[x for x, _ in own],
                y=[y for _, y in own],
                mode="lines+markers" if fits and numbers else "markers",
                line={"color": colour},
                marker={"color": colour, "symbol": symbol, "size": 9},
                hovertemplate=f"{key} %{{x}}: %{{y:.4g}}<extra>{name}</extra>",
            )
    for name, value, colour, symbol in (
        ("best", best, ORANGE, "star"),
        ("the scenario now", now, RED, "diamond-open"),
    ):
        mine = [(x, y) for x, (v, y, _) in zip(place, points, strict=True) if v == value]
        if value is not None and mine:
            chart.add_scatter(
                name=name,
                x=[mine[0][0]],
                y=[mine[0][1]],
                mode="markers",
                marker={"color": colour, "symbol": symbol, "size": 16, "line": {"width": 2}},
                hovertemplate=f"{name}: {key} %{{x}}: %{{y:.4g}}<extra></extra>",
            )
    chart.update_xaxes(title=key, type=None if numbers else "category")
    chart.update_yaxes(title=title)
    return styled(chart, 380)


def grid(
    keys: tuple[str, str],
    title: str,
    points: Sequence[tuple[Value, Value, float | None, str]],
    best: tuple[Value, Value] | None,
) -> go.Figure:
    """A figure over the values of two keys; `points` are (across, up, figure or None, status)."""
    across = list(dict.fromkeys(str(x) for x, _, _, _ in points))
    up = list(dict.fromkeys(str(y) for _, y, _, _ in points))
    cells = {(str(x), str(y)): (z, status) for x, y, z, status in points}
    empty = (None, "not computed yet")
    chart = go.Figure(
        go.Heatmap(
            x=across,
            y=up,
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
    tight = [(str(x), str(y)) for x, y, z, status in points if status == "does not fit" and z is not None]
    for name, places, colour, symbol in (
        ("does not fit", tight, RED, "x"),
        ("best", [] if best is None else [(str(best[0]), str(best[1]))], ORANGE, "star"),
    ):
        if places:
            chart.add_scatter(
                name=name,
                x=[x for x, _ in places],
                y=[y for _, y in places],
                mode="markers",
                marker={
                    "color": colour,
                    "symbol": symbol,
                    "size": 16 if name == "best" else 8,
                    "line": {"width": 1, "color": "#0e1117"},
                },
                hoverinfo="skip",
            )
    chart.update_xaxes(title=keys[0], type="category")
    chart.update_yaxes(title=keys[1], type="category")
    return styled(chart, 180 + 34 * max(5, len(up)))
