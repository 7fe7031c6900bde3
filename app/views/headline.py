"""The main figures of a result as tiles; used by several pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import streamlit as st

from moesim.simulator.predict.band import Band
from moesim.simulator.predict.result import Result
from moesim.simulator.scenario import Scenario
from moesim.simulator.scoring.published import Row

DeltaColour = Literal["normal", "inverse", "off"]


def money(value: float | None) -> str:
    """Dollars with three significant digits and a metric prefix."""
    return "no price" if value is None else f"${compact(value)}"


def compact(value: float) -> str:
    """A large number with three digits and a metric prefix, such as "2.50 M"."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:#.3g}".rstrip(".") + f" {unit}"
    return f"{value:.3g}"


def written(name: str, value: float) -> str:
    """A figure (a name of `tiles`) as its tile shows it, such as "18.703 s" or "$5.01 M"."""
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
    """A difference in a figure, such as "-0.534 s" or "+$120 k"; `SAME` where no shown digit differs."""
    if written(name, abs(value)) == written(name, 0.0):
        return SAME
    points = " points" if name.startswith("mfu") else ""
    return f"{'-' if value < 0 else '+'}{written(name, abs(value))}{points}"


SAME = "the same"


def ends(name: str, band: Band) -> str:
    """P10 and P90 of a figure, such as "16.1 s to 21.3 s"."""
    return f"{written(name, band.p10)} to {written(name, band.p90)}"


def interval(name: str, band: Band) -> str:
    """The labelled interval of a figure, such as "P10 to P90: 16.1 s to 21.3 s"."""
    return f"P10 to P90: {ends(name, band)}"


def sure(name: str, bands: Mapping[str, Band] | None) -> tuple[bool, str]:
    """(whether a difference exceeds its own uncertainty, its interval in words).

    `bands` come from `studies.compare.bands_of_changes`; while they are None, no difference counts as sure.
    """
    if bands is None or name not in bands:
        return False, ""
    band = bands[name]
    low, high = (change(name, end) for end in (band.p10, band.p90))
    if band.has_sign:
        return True, f"P10 to P90: {low} to {high}"
    return False, f"within its uncertainty (P10 to P90: {low} to {high})"


def colour(name: str, bands: Mapping[str, Band] | None, more_is_better: bool) -> DeltaColour:
    """The colour of a difference on a tile; grey where it is not known to exceed its uncertainty."""
    if bands is None or name not in bands or not bands[name].has_sign:
        return "off"
    return "normal" if more_is_better else "inverse"


def shortage(result: Result) -> None:
    """Warn, before any figure, that the plan does not fit and cannot run as it is."""
    words = result.memory.shortage
    if words is not None:
        st.error(
            f"This plan {words}. Every time and price here is that of a plan which cannot run as it is.",
            icon=":material/memory:",
        )


DOES_NOT_FIT = "of a plan that does not fit"
PRICED = frozenset({"days", "gpu_hours", "cost_usd"})
"""Figures of a run that are marked where the plan does not fit."""


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
    """Draw tiles in rows, each with its interval and its distance from the published value, where known."""
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
                if name in PRICED and not result.memory.fits:
                    lines.insert(0, DOES_NOT_FIT)
                if lines:
                    st.caption("  \n".join(lines))
    st.caption(STATISTIC)


STATISTIC = (
    "Predicted values: every input at its stated value. Duration, GPU-hours and cost are of the main phase "
    "without stops; Run & cost has the whole run."
)


def beside(rows: Sequence[Row]) -> dict[str, str]:
    """Distance from the published value in words, by the name of the figure."""
    found = {}
    for row in rows:
        name = FIGURES.get(row.quantity)
        if name is not None and name not in found:
            found[name] = f"{row.relative_error:+.1%} from the published {as_tile(name, row)}"
    return found


def as_tile(name: str, row: Row) -> str:
    """A published value in the format of the tile beside it."""
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
"""The figure that each published quantity (simulator/data/published) belongs to."""
