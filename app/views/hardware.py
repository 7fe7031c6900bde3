"""The page Hardware: the same job planned on several clusters, in one table per GPU, dollar and token."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from typing import Any

import streamlit as st
from msgspec import Struct

from moesim.app import forms, jobs, long_work, predictions, state, widgets
from moesim.app.charts import sweep as charts
from moesim.app.texts import compact, escaped, meaning, money, muted, word, written
from moesim.app.views import headline
from moesim.hwmodels import list_clusters
from moesim.hwmodels.errors import InputError, MoesimError
from moesim.hwmodels.units import in_unit
from moesim.simulator.planner.hardware import (
    LEAST,
    MOST,
    PAYMENTS,
    ClusterPlan,
    ClusterRow,
    HardwareComparison,
    Payment,
    Search,
    gpus_for,
    hardware_comparison,
    priced_scenario,
)
from moesim.simulator.scenario import Scenario

# -- hardware table ----------------------------------------------------------------------------------
# The table of the page Hardware as HTML: a column for each cluster, two or three lines in each cell.

GROUPS: tuple[tuple[str, tuple[tuple[str, str, bool], ...]], ...] = (
    (
        "Per GPU",
        (
            ("tokens_per_s_per_gpu", "Tokens/s/GPU", True),
            ("mfu_causal", "MFU, causal", True),
        ),
    ),
    ("Per dollar", (("tokens_per_usd", "Tokens per $", True),)),
    (
        "Per billion tokens",
        (
            ("usd_per_billion_tokens", "Cost", False),
            ("gpu_hours_per_billion_tokens", "GPU-hours", False),
            ("kwh_per_billion_tokens", "Energy", False),
        ),
    ),
    (
        "Whole cluster",
        (
            ("step_time_s", "Step time", False),
            ("days", "Days", False),
            ("cost_usd", "Cost of the run", False),
        ),
    ),
)
"""Headings with their figures: name, label, and whether more is better."""


def text(table: HardwareComparison) -> str:
    """The table as HTML; every text from a scenario is escaped."""
    rows = table.clusters
    faint = [row.confidence is not None and muted(row.confidence) for row in rows]

    def line(label: str, cell: Callable[[ClusterRow], str]) -> str:
        return headline.line(label, [cell(row) for row in rows], faint)

    body = [line("Plan", _plan), line("Fits", _fits)]
    for title, figures in GROUPS:
        shown = [item for item in figures if any(item[0] in row.figures for row in rows)]
        if shown:
            body.append(headline.group(title, len(rows)))
        for name, label, more in shown:
            body.append(line(label, partial(_figure, first=rows[0], name=name, more_is_better=more)))
    body += [
        headline.group("What it stands on", len(rows)),
        line("Price", _price),
        line("Profile", _profile),
    ]
    heads = []
    for row in rows:
        size = "" if row.n_gpus is None or row.problem else f"{row.n_gpus:,} "
        level = row.confidence
        badge = "" if level is None else f" {headline.badge_of(level)}"
        heads.append(f"{escape(row.cluster)}<small>{escape(size + row.accelerator)}{badge}</small>")
    return headline.table("Clusters side by side", heads, body, faint)


def _plan(row: ClusterRow) -> str:
    if row.plan is None:
        return f"<b>No plan</b><small>{escape(_short(row.problem))}</small>"
    words = f"{row.precision}, recompute {row.recompute}, best of {compact(row.considered)} plans"
    return f"{escape(row.plan)}<small>{escape(words)}</small>"


def _short(problem: str, most: int = 260) -> str:
    return problem if len(problem) <= most else f"{problem[:most].rsplit(' ', 1)[0]} ..."


def _fits(row: ClusterRow) -> str:
    if row.memory_bytes is None:
        return ""
    size = f"{in_unit(row.memory_bytes, 'GiB', 'bytes'):.1f} GiB on the fullest GPU"
    return f"{'fits' if row.verdict == 'fits' else f'<b>{row.verdict}</b>'}<small>{size}</small>"


def _price(row: ClusterRow) -> str:
    if row.plan is None:
        return ""
    if row.price is None:
        return f"no price<small>{escape(_short(row.price_problem or 'the cluster states none'))}</small>"
    terms = f"{headline.offer_words(row.price)}: {getattr(row.price, 'terms', '')}".rstrip(": ")
    words = ", ".join(part for part in (terms, row.price.kind, row.price.date) if part)
    return (
        f"${row.price.value:,.2f} a GPU-hour<small>{escape(words)}</small>"
        f"<small>{escape(_short(row.price.source, 120))}</small>"
    )


def _profile(row: ClusterRow) -> str:
    if row.profile is None or row.confidence is None:
        return ""
    return f"{escape(row.profile)}<small>{escape(meaning(row.confidence))}</small>"


def _figure(row: ClusterRow, first: ClusterRow, name: str, more_is_better: bool) -> str:
    band = row.figures.get(name)
    if band is None:
        return "" if row.plan is None else "not known"
    ends = f"{_written(name, band.p10)} to {_written(name, band.p90)}"
    cell = headline.main(_written(name, band.predicted)) + headline.note(ends)
    change, base = row.differences.get(name), first.figures.get(name)
    if change is None or base is None or not base.predicted:
        return cell
    # The change against the first cluster in percent; grey, and said, where its interval contains zero.
    told, low, high = (
        f"{value / abs(base.predicted):+.0%}" for value in (change.predicted, change.p10, change.p90)
    )
    better = (change.predicted > 0.0) == more_is_better
    return cell + headline.delta(told, low, high, change.has_sign, better)


def _written(name: str, value: float) -> str:
    if name in ("usd_per_billion_tokens", "cost_usd"):
        return money(value)
    if name == "kwh_per_billion_tokens":
        return f"{compact(value)} kWh"
    if name == "days":
        return f"{value:,.1f}"
    return written(name, value)


SAME_GPUS, AS_SHIPPED, SAME_BUDGET = "same number of GPUs", "as shipped", "same dollars an hour"
SIZES = (SAME_GPUS, AS_SHIPPED, SAME_BUDGET)
MOST_GPUS = 131_072
MOST_USD_PER_HOUR = 1_000_000.0
SEARCHES: dict[Search, str] = {"narrow": "quick", "whole": "every plan"}
PAID: dict[Payment, str] = {
    "as stated": "each as its data says",
    "on-demand": "all rented on demand",
    "reserved": "all rented for a year",
    "spot": "all rented on the spot market",
    "capacity-block": "all rented in capacity blocks",
    "purchase": "all bought",
}
CHARTED = {
    "usd_per_billion_tokens": "dollars per billion tokens",
    "tokens_per_usd": "tokens per dollar",
    "tokens_per_s_per_gpu": "tokens/s/GPU",
    "gpu_hours_per_billion_tokens": "GPU-hours per billion tokens",
    "kwh_per_billion_tokens": "kWh per billion tokens",
    "days": "days",
}


class Question(Struct, frozen=True):
    """What a visitor asks: clusters with their GPUs (None: as shipped), and how plans are found."""

    scenario: Scenario
    names: tuple[str, ...]
    gpus: dict[str, int | None]
    problems: dict[str, str]
    search: Search

    def key(self, name: str) -> str:
        """Key of the job for one cluster, by everything that its plan depends on."""
        asked = f"{state.cache_key(self.scenario)}/{name}/{self.gpus[name]}/{self.search}"
        return f"hardware/{hashlib.sha256(asked.encode()).hexdigest()[:32]}"

    def work(self, name: str) -> tuple[Any, ...]:
        """The function that plans for one cluster, and its arguments."""
        return predictions.best_on, self.scenario, name, self.gpus[name], self.search


def show() -> None:
    """Draw the page."""
    scenario = state.current()
    st.markdown(
        f"{escaped(scenario.shape.name)} with the batch and tokens of this scenario, planned anew on each "
        "cluster."
    )
    question, payment = _question(scenario)
    if len(question.names) < LEAST:
        st.info("Choose at least two clusters.", icon=":material/add:")
        return
    plans = _plans(question)
    if plans:
        _answer(question, plans, payment)


def _question(scenario: Scenario) -> tuple[Question, Payment]:
    own = scenario.machine
    known = list(dict.fromkeys((own.name, *list_clusters())))
    names = forms.some_of(
        st.multiselect,
        "Clusters",
        "hardware.clusters",
        known,
        (own.name,),
        key="hardware clusters",
        max_selections=MOST,
        help=f"{LEAST} to {MOST}; the others are compared with the first",
    )
    first, second, third, fourth = st.columns([3, 2, 3, 2], vertical_alignment="bottom")
    size = forms.one_of(first.selectbox, "Size", "hardware.size", SIZES, SAME_GPUS, key="hardware size")
    payment: Payment = forms.one_of(
        third.selectbox,
        "Payment",
        "hardware.payment",
        PAYMENTS,
        "as stated",
        key="hardware payment",
        format_func=lambda term: PAID.get(term, f"all paid {headline.term_words(term)}"),
        help="Rents are the latest shipped offers of that term; a purchase counts hardware, building, "
        "upkeep and electricity. Prices do not change the plans",
    )
    with second:
        gpus, problems = _sizes(scenario, names, size, payment)
    found = forms.one_of(
        fourth.segmented_control,
        "Search",
        "hardware.search",
        list(SEARCHES),
        "narrow",
        key="hardware search",
        format_func=SEARCHES.__getitem__,
        help="Quick keeps ZeRO stage, SMs and context parallelism, without interleaving: 10 to 20 s a "
        "cluster. Every plan takes about a minute a cluster",
    )
    search: Search = found or "narrow"
    return Question(scenario, tuple(names), gpus, problems, search), payment


def _sizes(
    scenario: Scenario, names: Sequence[str], size: str, payment: Payment
) -> tuple[dict[str, int | None], dict[str, str]]:
    """(GPUs of each cluster, reason by cluster that has no size)."""
    own = scenario.machine
    if size == AS_SHIPPED:
        st.text_input("GPUs", "each its own", disabled=True, key="hardware as shipped")
        return dict.fromkeys(names), {}
    if size == SAME_GPUS:
        key = f"gpus {own.n_gpus}"
        gpus = forms.number(st.number_input, "GPUs", "hardware.gpus", 1, MOST_GPUS, own.n_gpus, key=key)
        return dict.fromkeys(names, int(gpus)), {}
    stated = own.price_per_gpu_hour
    hourly = round(own.n_gpus * (stated.value if stated is not None else 2.0), 2)
    usd = forms.number(
        st.number_input,
        "Dollars an hour",
        "hardware.budget",
        1.0,
        MOST_USD_PER_HOUR,
        hourly,
        key=f"budget {hourly}",
    )
    found: dict[str, int | None] = {}
    problems = {}
    for name in names:
        try:
            found[name] = gpus_for(scenario, name, float(usd), payment)
        except InputError as error:
            found[name], problems[name] = None, str(error)
    return found, problems


def _plans(question: Question) -> list[ClusterPlan]:
    """The plans that are known, in the order of the clusters; the others show a button or their progress."""
    keys = {name: question.key(name) for name in question.names if name not in question.problems}
    if any(not jobs.known(key) for key in keys.values()):
        st.button("Compare", type="primary", key="hardware compare", on_click=_start, args=(question,))
    found = []
    for name in question.names:
        if name in question.problems:
            found.append(ClusterPlan(name, question.search, None, problem=question.problems[name]))
            continue
        if not jobs.known(keys[name]):
            continue
        try:
            plan = _computed(question, name, keys[name])
        except MoesimError as error:
            plan = ClusterPlan(name, question.search, None, problem=str(error))
        if plan is not None:
            found.append(plan)
    return found


def _computed(question: Question, name: str, key: str) -> ClusterPlan | None:
    """The plan of one cluster, or None while its progress is shown."""
    known: ClusterPlan | None = jobs.cache.get(key)
    if known is not None:
        return known
    left, right = st.columns([2, 7], vertical_alignment="center")
    left.markdown(f"**{escaped(name)}**")
    with right:
        plan: ClusterPlan | None = widgets.long_work(
            f"Plans on {name}", key, f"Plan on {escaped(name)}", *question.work(name)
        )
    return plan


def _start(question: Question) -> None:
    """Start one job for every cluster whose plan is not known; they run one after the other."""
    for name in question.names:
        if name in question.problems or jobs.known(question.key(name)):
            continue
        long_work.start_on_click(f"Plans on {name}", question.key(name), *question.work(name))


def _answer(question: Question, plans: Sequence[ClusterPlan], payment: Payment) -> None:
    table = hardware_comparison(question.scenario, plans, payment)
    terms = [
        (row.cluster, headline.offer_words(row.price)) for row in table.clusters if row.price is not None
    ]
    if payment == "as stated":
        headline.mixed_terms(terms)
    st.html(text(table))
    _open_as(plans, payment)
    shown = [name for name in CHARTED if any(name in row.figures for row in table.clusters)]
    if shown:
        figure = forms.one_of(
            st.segmented_control,
            "Shown",
            "hardware.figure",
            shown,
            shown[0],
            key=f"hardware figure {shown[0]}",
            format_func=CHARTED.__getitem__,
            label_visibility="collapsed",
        )
        figure = figure or shown[0]
        bars = [
            charts.ClusterBar(
                f"{row.cluster} ({row.n_gpus:,} GPUs)",
                written(figure, band.predicted),
                (band.predicted, band.p10, band.p90),
                word(row.confidence),
            )
            for row in table.clusters
            if row.confidence is not None and (band := row.figures.get(figure)) is not None
        ]
        widgets.figure(
            charts.intervals(bars, CHARTED[figure]),
            f"{CHARTED[figure]} of each cluster, with P10 to P90",
            "hardware chart",
        )
    if any(row.confidence is not None and muted(row.confidence) for row in table.clusters):
        st.caption(
            ":material/show_chart: Roofline: nobody measured or published rates of this accelerator; "
            "datasheet peaks and an assumed efficiency stand in for them."
        )
    how = (
        "Quick search: ZeRO stage, communication SMs and context parallelism stay, no interleaving."
        if question.search == "narrow"
        else "Every plan of the planner's space in the scenario's number format."
    )
    st.caption(
        f"{how} Below each figure P10 to P90, then the difference from the first cluster with its own "
        "interval: grey where that contains zero. Costs are of the main phase, without stops; energy counts "
        "every board at its power limit."
    )
    rows = table.rows()
    text_file = io.StringIO()
    writer = csv.DictWriter(text_file, list(dict.fromkeys(name for row in rows for name in row)))
    writer.writeheader()
    writer.writerows(rows)
    widgets.download("Table (CSV)", text_file.getvalue().encode(), "hardware.csv", key="hardware csv")


def _open_as(plans: Sequence[ClusterPlan], payment: Payment) -> None:
    """A button for each cluster that has a plan."""
    with st.container(horizontal=True, vertical_alignment="center"):
        st.markdown("Open as the scenario:", width="content")
        for plan in plans:
            scenario = priced_scenario(plan, payment)
            if scenario is not None:
                name, icon = f"hardware open {plan.cluster}", ":material/open_in_new:"
                widgets.button(escaped(plan.cluster), name, state.adopt, scenario, icon=icon)
