"""Charts of the scoreboards: medians and coverage by set, and the error of every prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from moesim.app.charts.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    SERIES,
    add_points,
    bars,
    rows_axis,
    styled,
)
from moesim.hwmodels.calibration import CalibrationProfile, Entry, MeasuredCurve
from moesim.hwmodels.drift import Drift, PointDrift
from moesim.simulator.scoring.published import Row
from moesim.simulator.scoring.published_collectives import CollectiveRow
from moesim.simulator.scoring.scoreboard.rows import KeptScore

MOST = 30
"""Number of errors that are drawn."""
AIM = (0.7, 0.9)
"""Share of the published steps that an 80 % interval should contain (docs/validation.md)."""


def errors(rows: Sequence[Row], most: int = MOST) -> go.Figure:
    """Relative errors, the largest first; figures that a profile was calibrated on are hollow and grey."""
    shown = sorted(rows, key=lambda row: -abs(row.relative_error))[:most][::-1]
    names = readable(shown)
    chart = go.Figure()
    for name, calibrated, colour, symbol in (
        ("prediction", False, BLUE, "circle"),
        ("calibrated on this figure: no prediction", True, GREY, "circle-open"),
    ):
        own = [row for row in shown if row.used_for_calibration == calibrated]
        add_points(
            chart,
            name,
            [100.0 * row.relative_error for row in own],
            [names[row.id] for row in own],
            {"color": colour, "size": 10, "symbol": symbol},
            "%{customdata[0]}: published %{customdata[1]:,.4r}, "
            "predicted %{customdata[2]:,.4r} %{customdata[3]} (%{x:+.1f} %)<extra></extra>",
            customdata=[(row.quantity, row.published, row.predicted, row.unit) for row in own],
        )
    chart.add_vline(x=0.0, line={"color": ORANGE, "dash": "dot"})
    chart.update_yaxes(rows_axis([names[row.id] for row in shown]))
    chart.update_xaxes(title="error: predicted against published (%)", ticksuffix=" %")
    return styled(chart, 110 + 22 * max(4, len(shown)))


def readable(rows: Sequence[Row]) -> dict[str, str]:
    """Names of rows for people, unique: quantity and profile, with the row's source where two are alike."""
    names: dict[str, str] = {}
    for row in rows:
        source, _, profile = row.id.partition("@")
        name = f"{row.quantity}, {profile}" if profile else row.quantity
        names[row.id] = name if name not in names.values() else f"{name} ({source})"
    return names


def medians(scores: Sequence[KeptScore]) -> go.Figure:
    """Median absolute error of each set of published steps, with the share inside the 80 % interval."""
    errors = [score.median_absolute_error for score in scores]
    chart = bars(
        [f"{score.name} ({score.rows})" for score in scores],
        errors,
        [f"{error:.1%}" for error in errors],
        "%{y}: median %{x:.1%}, signed %{customdata[0]:+.1%}, inside the interval "
        "%{customdata[1]:.0%}<extra></extra>",
        textposition="outside",
        cliponaxis=False,
        customdata=[(score.median_error, score.covered) for score in scores][::-1],
    )
    most = max(errors, default=0.1)
    chart.update_xaxes(title="median absolute error of the step", tickformat=".0%", range=[0.0, 1.2 * most])
    return styled(chart, 80 + 26 * max(4, len(errors)))


def coverage(scores: Sequence[KeptScore]) -> go.Figure:
    """Share of the published steps inside the 80 % interval of their prediction; the aim is shaded."""
    shown = list(scores)[::-1]
    chart = go.Figure()
    add_points(
        chart,
        None,
        [score.covered for score in shown],
        [f"{score.name} ({score.rows})" for score in shown],
        {"color": GREEN, "size": 11, "symbol": "diamond"},
        "%{y}: %{x:.0%} inside P10 to P90<extra></extra>",
        "markers+text",
        text=[f"  {score.covered:.0%}" for score in shown],
        textposition="middle right",
    )
    chart.add_vrect(x0=AIM[0], x1=AIM[1], fillcolor=GREY, opacity=0.2, line_width=0)
    chart.update_xaxes(title="published steps inside P10 to P90", tickformat=".0%", range=[0.5, 1.08])
    chart.update_yaxes(range=[-0.7, len(shown) - 0.3])
    return styled(chart, 80 + 26 * max(4, len(shown)))


