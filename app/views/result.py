"""The page Result: main figures, breakdown of the step, published values, advice and downloads."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import streamlit as st

import moesim
from moesim.app import explanations, exports, jobs, long_work, predictions, state, texts, widgets
from moesim.app.charts import step as charts
from moesim.app.charts.style import muted
from moesim.app.texts import escaped, plain
from moesim.app.views import headline
from moesim.hwmodels.errors import MoesimError
from moesim.hwmodels.units import in_unit
from moesim.simulator.common.texts import split_key_value
from moesim.simulator.predict.figures import PROPORTIONAL_TO, UNCERTAIN, bands_of_figures
from moesim.simulator.predict.result import Result
from moesim.simulator.predict.work_size import Band
from moesim.simulator.scenario import Scenario
from moesim.simulator.studies.compare import Neighbour
from moesim.simulator.studies.reprice import without_prices

MOST_TRIED = 6
"""Single changes that are shown."""
LETTERS = (
    "F belongs to the forward pass and B to the backward pass; dispatch and combine carry tokens to their "
    "experts and back."
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
    if known is None:
        intervals = dict.fromkeys((*UNCERTAIN, *PROPORTIONAL_TO), headline.WAITING)
    headline.show(scenario, result, headline.beside(rows, bands), intervals)
    widgets.numbers_first()
    step_band = bands.get("step_time_s")
    left, right = st.columns([3, 2], gap="large")
    with left:
        _draw(
            result,
            charts.bounds(result.step, None if step_band is None else (step_band.p10, step_band.p90)),
            f"Step time {result.step.time_s:.3f} s between its bounds",
            "bounds",
        )
    with right:
        _sureness(scenario, result)
    if bands or known is None:
        headline.by_engine(scenario, bands)
    if scenario.stages.blocks is None:
        explanations.panel(explanations.of_result(scenario, result))
    _why(result)
    if rows:
        _published(rows)
    _next(scenario, result)
    _downloads(scenario, result, redrawn_soon=known is None)


def _draw(result: Result, chart: Any, alt: str, key: str) -> None:
    """Draw a chart, hatched and dotted where the result stands on a roofline."""
    widgets.figure(muted(chart, texts.muted(result.confidence)), alt, key)


def _bands(scenario: Scenario, result: Result) -> dict[str, Band] | None:
    """The intervals, none where they cannot be had; None while a job computes them, before a redraw."""
    if scenario.stages.blocks is not None:
        return {}
    key = f"interval/{state.cache_key(without_prices(scenario))}"
    try:
        work = (predictions.interval, scenario)
        whole: Result | None = long_work.value("interval", key, "P10 to P90 follow", *work)
        if whole is None:
            return None
        found = moesim.reprice(whole, scenario).uncertainty
    except MoesimError as error:
        st.caption(f"No interval: {escaped(error)}")
        return {}
    if found is None:
        return {}
    st.caption(f"P10 to P90: {escaped(found.note)}.")
    return bands_of_figures(result, found)


def _sureness(scenario: Scenario, result: Result) -> None:
    level, memory = result.confidence, result.memory
    reason = result.confidence_reason.removeprefix(level).lstrip(":, ")  # the badge says the level
    st.markdown(f"{texts.badge(level)} {escaped(reason)}.")
    used, limit = (in_unit(size, "GiB", "bytes") for size in (memory.total_bytes, memory.capacity_bytes))
    colour, icon = headline.VERDICTS[memory.verdict]
    least, most = (in_unit(size, "GiB", "bytes") for size in memory.range_bytes)
    with st.container(gap=None):
        st.metric(
            "Memory of the fullest GPU",
            f"{used:.1f} of {limit:.1f} GiB",
            help=explanations.of_result(scenario, result).get("memory_bytes"),
        )
        st.caption(
            f":{colour}-badge[:material/{icon}: {memory.verdict}] {least:.1f} to {most:.1f} GiB by framework "
            "and allocator"
        )
    if result.defaults:
        with st.expander(f"{len(result.defaults)} values that the scenario leaves to rules"):
            st.dataframe(
                [{"key": d.key, "value": d.text, "why": d.why, "source": d.source} for d in result.defaults],
                hide_index=True,
            )


def _why(result: Result) -> None:
    st.header("Where the step goes")
    st.markdown("\n".join(f"- {escaped(sentence)}" for sentence in moesim.explain(result).sentences))
    if result.extrapolated:
        with st.expander(f"Assumed or extrapolated ({len(result.extrapolated)}); Evidence has every source"):
            st.markdown("\n".join(f"- {escaped(text)}" for text in result.extrapolated))
    left, right = st.columns(2, gap="large")
    with left:
        st.markdown("**Parts of the step, every pipeline rank**")
        parts = charts.breakdown(result.breakdown_by_rank_s)
        _draw(result, parts, "Seconds of a step by part and pipeline rank", "split")
    with right:
        st.markdown("**What the step waits for: its critical path**")
        path = charts.critical_path(result.critical_path_s)
        _draw(result, path, "Seconds of the critical path by cause", "path")
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
        _draw(result, charts.busy(shares), "Busy share of each resource", "busy")
    with right:
        if result.pair_phases:
            st.markdown("**Inside an overlapped pair**")
            pairs = charts.pair_phases(result.pair_phases)
            _draw(result, pairs, "Phases inside an overlapped pair", "phases")


def _published(rows: Any) -> None:
    with st.expander("Against what was published", expanded=False):
        st.dataframe(
            {
                "quantity": [row.quantity for row in rows],
                "unit": ["" if row.unit == "1" else row.unit for row in rows],
                "published": [plain(row.published, 4) for row in rows],
                "predicted": [plain(row.predicted, 4) for row in rows],
                "error": [f"{row.relative_error:+.1%}" for row in rows],
                "source": [row.source for row in rows],
            },
            hide_index=True,
        )


def _next(scenario: Scenario, result: Result) -> None:
    st.header("What to try next")
    st.caption("Single changes, each simulated, the fastest that fits first.")
    key = f"neighbours/{state.cache_key(scenario)}"
    work = (predictions.neighbours, scenario, result)
    found: Any = widgets.long_work("neighbours", key, "Simulate single changes", *work)
    if found is None:
        return
    shown = found[:MOST_TRIED]
    bands = _bands_of_changes(scenario, result, shown)
    for number, row in enumerate(shown):
        left, middle, right = st.columns([3, 6, 1], vertical_alignment="center")
        left.code(row.override, language=None)
        fit = {"fits": "", "at risk": " At risk: memory may not last.", "does not fit": " Does not fit."}[
            row.verdict
        ]
        middle.markdown(f"{row.step_time_s:.3f} s, {_change(row, bands)}: {escaped(row.why)}.{fit}")
        key_, value = split_key_value(row.override)
        with right:
            plain_value = int(value) if value is not None and value.isdigit() else value or ""
            widgets.button("Try", f"try {number}", state.set_override, key_, plain_value)


def _bands_of_changes(scenario: Scenario, result: Result, shown: Any) -> dict[str, Band]:
    """Intervals of the changes, by override; none while a job computes them."""
    key = f"neighbour bands/{state.cache_key(without_prices(scenario))}/{'/'.join(r.override for r in shown)}"
    try:
        what = "intervals of the differences follow; until then they are grey"
        work = (predictions.neighbour_bands, scenario, result, shown)
        found: dict[str, Band] | None = long_work.value("neighbour bands", key, what, *work)
    except MoesimError as error:
        st.caption(f"No intervals of the differences: {escaped(error)}")
        return {}
    if found is not None:
        st.caption("In brackets P10 to P90 of the difference; grey: within its uncertainty.")
    return found or {}


def _change(row: Neighbour, bands: Mapping[str, Band]) -> str:
    """A relative change in words; grey where it is not known to exceed its own uncertainty."""
    band = bands.get(row.override)
    if band is None:
        return f":gray[{row.change:+.1%}]"
    words = f"{row.change:+.1%} ({band.p10:+.1%} to {band.p90:+.1%})"
    if not band.has_sign:
        return f":gray[{words}, uncertain]"
    return f":{'green' if row.change < 0.0 else 'red'}[{words}]"


def _downloads(scenario: Scenario, result: Result, *, redrawn_soon: bool) -> None:
    """Offer the files; what is made on request can only be clicked once no redraw can take the click away."""
    st.header("Downloads")
    with st.container(horizontal=True):
        name = scenario.name
        for label, data, ending, kind in _files(scenario, result):
            widgets.download(label, data, exports.file_name(name, ending), kind, key=label)
        widgets.download(
            "Trace (Perfetto)",
            lambda: state.trace_of(scenario),
            exports.file_name(name, ".trace.json.gz"),
            "application/gzip",
            key="Trace (Perfetto)",
            disabled=redrawn_soon,
        )


def _files(scenario: Scenario, result: Result) -> list[tuple[str, str | bytes, str, str]]:
    """The files that are ready with the page (label, content, ending, type), made once for a scenario."""
    key = f"files/{state.cache_key(scenario)}"
    found: list[tuple[str, str | bytes, str, str]] | None = jobs.cache.get(key)
    if found is None:
        parquet = exports.result_parquet([result]) or exports.NO_PARQUET
        found = [
            ("Report (HTML)", exports.html_report(scenario, result), ".html", "text/html"),
            ("Result (JSON)", exports.result_json(result), ".json", "application/json"),
            ("Result (CSV)", exports.result_csv([result]), ".csv", "text/csv"),
            ("Result (Parquet)", parquet, ".parquet", "application/octet-stream"),
            ("Scenario (YAML)", exports.scenario_yaml(scenario), ".yaml", "application/yaml"),
        ]
        jobs.cache.put(key, pickle.dumps(found))
    return found
