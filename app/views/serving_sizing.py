"""The page Serving sizing: the fewest GPUs, or the lowest price, for a load and limits."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import streamlit as st

from moesim.app import forms, long_work, page_switch, serving_jobs, state, widgets
from moesim.app.charts import serving as charts
from moesim.app.texts import escaped, money, plain, span
from moesim.app.views import serving
from moesim.hwmodels.errors import MoesimError
from moesim.hwmodels.yaml_io import shipped_names
from moesim.simulator.scenario.defaults import has_node
from moesim.simulator.serving.candidates import MODES
from moesim.simulator.serving.flags import serving_flags
from moesim.simulator.serving.sized import (
    FigureRange,
    ServingPlan,
    SizedRow,
    frontier_cells,
    frontier_heads,
    limits_text,
)

OBJECTIVES = {"cost": "lowest price", "gpus": "fewest GPUs"}
MODE_NAMES = {"aggregated": "one pool", "disaggregated": "prefill and decode pools"}
VARIED = {
    "weights": "bf16,fp8",
    "cache": "bf16,fp8",
    "draft_tokens": "0,1",
    "two_batch_overlap": "false,true",
}
"""Keys that may be varied beside those of the rule, with their values."""
TOP = 5
"""Plans that are served request by request."""


def show() -> None:
    """Draw the page."""
    scenario = state.form()
    if scenario.serving is None:
        serving.begin(scenario)
        return
    serving.load_form(scenario)
    options = _options()
    current = state.current()  # raises for what the form shows as refused
    asked = f"{state.cache_key(current)}/{sorted(options.items())}"
    key = f"serving plan/{hashlib.sha256(asked.encode()).hexdigest()[:32]}"
    work = (serving_jobs.sized, serving.folder(), current, options)
    found: ServingPlan | None = long_work.long_work("serving plan", key, "Find the plans", *work)
    if found is not None:
        _answer(found)


def _options() -> dict[str, Any]:
    first, second, third, fourth = st.columns(4)
    show: dict[str, Any] = {"format_func": OBJECTIVES.__getitem__, "key": "sizing objective"}
    objective = forms.one_of(
        first.selectbox, "Look for", "serving_sizing.objective", list(OBJECTIVES), "cost", **show
    )
    known = [name for name in shipped_names("accelerators") if has_node(name)]
    accelerators = forms.some_of(
        second.multiselect, "Accelerators", "serving_sizing.accelerators", known, key="sizing accelerators",
        placeholder="the scenario's cluster",
    )  # fmt: skip
    modes = forms.some_of(
        third.multiselect, "Pools", "serving_sizing.modes", list(MODES), MODES, key="sizing modes",
        format_func=MODE_NAMES.__getitem__,
    )  # fmt: skip
    most = forms.number(
        fourth.number_input, "GPUs of each, at most", "serving_sizing.most", 1, 100_000, 64, key="sizing most"
    )
    vary = forms.some_of(
        st.multiselect, "Also vary", "serving_sizing.vary", list(VARIED), key="sizing vary",
        format_func=lambda name: f"{name.replace('_', ' ')}: {VARIED[name]}",
        help="Parallel degrees, sequences and token budgets are always varied",
    )  # fmt: skip
    return {
        "objective": objective,
        "accelerators": tuple(accelerators),
        "modes": tuple(modes) or MODES,
        "max_gpus": most,
        "top": TOP,
        "vary": {name: VARIED[name] for name in vary},
    }


def _answer(found: ServingPlan) -> None:
    st.caption(escaped(f"{limits_text(found.limits)} at {plain(found.rate_per_s)} requests/s"))
    best = found.best
    tiles = {
        "GPUs": f"{best.gpus:,} x {best.accelerator}",
        "Price": "no price" if best.usd_per_hour is None else f"{money(best.usd_per_hour)} an hour",
        "TTFT": span(best.ttft_s.value),
        "TPOT": span(best.tpot_s.value),
    }
    captions = (
        f"{best.gpus_low:,} to {best.gpus_high:,} over the 80 % interval of step times",
        f"{money(best.usd_per_million_tokens)} per M tokens",
        _range(best.ttft_s),
        _range(best.tpot_s),
    )
    for place, (label, value), caption in zip(st.columns(4), tiles.items(), captions, strict=True):
        place.metric(label, value)
        place.caption(caption)
    st.header("Plans", anchor=False)
    _plans(found.plans)
    st.header("Throughput per GPU against speed per user", anchor=False)
    points = [
        (point.plan, point.tokens_per_s_per_user, point.output_tokens_per_s_per_gpu)
        for point in found.frontier
    ]
    served = [(row.plan, row.tokens_per_s_per_user, row.output_tokens_per_s_per_gpu) for row in found.plans]
    widgets.figure(
        charts.frontier(points, served), "Tokens/s of a GPU against tokens/s of a user", "sizing frontier"
    )
    with st.expander("The same as a table"):
        widgets.table(
            frontier_heads(), [frontier_cells(point) for point in found.frontier], key="sizing points"
        )
    for line in (*found.counts(), *found.notes):
        st.caption(escaped(line))


def _range(figure: FigureRange) -> str:
    high = "overload" if figure.high is None else span(figure.high)
    return f"80 %: {span(figure.low)} to {high}"


def _plans(rows: Sequence[SizedRow]) -> None:
    """The table of plans; a chosen one can be adopted, with the command lines of its engine."""
    header = (
        "GPUs", "accelerator", "plan", "$ per M tokens", "TTFT (ms)", "TTFT, 80 %", "TPOT (ms)", "TPOT, 80 %",
        "output tokens/s/GPU", "tokens/s/user", "within limits", "limited by",
    )  # fmt: skip
    cells = [
        (
            row.gpus, row.accelerator, row.plan, row.usd_per_million_tokens, 1e3 * row.ttft_s.value,
            _range(row.ttft_s).removeprefix("80 %: "), 1e3 * row.tpot_s.value,
            _range(row.tpot_s).removeprefix("80 %: "), row.output_tokens_per_s_per_gpu,
            row.tokens_per_s_per_user, row.share_in_limits, row.limited_by,
        )
        for row in rows
    ]  # fmt: skip
    formats = {
        "$ per M tokens": "%.3f", "TTFT (ms)": "%.1f", "TPOT (ms)": "%.2f", "output tokens/s/GPU": "%.0f",
        "tokens/s/user": "%.1f", "within limits": "percent",
    }  # fmt: skip
    config = {name: st.column_config.NumberColumn(format=text) for name, text in formats.items()}
    more = {"key": "sizing plans", "on_select": "rerun", "selection_mode": "single-row"}
    event = widgets.table(header, cells, column_config=config, **more)
    picked = event["selection"]["rows"] if event else []
    row = rows[picked[0]] if picked and picked[0] < len(rows) else rows[0]
    st.markdown(
        f"**{'The best' if row is rows[0] else 'The chosen'} plan:** {row.gpus} GPUs, {escaped(row.plan)}"
    )
    if st.button("Open as the scenario", key="adopt serving plan", type="primary"):
        state.adopt(row.scenario)
        page_switch.go("serving")
    with st.expander("The engine's command lines"):
        try:
            text = serving_flags(row.scenario).text()
        except MoesimError as error:
            st.caption(escaped(error))
        else:
            st.code(text, language="bash")