def collectives(rows: Sequence[CollectiveRow]) -> go.Figure:
    """Predicted against measured times of collectives on logarithmic axes, with the line of equality."""
    timed = [row for row in rows if row.unit == "s"]
    chart = go.Figure()
    if timed:
        low = min(min(row.measured, row.predicted) for row in timed)
        high = max(max(row.measured, row.predicted) for row in timed)
        line = {"color": ORANGE, "dash": "dot"}
        chart.add_scatter(
            name="equal", x=[low, high], y=[low, high], mode="lines", line=line, hoverinfo="skip"
        )
    for number, use in enumerate(dict.fromkeys(row.use for row in timed)):
        own = [row for row in timed if row.use == use]
        add_points(
            chart,
            use,
            [row.measured for row in own],
            [row.predicted for row in own],
            {"color": SERIES[number % len(SERIES)], "size": 7, "symbol": number},
            "%{customdata[0]} (%{customdata[1]}): measured %{x:.3s}s, predicted %{y:.3s}s, "
            "%{customdata[2]:+.1f} %<extra></extra>",
            customdata=[(row.id, row.how, 100.0 * row.relative_error) for row in own],
        )
    axis = {"type": "log", "exponentformat": "SI", "ticksuffix": "s", "dtick": 1}
    chart.update_xaxes(title="measured time (s)", **axis)
    chart.update_yaxes(title="predicted time (s)", **axis)
    return styled(chart, 480)


# -- calibration -------------------------------------------------------------------------------------
# Charts of a calibration profile: rates over SMs, slow-down under communication, stated errors, drift.

MARKERS = ("circle", "square", "diamond", "cross", "x", "triangle-up", "star", "hexagon")
KINDS: Mapping[str, str] = dict(
    zip(("measured", "published", "derived", "spec", "assumed"), SERIES, strict=False)
)


def sm_curves(profile: CalibrationProfile, unit: str) -> list[MeasuredCurve]:
    """Curves of a profile over a number of SMs whose values are in `unit` ("GB/s", "1")."""
    return [curve for curve in profile.curves if curve.x_unit == "SMs" and curve.y_unit == unit]


def over_sms(curves: Sequence[MeasuredCurve], title: str) -> go.Figure:
    """Measured points over communication SMs, each curve with its stated error as bars."""
    chart = go.Figure()
    for number, curve in enumerate(curves):
        x, y = zip(*(point[:2] for point in curve.points), strict=True)
        add_points(
            chart,
            curve.id,
            x,
            y,
            {"symbol": MARKERS[number % len(MARKERS)], "size": 8},
            f"{curve.id}: %{{y:,.4r}} {curve.y_unit} on %{{x}} SMs<extra></extra>",
            "lines+markers",
            line={"color": SERIES[number % len(SERIES)], "shape": "linear"},
            error_y={"type": "percent", "value": 100.0 * curve.residual.relative, "thickness": 1},
        )
    chart.update_xaxes(title="communication SMs", rangemode="tozero")
    chart.update_yaxes(title=title, rangemode="tozero")
    return styled(chart, 440)


def slow_downs(lines: Mapping[str, Sequence[tuple[int, float]]]) -> go.Figure:
    """Slow-down against the number of busy communication SMs, one line per group of operators."""
    chart = go.Figure()
    for number, (name, points) in enumerate(lines.items()):
        x, y = zip(*points, strict=True)
        marker = {"symbol": MARKERS[number % len(MARKERS)], "size": 7}
        hover, line = (
            f"{name}: %{{y:.3f}}x beside %{{x}} SMs<extra></extra>",
            {"color": SERIES[number % len(SERIES)]},
        )
        add_points(chart, name, x, y, marker, hover, "lines+markers", line=line)
    chart.update_xaxes(title="communication SMs", rangemode="tozero")
    chart.update_yaxes(title="slow-down (time / time alone)")
    return styled(chart, 440)


