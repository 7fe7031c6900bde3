"""The main figures of a result as tiles; used by several pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import streamlit as st

from moesim.simulator.result import Result
from moesim.simulator.scenario import Scenario
from moesim.simulator.validation import Row


def money(value: float | None) -> str:
    """Dollars with three significant digits and a metric prefix."""
    return "no price" if value is None else f"${compact(value)}"


def compact(value: float) -> str:
    """A large number for people, three digits: 2.50 M."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:#.3g}".rstrip(".") + f" {unit}"
    return f"{value:.3g}"


def change(name: str, value: float) -> str:
    """A difference of a figure (a name of `tiles`) as its tile is written: -0.534 s, +$120 k."""
    sign, size = "-" if value < 0 else "+", abs(value)
    written = {
        "step_time_s": f"{size:.3f} s",
        "tokens_per_s_per_gpu": f"{size:,.0f}",
        "mfu_causal": f"{size:.1%} points",
        "mfu_noncausal": f"{size:.1%} points",
        "days": f"{size:.1f} days",
        "cost_usd": money(size),
    }
    return sign + written.get(name, compact(size))


def tiles(result: Result) -> list[tuple[str, str, str]]:
    """(label, value, figure's name in an interval) of the main figures."""
    step, run = result.step, result.run
    return [
        ("Step time", f"{step.time_s:.3f} s", "step_time_s"),
        ("Tokens/s/GPU", f"{step.tokens_per_s_per_gpu:,.0f}", "tokens_per_s_per_gpu"),
        ("MFU, causal", f"{step.mfu_causal:.1%}", "mfu_causal"),
        ("MFU, non-causal", f"{step.mfu_noncausal:.1%}", "mfu_noncausal"),
        ("Duration", f"{run.days:.1f} days", "days"),
        ("GPU-hours", compact(run.gpu_hours), "gpu_hours"),
        ("Cost", money(run.cost_usd), "cost_usd"),
        ("Tokens a day", compact(step.tokens_per_day), "tokens_per_day"),
    ]


def show(
    scenario: Scenario,
    result: Result,
    published: Mapping[str, str] | None = None,
    intervals: Mapping[str, str] | None = None,
    columns: int = 4,
) -> None:
    """Tiles in rows; below each its interval and its distance from what was published, where known."""
    if scenario.stages.blocks is not None:
        st.info(
            "Only a part of the model is simulated: throughput, MFU and cost of a run have no meaning here."
        )
        st.metric("Step time", f"{result.step.time_s:.4f} s")
        return
    rows = tiles(result)
    for start in range(0, len(rows), columns):
        for place, (label, value, name) in zip(
            st.columns(columns), rows[start : start + columns], strict=False
        ):
            with place:
                st.metric(label, value)
                lines = [source[name] for source in (intervals, published) if source and name in source]
                if lines:
                    st.caption("  \n".join(lines))


def beside(rows: Sequence[Row]) -> dict[str, str]:
    """Distance from the published value in words, by the name of the figure."""
    found = {}
    for row in rows:
        name = FIGURES.get(row.quantity)
        if name is not None and name not in found:
            found[name] = f"{row.relative_error:+.1%} from the published {as_tile(name, row)}"
    return found


def as_tile(name: str, row: Row) -> str:
    """A published value written as the tile beside it is."""
    if name.startswith("mfu"):
        return f"{row.published:.1%}"
    written = {"1": "{}", "kh": "{} k", "M$": "${} M", "G": "{} B"}.get(row.unit, "{} " + row.unit)
    return written.format(f"{row.published:.4g}")


FIGURES = {
    "time per step": "step_time_s",
    "MFU, causal": "mfu_causal",
    "MFU, non-causal": "mfu_noncausal",
    "tokens per day": "tokens_per_day",
    "pre-training GPU-hours for 14.8T tokens": "gpu_hours",
    "pre-training cost at $2 per GPU-hour": "cost_usd",
}
"""Published quantities (simulator/data/published) by the figure that they are about."""
