"""The texts with which plans and the result of a plan search print themselves (pure)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.simulator.common.summary_text import gib, percent, short, table_lines

if TYPE_CHECKING:
    from moesim.simulator.planner.result import PlanResult, PlanRow

MOST_PLANS = 4
"""Ranked plans that a printed search shows."""

PLAN_COLUMNS = ("plan", "step (s)", "from", "behind", "memory (GiB)", "days", "cost")


def row_text(row: PlanRow) -> str:
    """One plan in a line: step time with its source, memory, duration and cost."""
    figures = dict(zip(PLAN_COLUMNS, plan_cells(row), strict=True))
    return (
        f"{figures['plan']}, {row.recompute}, {row.precision}, {row.sms} SMs, ZeRO {row.zero_stage}: "
        f"{figures['step (s)']} s ({row.source}), {figures['memory (GiB)']} GiB, {figures['days']} days, "
        f"{figures['cost']}"
    )


def plan_cells(row: PlanRow) -> list[str]:
    """The cells of a plan below `PLAN_COLUMNS`."""
    return [
        row.label,
        f"{row.time_s:.3f}",
        row.source,
        percent(row.margin),
        f"{gib(row.memory_bytes)} of {gib(row.capacity_bytes)}",
        f"{row.days:.1f}",
        "no price" if row.cost_usd is None else f"${short(row.cost_usd)}",
    ]


def result_text(result: PlanResult) -> str:
    """The best plans, the scenario's own, and what the search counted, in about ten lines."""
    lines = [
        f"plans by {result.objective}: {result.considered:,} considered, {result.legal:,} legal, "
        f"{result.fitting:,} fit, {result.simulated:,} simulated",
        *table_lines([list(PLAN_COLUMNS), *map(plan_cells, result.ranked)], MOST_PLANS),
    ]
    if result.own is not None:
        rank = "" if result.own_rank is None else f" (rank {result.own_rank})"
        lines.append(f"  the scenario's own plan{rank}: {row_text(result.own)}")
    if result.rivals:
        lines.append(f"  {result.rivals:,} further families are within the error of the closed form")
    lines += [f"  note: {note}" for note in result.notes[:2]]
    return "\n".join([*lines, "  more: .best, .ranked, .pareto, .refused, .to_pandas()"])
