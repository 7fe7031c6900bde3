"""The text with which a sweep prints itself (pure)."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from moesim.simulator.common.summary_text import count, gib, percent, short, table_lines

if TYPE_CHECKING:
    from moesim.simulator.studies.sweep import Sweep, SweepPoint


def sweep_text(sweep: Sweep) -> str:
    """Points by status, the fastest point, and the first points with their figures, in about ten lines."""
    by_status = Counter(point.status for point in sweep.points)
    counted = ", ".join(f"{number:,} {status}" for status, number in by_status.items())
    lines = [f"sweep of {sweep.scenario}: {count(len(sweep.points), 'point')} ({counted})"]
    timed = [point for point in sweep.points if point.status == "ok"]
    if timed:
        best = min(timed, key=lambda point: float(point.figures["step_time_s"] or 0.0))
        values = ", ".join(f"{key}={value}" for key, value in best.values.items())
        lines.append(f"  fastest: {values}: {best.figures['step_time_s']:.3f} s")
    keys = list(dict.fromkeys(key for point in sweep.points for key in point.values))
    rows = [[*keys, "status", "step (s)", "MFU", "memory (GiB)", "days", "cost"]]
    rows += [[*(str(point.values.get(key, "")) for key in keys), *_figures(point)] for point in sweep.points]
    return "\n".join([*lines, *table_lines(rows), "  more: .rows(), .best(), .to_pandas()"])


def _figures(point: SweepPoint) -> list[str]:
    figure = point.figures
    if figure.get("step_time_s") is None:
        return [point.status, "", "", "", "", ""]
    cost = figure.get("cost_usd")
    return [
        point.status,
        f"{figure['step_time_s']:.3f}",
        percent(figure["mfu_causal"] or 0.0),
        gib(figure["memory_bytes"] or 0.0),
        f"{figure['days'] or 0.0:.1f}",
        "no price" if cost is None else f"${short(cost)}",
    ]
