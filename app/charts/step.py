"""Charts of one step: breakdown by rank, critical path, memory, bounds, overlapped pairs, busy shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from moesim.app.charts.style import (
    BLUE,
    CATEGORIES,
    GREEN,
    GREY,
    MEMORY,
    ORANGE,
    RED,
    styled,
)
from moesim.hwmodels.units import in_unit
from moesim.simulator.predict.result_parts import Breakdown, CauseRow, MemoryResult, PhaseSpan, StepResult


def breakdown(ranks: Sequence[Breakdown]) -> go.Figure:
    """Seconds of a step by part, stacked per pipeline rank; exposed communication is drawn as a line."""
    names = [str(number) for number in range(len(ranks))]
    chart = go.Figure()
    for key, (label, colour) in CATEGORIES.items():
        values = [getattr(rank, key) for rank in ranks]
        chart.add_bar(
            name=label,
            x=names,
            y=values,
            marker_color=colour,
            hovertemplate=label + ": %{y:.3f} s<extra></extra>",
        )
    chart.add_scatter(
        name="of these, waiting for communication",
        x=names,
        y=[rank.exposed_communication for rank in ranks],
        mode="lines+markers",
        line={"color": RED, "dash": "dot"},
        marker={"symbol": "diamond", "color": RED},
        hovertemplate="waiting for communication: %{y:.3f} s<extra></extra>",
    )
    chart.update_layout(barmode="stack")
    chart.update_xaxes(title="pipeline rank", type="category")
    chart.update_yaxes(title="time in a step (s)")
    return styled(chart, 430)


def critical_path(rows: Sequence[CauseRow], most: int = 10) -> go.Figure:
    """Seconds of the critical path by cause, the longest first."""
    shown = list(rows[:most])[::-1]
    chart = go.Figure(
        go.Bar(
            x=[row.seconds for row in shown],
            y=[row.cause for row in shown],
            orientation="h",
            marker_color=BLUE,
            text=[f"{row.seconds:.2f} s" for row in shown],
            textposition="auto",
            hovertemplate="%{y}: %{x:.3f} s<extra></extra>",
        )
    )
    chart.update_xaxes(title="time on the critical path (s)")
    return styled(chart, 340)


def memory(part: MemoryResult) -> go.Figure:
    """Bytes of the fullest GPU by kind, against its capacity."""
    chart = go.Figure()
    kinds = sorted(part.by_kind_bytes.items(), key=lambda item: (-item[1], item[0]))
    for kind, size in kinds:
        chart.add_bar(
            name=kind.replace("_", " "),
            x=[in_unit(size, "GiB", "bytes")],
            y=["GPU"],
            orientation="h",
            marker_color=MEMORY.get(kind, GREY),
            hovertemplate=kind.replace("_", " ") + ": %{x:.2f} GiB<extra></extra>",
        )
    chart.add_vline(
        x=in_unit(part.capacity_bytes, "GiB", "bytes"),
        line={"color": RED, "width": 3, "dash": "dash"},
        annotation_text="capacity",
        annotation_position="top left",
    )
    chart.update_layout(barmode="stack")
    chart.update_xaxes(title="memory of the fullest GPU (GiB)", rangemode="tozero")
    chart.update_yaxes(showticklabels=False)
    return styled(chart, 190)


def bounds(step: StepResult, band: tuple[float, float] | None = None) -> go.Figure:
    """The step time between its lower and upper bound; `band` holds its P10 and P90, where known."""
    chart = go.Figure()
    chart.add_scatter(
        x=[step.lower_bound_s, step.upper_bound_s],
        y=["step", "step"],
        mode="lines+markers",
        name="bounds",
        line={"color": GREY, "width": 4},
        marker={"symbol": "line-ns-open", "size": 18},
        hovertemplate="bound: %{x:.3f} s<extra></extra>",
    )
    if band is not None:
        chart.add_scatter(
            x=list(band),
            y=["step", "step"],
            mode="lines",
            name="P10 to P90",
            line={"color": ORANGE, "width": 12},
            hovertemplate="%{x:.3f} s<extra></extra>",
        )
    chart.add_scatter(
        x=[step.time_s],
        y=["step"],
        mode="markers",
        name="predicted",
        marker={"symbol": "diamond", "size": 14, "color": BLUE},
        hovertemplate="predicted: %{x:.3f} s<extra></extra>",
    )
    chart.update_xaxes(title="step time (s)", rangemode="tozero")
    chart.update_yaxes(showticklabels=False)
    return styled(chart, 150)


def pair_phases(rows: Sequence[PhaseSpan]) -> go.Figure:
    """Mean duration of each phase inside an overlapped pair, and the mean wait at the phase's barrier."""
    names = [row.phase for row in rows]
    chart = go.Figure()
    for name, values, colour in (
        ("duration", [row.seconds for row in rows], GREEN),
        ("wait at its barrier", [row.wait_s for row in rows], RED),
    ):
        chart.add_bar(
            name=name,
            x=names,
            y=[in_unit(value, "ms", "s") for value in values],
            marker_color=colour,
            hovertemplate=f"{name} of %{{x}}: %{{y:.2f}} ms<extra></extra>",
        )
    chart.update_layout(barmode="stack")
    chart.update_xaxes(title="phase of one MoE layer")
    chart.update_yaxes(title="mean time (ms)")
    return styled(chart, 320)


def busy(shares: Mapping[str, float]) -> go.Figure:
    """Busy shares of the resources over the step."""
    names = list(shares)[::-1]
    chart = go.Figure(
        go.Bar(
            x=[shares[name] for name in names],
            y=names,
            orientation="h",
            marker_color=BLUE,
            text=[f"{shares[name]:.0%}" for name in names],
            textposition="auto",
            hovertemplate="%{y}: %{x:.1%}<extra></extra>",
        )
    )
    chart.update_xaxes(title="busy share of the step", tickformat=".0%", range=[0, 1], dtick=0.25)
    return styled(chart, 320)
