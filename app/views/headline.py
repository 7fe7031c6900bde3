"""The main figures of a result as tiles; used by several pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import streamlit as st

from moesim.app import page_style, tooltips
from moesim.app.confidence import badge, muted
from moesim.app.number_text import compact, money, written
from moesim.simulator.predict.band import Band
from moesim.simulator.predict.result import Result
from moesim.simulator.scenario import Scenario
from moesim.simulator.scoring.published import Row

__all__ = [
    "DeltaColour",
    "as_tile",
    "beside",
    "change",
    "colour",
    "compact",
    "ends",
    "interval",
    "money",
    "show",
]
__all__ += ["shortage", "sure", "tiles", "written"]

DeltaColour = Literal["normal", "inverse", "off"]


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


VERDICTS = {"fits": ("green", "check"), "at risk": ("orange", "warning"), "does not fit": ("red", "block")}
"""Colour and icon of a verdict on memory."""

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


WAITING = "P10 to P90: being computed"
"""Holds the place of an interval, so that nothing moves when it comes."""


def show(
    scenario: Scenario,
    result: Result,
    published: Mapping[str, str] | None = None,
    intervals: Mapping[str, str] | None = None,
    columns: int = 4,
    place: str = "figures",
) -> None:
    """Draw tiles in rows, each with its confidence, interval and distance from the published value.

    `published` and `intervals` hold words by the figure's name. An interval that is still being computed is
    `WAITING`. Figures of a roofline are drawn muted. `place`: unique name where a page draws this twice.
    """
    key = f"{page_style.MUTED}-{place}" if muted(result.confidence) else f"tiles-{place}"
    with st.container(key=key):
        if scenario.stages.blocks is not None:
            st.info(
                "Only a part of the model is simulated: throughput, MFU and cost of a run have no meaning "
                "here."
            )
            st.metric("Step time", f"{result.step.time_s:.4f} s")
            st.caption(badge(result.confidence))
            return
        helps = tooltips.of_result(scenario, result)
        rows = tiles(result)
        for start in range(0, len(rows), columns):
            for spot, (label, value, name) in zip(
                st.columns(columns), rows[start : start + columns], strict=False
            ):
                with spot, st.container(gap=None):
                    st.metric(label, value, help=helps.get(name))
                    lines = [source[name] for source in (intervals, published) if source and name in source]
                    if name in PRICED and not result.memory.fits:
                        lines.insert(0, DOES_NOT_FIT)
                    st.caption("  \n".join([badge(result.confidence), *lines]))
        st.caption(STATISTIC)


STATISTIC = (
    "Predicted values: every input at its stated value. Duration, GPU-hours and cost are of the main phase "
    "without stops; Run & cost has the whole run."
)


def beside(rows: Sequence[Row], bands: Mapping[str, Band] | None = None) -> dict[str, str]:
    """Distance from the published value in words, by the name of the figure.

    `bands`: intervals of the figures, where they are known; a published value outside its own is said to be.
    """
    found = {}
    for row in rows:
        name = FIGURES.get(row.quantity)
        if name is not None and name not in found:
            words = f"{row.relative_error:+.1%} from the published {as_tile(name, row)}"
            band = None if bands is None else bands.get(name)
            outside = (
                band is not None and not band.p10 <= row.published * UNITS.get(row.unit, 1.0) <= band.p90
            )
            found[name] = f"{words}  \nwhich is outside P10 to P90" if outside else words
    return found


UNITS = {"kh": 1e3, "M$": 1e6, "G": 1e9}
"""Factors of the units of published figures."""


def as_tile(name: str, row: Row) -> str:
    """A published value in the format of the tile beside it."""
    return written(name, row.published * UNITS.get(row.unit, 1.0))


FIGURES = {
    "time per step": "step_time_s",
    "MFU, causal": "mfu_causal",
    "MFU, non-causal": "mfu_noncausal",
    "tokens per day": "tokens_per_day",
    "pre-training GPU-hours for 14.8T tokens": "gpu_hours",
    "pre-training cost at $2 per GPU-hour": "cost_usd",
}
"""The figure that each published quantity (simulator/data/published) belongs to."""
