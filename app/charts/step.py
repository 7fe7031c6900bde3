"""Charts of one step: breakdown by rank, critical path, memory, bounds, overlapped pairs, busy shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from moesim.app.charts.style import (
    BLUE,
    CATEGORIES,
    GREEN,
    GREY,
    INK,
    MEMORY,
    OLIVE,
    ORANGE,
    PURPLE,
    RED,
    SCALE,
    SKY,
    TEAL,
    WINE,
    YELLOW,
    add_points,
    bars,
    styled,
)
from moesim.hwmodels.topologies.base import Picture
from moesim.hwmodels.units import in_unit
from moesim.simulator.engine.full_resolution.result import HeatMap
from moesim.simulator.predict.result_parts import Breakdown, CauseRow, MemoryResult, PhaseSpan, StepResult


def breakdown(ranks: Sequence[Breakdown]) -> go.Figure:
    """Seconds of a step by part, stacked per pipeline rank; exposed communication is drawn as a line."""
    names = [str(number) for number in range(len(ranks))]
    chart = go.Figure()
    for key, (label, colour) in CATEGORIES.items():
        values = [getattr(rank, key) for rank in ranks]
        hover = label + ": %{y:.3f} s<extra></extra>"
        chart.add_bar(name=label, x=names, y=values, marker_color=colour, hovertemplate=hover)
    add_points(
        chart,
        "of these, waiting for communication",
        names,
        [rank.exposed_communication for rank in ranks],
        {"symbol": "diamond", "color": RED},
        "waiting for communication: %{y:.3f} s<extra></extra>",
        "lines+markers",
        line={"color": RED, "dash": "dot"},
    )
    chart.update_layout(barmode="stack")
    chart.update_xaxes(title="pipeline rank", type="category")
    chart.update_yaxes(title="time in a step (s)")
    return styled(chart, 430)


def critical_path(rows: Sequence[CauseRow], most: int = 10) -> go.Figure:
    """Seconds of the critical path by cause, the longest first."""
    seconds = [row.seconds for row in rows[:most]]
    texts = [f"{value:.2f} s" for value in seconds]
    chart = bars([words(row.cause) for row in rows[:most]], seconds, texts, "%{y}: %{x:.3f} s<extra></extra>")
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
    chart, rows = go.Figure(), ["step", "step"]
    ends = [step.lower_bound_s, step.upper_bound_s]
    tick: dict[str, Any] = {"symbol": "line-ns-open", "size": 18}
    line = {"color": GREY, "width": 4}
    add_points(
        chart, "bounds", ends, rows, tick, "bound: %{x:.3f} s<extra></extra>", "lines+markers", line=line
    )
    if band is not None:
        line = {"color": ORANGE, "width": 12}
        add_points(chart, "P10 to P90", band, rows, {}, "%{x:.3f} s<extra></extra>", "lines", line=line)
    diamond = {"symbol": "diamond", "size": 14, "color": BLUE}
    add_points(chart, "predicted", [step.time_s], ["step"], diamond, "predicted: %{x:.3f} s<extra></extra>")
    chart.update_xaxes(title="step time (s)", rangemode="tozero")
    chart.update_yaxes(showticklabels=False)
    return styled(chart, 150)


def pair_phases(rows: Sequence[PhaseSpan]) -> go.Figure:
    """Mean duration of each phase inside an overlapped pair, and the mean wait at the phase's barrier."""
    names = [words(row.phase) for row in rows]
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
    texts = [f"{share:.0%}" for share in shares.values()]
    chart = bars(list(shares), list(shares.values()), texts, "%{y}: %{x:.1%}<extra></extra>")
    chart.update_xaxes(title="busy share of the step", tickformat=".0%", range=[0, 1], dtick=0.25)
    return styled(chart, 320)


# -- timeline kinds ----------------------------------------------------------------------------------
# Words and colours of what a timeline shows: schedule actions, phases, sends and the end of the step.

ACTIONS: Mapping[str, str] = {
    "F": BLUE,
    "F&B": GREEN,
    "F&I": TEAL,
    "B": RED,
    "I": ORANGE,
    "W": YELLOW,
    "gradient reduction": "#CC6677",
    "gradient norm": GREY,
    "optimizer": INK,
    "parameter gather": "#A0CBE8",
}
"""Schedule actions and the end of a step, each with a colour of its own."""

PHASES: Mapping[str, str] = {
    "attn F": "#3B3BCE",
    "mlp F": "#56B4E9",
    "attn I": "#72721D",
    "mlp I": "#E0CE85",
    "attn W": "#CE3BB1",
    "mlp W": "#DF9DE7",
    "dispatch F": "#4ACE3B",
    "dispatch B": "#90BC4E",
    "combine F": "#8774B4",
    "combine B": "#A154D4",
    "gather": "#298BA3",
    "scatter": "#8B4C23",
    "wait for": "#BC2F2F",
    "notify": "#BC2F2F",
    "prepare": "#E0A085",
    "send activation": "#5D5932",
    "send gradient": "#CE853B",
    "pipeline send": "#5D5932",
    "other waiting": "#EDB6CC",
}
"""First words of phases of an action, of pipeline sends and of causes of the critical path.

No colour is that of another kind or of an action, as all of them stand together in "Every event"; what two
rows show of one thing (a send, a wait) has one. Each is as far as possible from all before it in CIELAB.
"""

