"""The table of plans on the page Planner, and how sure their distances from the best are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import streamlit as st
from pandas.io.formats.style import Styler

from moesim.app import background, predictions, state
from moesim.app.escaping import escaped
from moesim.app.views import headline
from moesim.hwmodels.arrays import FloatArray
from moesim.hwmodels.errors import MoesimError
from moesim.hwmodels.units import in_unit
from moesim.simulator.planner.result import PlanResult, PlanRow
from moesim.simulator.predict.band import Band
from moesim.simulator.studies.compare import bands_of_margins

DISTANCE = ["behind best", "P10 to P90"]
"""Columns that are grey where the distance from the best may as well be none."""

GREY = {"light": "color: #6b7280", "dark": "color: #9ca3af"}
"""By theme, each with at least 4.5 to 1 against its page."""


def draws(found: PlanResult) -> list[FloatArray] | None:
    """Random draws of every ranked plan's step time, relative to the predicted one.

    None until they are computed, and for a fleet.
    """
    scenarios = [row.scenario for row in found.ranked]
    if scenarios[0].fleet is not None:
        return None
    keys = " ".join(map(state.cache_key, scenarios))
    try:
        known: list[FloatArray] | None = background.value(
            "ranked plans",
            f"draws of plans/{hashlib.sha256(keys.encode()).hexdigest()}",
            "how sure this is: being computed",
            predictions.draws_of_plans,
            scenarios,
        )
    except MoesimError as error:
        st.caption(f"No interval: {escaped(error)}")
        return None
    return known


def behind(found: PlanResult, known: Sequence[FloatArray] | None) -> list[Band | None]:
    """Intervals of how far each ranked plan is behind the best; memory has none, because no step pays it."""
    if known is None or found.objective == "memory":
        return [None] * len(found.ranked)
    return [None, *bands_of_margins([row.margin for row in found.ranked], known)[1:]]


def interval(written: Callable[[float], str], value: float, known: Sequence[FloatArray]) -> str:
    """The interval of a figure of the best plan that is proportional to its step time."""
    low, high = np.quantile(known[0], [0.1, 0.9])
    return f"P10 to P90: {written(value * low)} to {written(value * high)}"


def choice(
    rows: Sequence[PlanRow], name: str, margins: Sequence[Band | None] | None = None
) -> PlanRow | None:
    """Draw plans as a table and return the chosen one; `margins`: how sure "behind best" is."""
    bands = margins or [None] * len(rows)
    event: Any = st.dataframe(
        styled(rows, bands, st.context.theme.type or "light"),
        hide_index=True,
        key=f"table {name}",
        on_select="rerun",
        selection_mode="single-row",
        column_config={
            "plan": st.column_config.TextColumn(width=max(map(_label_px, rows))),
            "step (s)": st.column_config.NumberColumn(format="%.3f"),
            "GiB": st.column_config.NumberColumn(format="%.1f"),
            "behind best": st.column_config.NumberColumn(format="percent"),
            "P10 to P90": None if margins is None else st.column_config.TextColumn(),
            "from": None if all(row.source == "simulated" for row in rows) else st.column_config.TextColumn(),
        },
    )
    chosen = event["selection"]["rows"] if event else []
    return rows[chosen[0]] if chosen and chosen[0] < len(rows) else None


def styled(rows: Sequence[PlanRow], bands: Sequence[Band | None], theme: str) -> Styler:
    """The table, with the distances grey that may as well be none; `theme`: "light" or "dark"."""
    table = pd.DataFrame([_line(row, band) for row, band in zip(rows, bands, strict=True)])
    grey = GREY.get(theme, GREY["light"])
    colours = [grey if band is not None and not band.has_sign else "" for band in bands]
    return table.style.apply(lambda _: colours, subset=DISTANCE)


def _line(row: PlanRow, band: Band | None) -> dict[str, Any]:
    return {
        "plan": row.label,
        "step (s)": row.time_s,
        "from": row.source,
        "behind best": row.margin,
        "P10 to P90": _sure(band),
        "GiB": in_unit(row.memory_bytes, "GiB", "bytes"),
        "memory": row.verdict,
        "cost": headline.money(row.cost_usd),
        "precision": row.precision,
        "recompute": row.recompute,
        "ZeRO": row.zero_stage,
        "SMs": row.sms,
    }


def _label_px(row: PlanRow) -> int:
    """Pixels for a plan's label; a table cuts off what does not fit, without a sign of it."""
    return 24 + 7 * len(row.label)


def _sure(band: Band | None) -> str:
    """The interval of a distance from the best plan, or that it may as well be none."""
    if band is None:
        return ""
    return f"{'' if band.has_sign else 'uncertain, '}{band.p10:+.1%} to {band.p90:+.1%}"
