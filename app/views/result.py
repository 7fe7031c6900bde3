"""The page Result: main figures, breakdown of the step, published values, advice and downloads."""

from __future__ import annotations

from typing import Any

import streamlit as st

import moesim
from moesim.app import background, exports, html_report, predictions, state, widgets
from moesim.app.charts import step as charts
from moesim.app.escaping import escaped
from moesim.app.views import headline, uncertainty
from moesim.hwmodels.errors import MoesimError
from moesim.simulator.common.key_values import split_key_value
from moesim.simulator.predict.band import Band
from moesim.simulator.predict.figures import bands_of_figures
from moesim.simulator.predict.result import Result
from moesim.simulator.scenario import Scenario
from moesim.simulator.studies.reprice import without_prices

LETTERS = (
    "F is forward, B backward, I its input-gradient half, W its weight-gradient half; dispatch and combine "
    "carry tokens to their experts and back."
)


def show() -> None:
    """Draw the page."""
    scenario = state.current()
    result = state.result_of(scenario)
    rows = moesim.published(scenario, result)
    known = _bands(scenario, result)
    bands = known or {}
    headline.shortage(result)
    intervals = {name: headline.interval(name, band) for name, band in bands.items()}
    headline.show(scenario, result, headline.beside(rows), intervals)
    step_band = bands.get("step_time_s")
    left, right = st.columns([3, 2], gap="large")
    with left:
        widgets.figure(
            charts.bounds(result.step, None if step_band is None else (step_band.p10, step_band.p90)),
            f"Step time {result.step.time_s:.3f} s between its bounds",
            "bounds",
        )
    with right:
        _sureness(result)
    if bands:
        uncertainty.by_engine(scenario, bands)
    _why(result)
    if rows:
        _published(rows)
    _next(scenario, result)
    _downloads(scenario, result, redrawn_soon=known is None)


def _bands(scenario: Scenario, result: Result) -> dict[str, Band] | None:
    """The intervals, none where they cannot be had; None while a job computes them, before a redraw."""
    if scenario.stages.blocks is not None:
        return {}
    key = f"interval/{state.cache_key(without_prices(scenario))}"
    try:
        whole: Result | None = background.value(
            "interval", key, "the interval is being computed", predictions.interval, scenario
        )
        if whole is None:
            return None
        found = moesim.reprice(whole, scenario).uncertainty
    except MoesimError as error:
        st.caption(f"No interval: {escaped(error)}")
        return {}
    if found is None:
        return {}
    st.caption(f"Intervals: {escaped(found.note)}.")
    return bands_of_figures(result, found)


def _sureness(result: Result) -> None:
    st.markdown(f"**Confidence:** {escaped(result.confidence_reason)}.")
    if result.defaults:
        with st.expander(f"Defaults: {len(result.defaults)} keys that nobody stated"):
            st.dataframe(
                [{"key": d.key, "value": d.text, "why": d.why, "source": d.source} for d in result.defaults],
                hide_index=True,
            )


def _why(result: Result) -> None:
    st.subheader("Where the step goes")
    for sentence in _sentences(result):
        st.markdown(f"- {escaped(sentence)}")
    if result.extrapolated:
        with st.expander(f"Assumed or extrapolated ({len(result.extrapolated)}); Evidence has every source"):
            st.markdown("\n".join(f"- {escaped(text)}" for text in result.extrapolated))
    left, right = st.columns(2, gap="large")
    with left:
        st.markdown("**Parts of the step, every pipeline rank**")
        widgets.figure(
            charts.breakdown(result.breakdown_by_rank_s),
            "Seconds of a step by part and pipeline rank",
            "split",
        )
    with right:
        st.markdown("**What the step waits for: its critical path**")
        widgets.figure(
            charts.critical_path(result.critical_path_s), "Seconds of the critical path by cause", "path"
        )
        st.caption(LETTERS)
    left, right = st.columns(2, gap="large")
    used = result.utilisation
    with left:
        st.markdown("**How busy each resource is**")
        shares = {
            "compute SMs": used.compute_partition,
            "communication SMs": used.communication_partition,
            "scale-up links": used.scale_up,
            "NICs": used.nic,
        }
        widgets.figure(charts.busy(shares), "Busy share of each resource", "busy")
    with right:
        if result.pair_phases:
            st.markdown("**Inside an overlapped pair**")
            widgets.figure(
                charts.pair_phases(result.pair_phases), "Phases inside an overlapped pair", "phases"
            )


def _sentences(result: Result) -> list[str]:
    """The bottleneck in words."""
    return list(moesim.explain(result).sentences)


def _published(rows: Any) -> None:
    with st.expander("Against what was published", expanded=False):
        st.dataframe(
            [
                {
                    "quantity": row.quantity,
                    "unit": "" if row.unit == "1" else row.unit,
                    "published": row.published,
                    "predicted": row.predicted,
                    "error": f"{row.relative_error:+.1%}",
                    "source": row.source,
                }
                for row in rows
            ],
            hide_index=True,
        )


def _next(scenario: Scenario, result: Result) -> None:
    st.subheader("What to try next")
    st.caption("Single changes, each simulated, the fastest that fits first.")
    key = f"neighbours/{state.cache_key(scenario)}"
    found: Any = widgets.long_work(
        "neighbours",
        key,
        "Simulate single changes",
        predictions.neighbours,
        scenario,
        result,
        with_progress=True,
    )
    for number, row in enumerate(() if found is None else found[:6]):
        left, middle, right = st.columns([3, 5, 2])
        left.code(row.override, language=None)
        fit = "" if row.fits else " Does not fit into memory."
        middle.markdown(f"{row.step_time_s:.3f} s ({row.change:+.1%}): {escaped(row.why)}.{fit}")
        key_, value = split_key_value(row.override)
        right.button(
            "Try", key=f"try {number}", on_click=state.set_override, args=(key_, _plain(value or ""))
        )


def _plain(value: str) -> object:
    return int(value) if value.isdigit() else value


def _downloads(scenario: Scenario, result: Result, *, redrawn_soon: bool) -> None:
    """Offer the files; what is made on request can only be clicked once no redraw can take the click away."""
    st.subheader("Take away")
    with st.container(horizontal=True):
        name = scenario.name
        parquet = exports.result_parquet([result]) or exports.NO_PARQUET
        files: list[tuple[str, str | bytes, str, str]] = [
            ("Report (HTML)", html_report.html_report(scenario, result), ".html", "text/html"),
            ("Result (JSON)", exports.result_json(result), ".json", "application/json"),
            ("Result (CSV)", exports.result_csv([result]), ".csv", "text/csv"),
            ("Result (Parquet)", parquet, ".parquet", "application/octet-stream"),
            ("Scenario (YAML)", exports.scenario_yaml(scenario), ".yaml", "application/yaml"),
        ]
        for label, data, ending, kind in files:
            st.download_button(
                label, data, exports.file_name(name, ending), kind, key=label, on_click="ignore"
            )
        st.download_button(
            "Trace (Perfetto)",
            lambda: state.trace_of(scenario),
            exports.file_name(name, ".trace.json.gz"),
            "application/gzip",
            key="Trace (Perfetto)",
            on_click="ignore",
            disabled=redrawn_soon,
        )
