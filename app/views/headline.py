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


def written(name: str, value: float) -> str:
    """A figure (a name of `tiles`) as its tile shows it: 18.703 s, $5.01 M."""
    forms = {
        "step_time_s": f"{value:.3f} s",
        "tokens_per_s_per_gpu": f"{value:,.0f}",
        "mfu_causal": f"{value:.1%}",
        "mfu_noncausal": f"{value:.1%}",
        "days": f"{value:.1f} days",
        "cost_usd": money(value),
    }
    return forms.get(name, compact(value))


def change(name: str, value: float) -> str:
    """A difference of a figure as its tile is written: -0.534 s, +$120 k."""
    points = " points" if name.startswith("mfu") else ""
    return f"{'-' if value < 0 else '+'}{written(name, abs(value))}{points}"


def tiles(result: Result) -> list[tuple[str, str, str]]:
    """(label, value, figure's name in an interval) of the main figures."""
    step, run = result.step, result.run
    rows: list[tuple[str, str, float | None]] = [
        ("Step time", "step_time_s", step.time_s),
        ("Tokens/s/GPU", "tokens_per_s_per_gpu", step.tokens_per_s_per_gpu),
        ("MFU, causal", "mfu_causal", step.mfu_causal),
        ("MFU, non-causal", "mfu_noncausal", step.mfu_noncausal),
        ("Duration", "days", run.days),
        ("GPU-hours", "gpu_hours", run.gpu_hours),
        ("Cost", "cost_usd", run.cost_usd),
        ("Tokens a day", "tokens_per_day", step.tokens_per_day),
    ]
    return [
        (label, money(None) if value is None else written(name, value), name) for label, name, value in rows
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
    form = {"1": "{}", "kh": "{} k", "M$": "${} M", "G": "{} B"}.get(row.unit, "{} " + row.unit)
    return form.format(f"{row.published:.4g}")


FIGURES = {
    "time per step": "step_time_s",
    "MFU, causal": "mfu_causal",
    "MFU, non-causal": "mfu_noncausal",
    "tokens per day": "tokens_per_day",
    "pre-training GPU-hours for 14.8T tokens": "gpu_hours",
    "pre-training cost at $2 per GPU-hour": "cost_usd",
}
"""Published quantities (simulator/data/published) by the figure that they are about."""
