"""Uncertainty of figures and of differences between scenarios, computed in jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

import moesim
from moesim.app import background, predictions, state, widgets
from moesim.app.escaping import escaped
from moesim.app.number_text import written
from moesim.hwmodels.errors import MoesimError
from moesim.simulator.predict.band import Band
from moesim.simulator.predict.result import Result
from moesim.simulator.scenario import Scenario
from moesim.simulator.studies.compare import bands_of_changes, bands_of_draws
from moesim.simulator.studies.reprice import without_prices

POINTS = ("P10", "P50", "P90")

TITLES = {
    "step_time_s": "step time",
    "tokens_per_s": "tokens/s",
    "mfu_causal": "MFU, causal",
    "days": "duration",
    "cost_usd": "cost",
}
"""Names of the figures that have an interval."""

Side = tuple[Scenario, Result]


def draws(place: str, scenarios: Sequence[Scenario]) -> list[Any] | None:
    """Random draws of every scenario's step time; None while one is computed.

    Scenarios share the draws of the sources that they have in common. Scenarios that differ only in prices
    have the same draws.
    """
    found = []
    for number, scenario in enumerate(scenarios):
        key = f"draws/{state.cache_key(without_prices(scenario))}"
        try:
            found.append(
                background.value(
                    f"{place} {number}",
                    key,
                    "how sure this is: being computed",
                    predictions.relative_draws,
                    scenario,
                )
            )
        except MoesimError as error:
            st.caption(f"No interval: {escaped(error)}")
            return None
    return None if any(item is None for item in found) else found


def by_engine(scenario: Scenario, first_order: Mapping[str, Band]) -> None:
    """Offer the intervals by engine runs, and show them beside the first-order ones once they are known.

    The offer has its place before the first-order intervals come, so that nothing moves when they do.
    """
    if scenario.fleet is not None or scenario.stages.blocks is not None:
        return
    with st.expander("Intervals by the engine: 200 runs with all uncertain inputs off together"):
        if not first_order:
            st.caption("They are compared with the first-order intervals, which come first.")
            return
        key = f"interval by engine/{state.cache_key(without_prices(scenario))}"
        try:
            whole: Result | None = widgets.long_work(
                "interval by engine",
                key,
                "Run the engine 200 times",
                predictions.interval_by_engine,
                scenario,
                with_progress=True,
            )
            found = None if whole is None else moesim.reprice(whole, scenario).uncertainty
        except MoesimError as error:
            st.caption(f"No interval: {escaped(error)}")
            return
        if found is None or found.by_engine is None:
            return
        engine = found.by_engine
        st.dataframe(
            [
                {
                    "figure": TITLES.get(name, name),
                    **{
                        f"first order {p}": written(name, getattr(first_order[name], p.lower()))
                        for p in POINTS
                    },
                    **{f"engine {p}": written(name, getattr(band, p.lower())) for p in POINTS},
                }
                for name, band in engine.bands.items()
                if name in first_order
            ],
            hide_index=True,
        )
        st.caption(
            f"Over these {engine.draws} draws the first-order step time differs from the engine's by "
            f"{engine.first_order_mean:+.2%} in the mean and {engine.first_order_rms:.2%} rms."
        )


def changes(place: str, first: Side, other: Side) -> dict[str, Band] | None:
    """Intervals of the differences between two results, by figure; None while they are computed."""
    known = draws(place, [first[0], other[0]])
    return None if known is None else bands_of_changes(first[1], known[0], other[1], known[1])


def intervals(results: Sequence[Result], known: Sequence[Any]) -> list[dict[str, Band]]:
    """Intervals of the figures of every result, from its draws."""
    return [bands_of_draws(result, own) for result, own in zip(results, known, strict=True)]