WORDS = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "F&B": "F&B pair",
    "F&I": "F&I pair",
    "notify": "wait for other GPUs",
    **{
        f"{part} {half}": f"{name} {word}"
        for part, name in (("attn", "attention"), ("mlp", "MLP"))
        for half, word in (("F", "forward"), ("I", "input gradient"), ("W", "weight gradient"))
    },
}
"""Schedule actions in the words of the field."""


def colour(kind: str) -> str:
    """The colour of an action or a phase."""
    if kind in ACTIONS:
        return ACTIONS[kind]
    return next((value for name, value in PHASES.items() if kind.startswith(name)), GREY)


def words(kind: str) -> str:
    """An action or a phase in the words of the field."""
    return WORDS.get(kind, kind)


CLASS_COLOURS: Mapping[str, Sequence[str]] = {
    BLUE: ("gemm", "wgrad_gemm", "gate_gemm"),
    SKY: ("grouped_gemm",),
    PURPLE: ("attention_forward", "attention_backward", "attention_pre_post", "scan", "indexer"),
    TEAL: ("permute", "topk", "transpose", "embedding"),
    GREEN: ("norm", "swiglu", "rope", "elementwise", "loss"),
    OLIVE: ("cast", "copy", "fsdp_copy"),
    WINE: ("optimizer", "clip"),
    RED: ("all_to_all", "ep_dispatch", "ep_combine", "ep_notify"),
    ORANGE: ("all_gather", "reduce_scatter", "all_reduce"),
    YELLOW: ("send_recv", "broadcast", "other_communication"),
    INK: ("not_in_model", "unclassified"),
}


def class_colour(name: str) -> str:
    """The colour of a class of kernels (`moesim.simulator.trace.classes`); copies and fills are grey."""
    return next((colour for colour, names in CLASS_COLOURS.items() if name in names), GREY)


# -- heat maps ---------------------------------------------------------------------------------------
# Heat maps, and the picture of a cluster.

KINDS = {"gpu": (BLUE, "square"), "leaf": (ORANGE, "diamond"), "spine": (PURPLE, "diamond-wide")}


NAMES = {
    "gpu": "GPUs",
    "leaf": "leaf switches",
    "spine": "spine switches",
    "nvswitch": "NVSwitches",
    "nvlink": "NVLink",
    "nic": "NIC to leaf",
    "leaf-spine": "leaf to spine",
}
"""Kinds of parts and cables in words; other kinds keep their names."""


def heat_map(data: HeatMap) -> go.Figure:
    """A table of figures as a heat map; cells without a value stay blank."""
    chart = go.Figure(
        go.Heatmap(
            z=[list(row) for row in data.values],
            x=list(data.columns),
            y=list(data.rows),
            colorscale=SCALE,
            colorbar={"title": {"text": data.unit, "side": "right"}},
            hovertemplate=f"{data.row_label} %{{y}}, {data.column_label} %{{x}}: %{{z:,.4r}}<extra></extra>",
        )
    )
    chart.update_xaxes(title=data.column_label, type="category", nticks=24)
    chart.update_yaxes(title=data.row_label, type="category", autorange="reversed", nticks=24)
    return styled(chart, min(620, 220 + 9 * len(data.rows)), data.title)


def picture(data: Picture) -> go.Figure:
    """Draw part of a cluster in layers, with network switches above the GPUs and scale-up switches below."""
    chart = go.Figure()
    for kind in dict.fromkeys(cable.kind for cable in data.cables):
        mine = [cable for cable in data.cables if cable.kind == kind]
        x: list[float | None] = []
        y: list[float | None] = []
        for cable in mine:
            (x0, y0), (x1, y1) = data.places[cable.tail], data.places[cable.head]
            x += [x0, x1, None]
            y += [y0, y1, None]
        name = f"{NAMES.get(kind, kind)}: {mine[0].rate} a direction"
        line = {"width": 1, "color": GREEN if kind in data.scale_up_kinds else GREY}
        chart.add_scatter(name=name, x=x, y=y, mode="lines", line=line, opacity=0.6, hoverinfo="skip")
    for layer in data.layers:
        across, up = zip(*(data.places[name] for name in layer.shown), strict=True)
        colour, symbol = KINDS.get(layer.kind, (GREEN, "circle"))
        marker = {"symbol": symbol, "size": 13, "color": colour, "line": {"width": 1, "color": "black"}}
        name = f"{layer.count:,} {NAMES.get(layer.kind, layer.kind)}"
        if layer.left_out:
            name += f" ({len(layer.shown)} shown)"
        add_points(chart, name, across, up, marker, "%{text}<extra></extra>", text=list(layer.shown))
    chart.update_xaxes(visible=False)
    chart.update_yaxes(visible=False)
    return styled(chart, 380)


# -- fleet -------------------------------------------------------------------------------------------
# Charts of a fleet: what each pool holds and costs, and how long its ranks are busy in a step.


def pools_busy(rows: Sequence[tuple[str, float, float]]) -> go.Figure:
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
