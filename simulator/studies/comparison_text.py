"""The text with which a comparison prints itself (pure)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.simulator.common.summary_text import gib, percent, short, table_lines

if TYPE_CHECKING:
    from moesim.simulator.studies.compare import Comparison, Side

MOST_CAUSES = 3
"""Causes of the differences that a printed comparison shows."""


def comparison_text(comparison: Comparison) -> str:
    """The main figures of every scenario and the causes that differ most, in about ten lines."""
    sides = comparison.sides
    rows = [["scenario", "step (s)", "change (s)", "MFU", "memory (GiB)", "days", "cost"]]
    rows += [_row(side, sides[0]) for side in sides]
    lines = [f"comparison of {len(sides)} scenarios with {sides[0].name}", *table_lines(rows)]
    differing = [w for w in comparison.waterfall if max(w.seconds) != min(w.seconds)][:MOST_CAUSES]
    if differing:
        lines.append("  largest differences on the critical path, seconds:")
        lines += [f"    {w.cause}: {' -> '.join(f'{s:.3f}' for s in w.seconds)}" for w in differing]
    return "\n".join([*lines, "  more: .rows(), .waterfall_rows(), .to_pandas()"])


def _row(side: Side, first: Side) -> list[str]:
    figure = side.figures
    step, base = figure["step_time_s"] or 0.0, first.figures["step_time_s"] or 0.0
    cost = figure["cost_usd"]
    return [
        side.name,
        f"{step:.3f}",
        "" if side is first else f"{step - base:+.3f}",
        percent(figure["mfu_causal"] or 0.0),
        gib(figure["memory_bytes"] or 0.0) + ("" if figure["fits"] else ", does not fit"),
        f"{figure['days'] or 0.0:.1f}",
        "no price" if cost is None else f"${short(cost)}",
    ]