def residuals(entries: Sequence[Entry], most: int = MOST) -> go.Figure:
    """The error that each entry states for itself, the largest first, coloured and marked by its kind."""
    ranked = sorted(entries, key=lambda entry: (entry.residual.relative, entry.id))[-most:]
    chart = go.Figure()
    for number, (kind, colour) in enumerate(KINDS.items()):
        own = [entry for entry in ranked if entry.kind == kind]
        add_points(
            chart,
            kind,
            [100.0 * entry.residual.relative for entry in own],
            [entry.id for entry in own],
            {"color": colour, "size": 10, "symbol": MARKERS[number]},
            "%{y}: ±%{x:.1f} %, %{customdata}<extra></extra>",
            customdata=[entry.residual.meaning for entry in own],
        )
    chart.update_yaxes(rows_axis([entry.id for entry in ranked]))
    chart.update_xaxes(title="stated error (±)", rangemode="tozero", ticksuffix=" %")
    return styled(chart, 110 + 22 * max(4, len(ranked)))


def drift_points(points: Sequence[PointDrift], most: int = MOST) -> go.Figure:
    """The clearest changes of single shapes on top; bars are both stated errors together.

    A change is within its error exactly where its bar holds zero.
    """
    shown = list(points[:most])[::-1]
    names = [f"{point.entry}, {point.point}" for point in shown]
    chart = go.Figure()
    for title, colour, symbol, chosen in (
        ("within both errors", GREY, "circle", [not p.is_beyond for p in shown]),
        ("beyond both errors", ORANGE, "diamond", [p.is_beyond and not p.is_clear for p in shown]),
        ("beyond, and not by chance", RED, "x", [p.is_clear for p in shown]),
    ):
        own = [(name, p) for name, p, yes in zip(names, shown, chosen, strict=True) if yes]
        errors = [100.0 * (p.old_error + p.new_error) for _, p in own]
        add_points(
            chart,
            title,
            [100.0 * p.change for _, p in own],
            [name for name, _ in own],
            {"color": colour, "size": 9, "symbol": symbol},
            "%{y}: %{x:+.1f} ± %{customdata[0]:.1f} % (stated errors %{customdata[1]:.1f} "
            "and %{customdata[2]:.1f} %)<extra></extra>",
            error_x={"type": "data", "array": errors, "color": colour, "thickness": 1.5},
            customdata=[
                [e, 100.0 * p.old_error, 100.0 * p.new_error] for e, (_, p) in zip(errors, own, strict=True)
            ],
        )
    chart.add_vline(x=0.0, line={"color": GREY, "dash": "dot"})
    chart.update_yaxes(rows_axis(names))
    chart.update_xaxes(title="change, new over old (%)", ticksuffix=" %")
    return styled(chart, 130 + 22 * max(4, len(shown)))


def drift(rows: Sequence[Drift]) -> go.Figure:
    """Median change of common entries and each changed point, beside the change that stated errors allow."""
    shown = [row for row in rows if row.points][::-1]
    chart = go.Figure()
    moved = [(row.id, key, change) for row in shown for key, change in row.changed]
    for name, points, colour, symbol in (
        ("median of the entry", [(r.id, "median", r.median) for r in shown], BLUE, "circle"),
        ("shape or point beyond the stated errors", moved, RED, "x"),
    ):
        add_points(
            chart,
            name,
            [100.0 * change for _, _, change in points],
            [id_ for id_, _, _ in points],
            {"color": colour, "size": 9, "symbol": symbol},
            "%{y}, %{customdata}: %{x:+.1f} %<extra></extra>",
            customdata=[key for _, key, _ in points],
        )
    chart.add_bar(
        name="stated errors together",
        base=[-100.0 * row.allowed for row in shown],
        x=[200.0 * row.allowed for row in shown],
        y=[row.id for row in shown],
        orientation="h",
        marker={"color": GREY, "opacity": 0.35},
        hoverinfo="skip",
    )
    chart.add_vline(x=0.0, line={"color": ORANGE, "dash": "dot"})
    chart.update_yaxes(rows_axis([row.id for row in shown]))
    chart.update_xaxes(title="change, new over old (%)", ticksuffix=" %")
    return styled(chart, 130 + 24 * max(3, len(shown)))
