"""The page Run & cost: phases, failures, checkpoints, goodput, finish date, dollars, kWh and CO2."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from moesim.app import explanations, exports, navigation, predictions, state, widgets
from moesim.app.charts import run_cost as charts
from moesim.app.charts import style
from moesim.app.explanations import run_derivations
from moesim.app.texts import basis_badge, compact, escaped, muted, span
from moesim.app.views import headline
from moesim.hwmodels.failure import list_failure_rates, list_restarts, list_storage
from moesim.hwmodels.price import list_energy_sites, list_prices, list_purchases, load_prices
from moesim.hwmodels.units import format_quantity
from moesim.simulator.common.texts import overridden_key
from moesim.simulator.predict.figures import FigureBasis, run_bases
from moesim.simulator.predict.result import Result
from moesim.simulator.run.bill import RunSpread
from moesim.simulator.run.report import RunReport
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.defaults import Default
from moesim.simulator.scenario.run_plan import RunPlan, default_stops, run_plan_names
from moesim.simulator.studies.reprice import repriced, without_prices
from moesim.simulator.studies.whole_run import with_default_stops

NONE = "none"
WRONG_DATE = "wrong date"
"""Session key with what is wrong with the date that was typed last."""
OWN_TERMS = ("on-demand", "one-year", "three-year")
"""Terms of a rate that the visitor states."""
TOKENS_ONLY = "tokens only"
CLUSTERS_PRICE = "the cluster's price"
TRILLION = 1e12
"""Tokens are entered and shown in trillions."""
STOPS = ("run.failures", "run.restart", "storage", "interval", "asynchronous", "spares")
INTERVALS = ("optimal", "5 min", "15 min", "30 min", "1 h", "2 h", "4 h")


def show() -> None:
    """Draw the page."""
    scenario, assumed = with_default_stops(state.current())
    inputs, results = st.columns([2, 7], gap="medium")
    with inputs:
        _inputs(scenario, assumed)
    with results:
        _results(scenario, bool(assumed))


def _results(scenario: Scenario, by_rule: bool) -> None:
    result, report = _computed(scenario)
    headline.shortage(result)
    _headline(scenario, result, report, run_bases(scenario, result, report, by_rule))
    roofline = muted(result.confidence)
    left, right = st.columns(2, gap="large")
    with left:
        st.header("Where the GPU-hours go")
        hours = report.gpu_hours
        st.markdown(
            f"Of {compact(hours.total)} GPU-hours {compact(hours.productive)} train; with spares "
            f"{compact(hours.billed)} are billed."
        )
        if hours.total > hours.productive:
            chart = style.muted(charts.overheads(hours), roofline)
            widgets.figure(chart, "GPU-hours besides productive ones", key="hours")
        st.header("When it ends")
        chart = style.muted(charts.outlook(report.outlook), roofline)
        widgets.figure(chart, "Chance that the run is over by a day", key="days")
        if report.finish is not None:
            days = report.finish
            st.caption(
                f"Predicted finish: {days.predicted} (P10 {days.p10}, P50 {days.p50}, P90 {days.p90})."
            )
        factor = report.step_factor
        if factor is None:
            st.caption("The intervals contain interruptions, and not the uncertainty of the step time.")
        else:
            st.caption(
                "The intervals contain interruptions and the uncertainty of the step time, "
                f"{factor.p10:.3f} to {factor.p90:.3f} of the prediction (P10 to P90)."
            )
    with right:
        st.header("What interrupts it")
        if report.causes:
            chart = style.muted(charts.causes(report.causes), roofline)
            widgets.figure(chart, "GPU-hours lost by cause", key="causes")
        else:
            st.info("No failures are modelled: choose a failure rate on the left.")
        st.header("What it costs")
        if report.cost_parts_usd:
            chart = style.muted(charts.cost_parts(report.cost_parts_usd), roofline)
            widgets.figure(chart, "Cost by part in dollars", key="cost")
        st.caption(f"{escaped(report.price[:1].upper() + report.price[1:])}.")
    _tables(report)
    with st.container(horizontal=True):
        name, kind = exports.file_name(scenario.name, "json"), "application/json"
        widgets.download("Result with the run (JSON)", exports.result_json(result), name, kind)
        name, kind = exports.file_name(scenario.name, "yaml"), "application/yaml"
        widgets.download("Scenario (YAML)", exports.scenario_yaml(scenario), name, kind)


# -- the inputs ----------------------------------------------------------------------------------------


def _inputs(scenario: Scenario, assumed: Sequence[Default]) -> None:
    """The inputs; `assumed`: what the scenario leaves out and a rule chose."""
    run = scenario.run
    st.header("Run plan")
    plan = state.override("run")
    chosen = plan if plan in run_plan_names() else TOKENS_ONLY
    _choose("run", "Plan", [TOKENS_ONLY, *run_plan_names()], chosen)
    name = widgets.place("run.tokens", run.tokens / TRILLION)
    tokens = run.tokens / TRILLION
    limits: dict[str, Any] = {"min_value": min(1e-6, tokens), "max_value": max(1e6, tokens), "step": 0.1}
    label = "Tokens of the main phase (T: 10¹²)"
    st.number_input(label, **limits, format="%g", key=name, on_change=_tokens, args=(name,))
    name = widgets.place("run.start", "" if run.start is None else run.start.isoformat())
    place: dict[str, Any] = {
        "placeholder": "2027-01-31",
        "help": "Year, month and day; empty: no finish date is predicted",
    }
    st.text_input("Start date", key=name, on_change=_start, args=(name,), max_chars=10, **place)
    if WRONG_DATE in st.session_state:
        st.error(escaped(st.session_state.pop(WRONG_DATE)), icon=":material/error:")
    st.header("Failures and checkpoints")
    if assumed:
        st.caption(escaped("Assumed by rule: " + "; ".join(f"{item.key} = {item.text}" for item in assumed)))
    _choose("run.failures", "Failure rate from", [NONE, *list_failure_rates()], _name(run.failures))
    _choose("run.restart", "Restart times from", [NONE, *list_restarts()], _name(run.restart))
    saved = run.checkpoint
    _choose("storage", "Checkpoint storage", [NONE, *list_storage()], _name(saved.storage if saved else None))
    with st.container():  # a place of its own, so that no input below is drawn anew while somebody uses it
        if saved is not None:
            _choose("interval", "Checkpoint every", list(INTERVALS), saved.interval)
            name = widgets.place("asynchronous", saved.asynchronous)
            st.checkbox(
                "Write while training goes on", key=name, on_change=_changed, args=("asynchronous", name)
            )
    name = widgets.place("spares", run.spares.count if run.spares else 0)
    st.number_input("Spare nodes", 0, 1000, step=1, key=name, on_change=_changed, args=("spares", name))
    _prices(scenario)


def _prices(scenario: Scenario) -> None:
    """Inputs of what the run is paid with."""
    price = scenario.run.price
    st.header("Prices")
    accelerator = scenario.machine.accelerator.name
    terms = sorted({o.term for o in load_prices(accelerator).offers}) if accelerator in list_prices() else []
    bought = (f"buy: {name}" for name in list_purchases(accelerator))
    own = (f"own rate: {term}" for term in OWN_TERMS)
    ways = [CLUSTERS_PRICE, *(f"rent: {term}" for term in terms), *bought, *own]
    way = CLUSTERS_PRICE
    if price is not None and price.rent is not None:
        way = f"rent: {price.rent.term}"
    elif price is not None and price.offer is not None:
        way = f"own rate: {price.offer.terms}"
    elif price is not None and price.buy is not None:
        way = f"buy: {price.buy.name}"
    name = widgets.place("run.price", way)
    st.radio(
        "Pay",
        ways if way in ways else [way, *ways],
        key=name,
        on_change=_changed,
        args=("run.price", name),
        format_func=_way,
    )
    stated = scenario.machine.price_per_gpu_hour if price is None else price.offer
    if stated is not None:
        name = widgets.place("rate", stated.value)
        st.slider("US dollars per GPU-hour", 0.1, 15.0, step=0.05, key=name, on_change=_rate, args=(name,))
    _choose("cluster.energy", "Electricity of", [NONE, *list_energy_sites()], _name(scenario.machine.energy))


def _choose(key: str, label: str, options: Sequence[str], value: str) -> None:
    known = list(options) if value in options else [value, *options]
    name = widgets.place(key, value)
    st.selectbox(label, known, key=name, on_change=_changed, args=(key, name))


def _name(described: Any) -> str:
    return NONE if described is None else str(described.name)


def _tokens(name: str) -> None:
    wanted = round(st.session_state[name] * TRILLION)
    state.set_override("run.tokens", None)
    if state.current().run.tokens != wanted:
        state.set_override("run.tokens", wanted)


def _start(name: str) -> None:
    text = st.session_state[name].strip()
    try:
        day = datetime.date.fromisoformat(text) if text else None
    except ValueError:
        st.session_state[WRONG_DATE] = f"{text} is no date: write year, month and day, such as 2027-01-31."
        return
    state.set_override("run.start", None if day is None else json.dumps(day.isoformat()))


def _way(way: str) -> str:
    """A way to pay in words."""
    kind, _, name = way.partition(": ")
    if not name:
        return f"{way} ({headline.offer_words(state.current().machine.price_per_gpu_hour)})"
    return f"buy: {name}" if kind == "buy" else f"{kind}: {headline.term_words(name)}"


def _rate(name: str) -> None:
    """A rate as typed: of the visitor's own offer, or in the place of the cluster's."""
    price, value = state.current().run.price, f"${st.session_state[name]:.2f}/h"
    if price is not None and price.offer is not None:
        state.set_override("run.price", _own(value, price.offer.terms))
    else:
        state.set_override("cluster.price_per_gpu_hour", value)


def _own(value: str, terms: str) -> dict[str, Any]:
    """A rate that the visitor states, with its terms and the day on which it was stated."""
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {
        "offer": {"value": value, "kind": "assumed", "source": "stated by you", "date": day, "terms": terms}
    }


def _changed(key: str, name: str) -> None:
    """Write a choice into the scenario; parts that depend on each other are set together."""
    value = st.session_state[name]
    run = state.current().run
    if key in STOPS and run.failures is None:  # what was assumed becomes part of the scenario
        for left_out, default in default_stops(run, state.current().machine).items():
            state.set_override(f"run.{left_out}", default.value)
        run = state.current().run
    if key == "run":
        state.set_override("run", None if value == TOKENS_ONLY else value)
    elif key == "run.failures":
        _failures(run, value)
    elif key in ("storage", "interval", "asynchronous"):
        _checkpoint(run, {key: value})
    elif key == "spares":
        # Repair in three days: an assumption until the visitor states another in the scenario.
        repair = run.spares.repair.model_dump(mode="json", exclude_none=True) if run.spares else "3 days"
        state.set_override("run.spares", {"count": int(value), "repair": repair} if value else "null")
    elif key == "run.price":
        kind, _, name = value.partition(": ")
        price: object = {"rent": {"term": name}} if kind == "rent" else {"buy": name}
        if kind == "own rate":
            now = state.current().machine.price_per_gpu_hour
            price = _own(f"${2.0 if now is None else now.value:.2f}/h", name)
        state.set_override("run.price", None if value == CLUSTERS_PRICE else price)
    else:
        state.set_override(key, "null" if value == NONE else value)


def _failures(run: RunPlan, value: str) -> None:
    """Set a failure rate, with the restart time and checkpoints that it needs from published systems."""
    if value == NONE:
        state.set_override("run.failures", NONE)
        for key in ("run.restart", "run.spares"):
            state.set_override(key, "null")
        if run.checkpoint is not None and run.checkpoint.interval == INTERVALS[0]:
            _checkpoint(run, {"interval": INTERVALS[3]})  # without failures no interval is optimal
        return
    if run.restart is None:
        state.set_override("run.restart", list_restarts()[0])
    if run.checkpoint is None:
        _checkpoint(run, {"storage": list_storage()[-1], "interval": INTERVALS[3]})
    state.set_override("run.failures", value)


def _checkpoint(run: RunPlan, change: Mapping[str, Any]) -> None:
    if change.get("storage") == NONE:
        state.set_override("run.checkpoint", "null")
        return
    before: dict[str, Any] = {"interval": INTERVALS[3]}
    if run.checkpoint is not None:
        before = run.checkpoint.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    state.set_override("run.checkpoint", {**before, **change})


# -- the outputs ---------------------------------------------------------------------------------------


def _computed(scenario: Scenario) -> tuple[Result, RunReport]:
    """The step's result and the run's report; prices are applied last, so that a new price reuses both."""
    plain = without_prices(scenario)
    step_only = plain.model_copy(update={"run": RunPlan(tokens=plain.run.tokens)})
    result = state.result_of(step_only)
    what, work = "Simulating the run: phases, failures, restarts", (predictions.run_report, plain)
    key = f"run/{state.cache_key(plain)}"
    report: RunReport = state.compute(key, what, *work, result.step.time_s)
    whole = result.model_copy(update={"run": result.run.model_copy(update={"report": report})})
    whole = repriced(whole, scenario)
    assert whole.run.report is not None
    return whole, whole.run.report


def _headline(
    scenario: Scenario, result: Result, report: RunReport, bases: Mapping[str, FigureBasis]
) -> None:
    own = [overridden_key(text) for text in state.overrides()]
    helps = explanations.texts(run_derivations(scenario, result, report, own), explanations.address())
    cells = [
        ("Days", "days", _between(report.days, ",.1f")),
        ("Goodput", "goodput", _between(report.goodput, ".1%")),
        ("Interruptions", "interruptions", _between(report.interruptions, ",.1f")),
        ("Cost", "cost_usd", _between(report.cost_usd, None, "$")),
        ("Energy", "energy_kwh", _between(report.energy_kwh, None, "", " kWh")),
        ("CO₂e", "co2_kg", _between(report.co2_kg, None, "", " kg")),
    ]
    key = f"{navigation.MUTED}-run" if muted(result.confidence) else "tiles-run"
    with st.container(key=key):
        for row in (cells[:3], cells[3:]):
            for column, (label, name, (value, words)) in zip(st.columns(3), row, strict=True):
                with column, st.container(gap=None):
                    st.metric(f"{label}, whole run", value, help=helps.get(name))
                    basis = bases[name]
                    lines = [basis_badge(basis.level, basis.reason), escaped(words)]
                    if name == "cost_usd" and report.cost_usd is not None:
                        lines.append(headline.price_words(scenario))
                    if not result.memory.fits:
                        lines.insert(1, f":red[{headline.DOES_NOT_FIT}]")
                    st.caption("  \n".join(lines))
    widgets.numbers_first()
    st.caption(
        "The large figures are the mean over random interruptions, every input at its stated value; charts "
        "and tables add up to them. P10, P50 and P90 are points of the distribution of runs."
    )
    explanations.panel(helps)


def _between(
    spread: RunSpread | None, form: str | None, before: str = "", after: str = ""
) -> tuple[str, str]:
    """(predicted, percentiles in words); `form` None gives three digits and a metric prefix.

    Without a spread the value is "unknown". `before` and `after`: the unit.
    """
    if spread is None:
        return "unknown", ""

    def text(value: float) -> str:
        number = compact(value) if form is None else f"{value:{form}}"
        return f"{before}{number}{after}"

    if spread.p10 == spread.p90:
        return text(spread.predicted), "the same in every run"
    points = (("P10", spread.p10), ("P50", spread.p50), ("P90", spread.p90))
    return text(spread.predicted), ", ".join(f"{name} {text(value)}" for name, value in points)


def _tables(report: RunReport) -> None:
    st.header("Phases")
    header = ("phase", "steps", "step time (s)", "days", "GPU-hours", "with stops", "cost ($)")
    rows = [
        (
            phase.phase,
            "as stated" if phase.stated else f"{phase.steps:,}",
            None if phase.stated else phase.step_time_s,
            phase.days,
            round(phase.gpu_hours),
            round(phase.gpu_hours_with_stops),
            None if phase.cost_usd is None else round(phase.cost_usd),
        )
        for phase in report.phases
    ]
    formats = {"step time (s)": "%.3f", "days": "%.1f"} | dict.fromkeys(header[4:], "localized")
    columns = {name: st.column_config.NumberColumn(format=form) for name, form in formats.items()}
    widgets.table(header, rows, column_config=columns)
    saved = report.checkpoint
    if saved is not None:
        words = (
            f"Checkpoints of {format_quantity(saved.bytes, 'bytes')} every "
            f"{span(saved.interval_s)}; training waits "
            f"{span(saved.stall_s)}, the write takes {span(saved.write_s)}."
        )
        if saved.optimal_s is not None:
            words += f" Best interval: {span(saved.optimal_s)}."
        st.markdown(words)
    st.caption(f"{report.replicas:,} runs simulated, seed {report.seed}.")
    if report.assumptions:
        with st.expander(f"Assumed for the run ({len(report.assumptions)})"):
            st.text("\n".join(report.assumptions))
