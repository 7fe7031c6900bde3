"""The main figures of a result as tiles; used by several pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Literal

import streamlit as st

import moesim
from moesim.app import explanations, long_work, navigation, predictions, state, widgets
from moesim.app.texts import badge, basis_badge, escaped, money, muted, rates, written
from moesim.hwmodels.errors import MoesimError
from moesim.simulator.predict.figures import figure_bases
from moesim.simulator.predict.result import Result
from moesim.simulator.predict.work_size import Band
from moesim.simulator.scenario import Scenario
from moesim.simulator.scoring.published import Row
from moesim.simulator.studies.compare import bands_of_changes, bands_of_draws
from moesim.simulator.studies.reprice import without_prices

DeltaColour = Literal["normal", "inverse", "off"]


def change(name: str, value: float) -> str:
    """A difference in a figure, such as "-0.534 s" or "+$120 k"; `SAME` where no shown digit differs."""
    if written(name, abs(value)) == written(name, 0.0):
        return SAME
    points = " points" if name.startswith("mfu") else ""
    return f"{'-' if value < 0 else '+'}{written(name, abs(value))}{points}"


SAME = "the same"


def interval(name: str, band: Band) -> str:
    """The labelled interval of a figure, such as "P10 to P90: 16.1 s to 21.3 s"."""
    return f"P10 to P90: {written(name, band.p10)} to {written(name, band.p90)}"


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
"""Mark of every figure of such a plan."""


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


def price_words(scenario: Scenario) -> str:
    """How the GPUs of a scenario are paid, in words that follow a cost, such as "on demand, 2026-03"."""
    price = scenario.run.price
    if price is not None and price.buy is not None:
        return "bought"
    if price is not None and price.rent is not None:
        return term_words(price.rent.term)
    if price is not None and price.offer is not None:
        return term_words(price.offer.terms) if price.offer.term == "not stated" else offer_words(price.offer)
    return ", ".join(sorted({offer_words(machine.price_per_gpu_hour) for machine in scenario.machines}))


def offer_words(price: Any) -> str:
    """The terms of a price of a GPU-hour in words."""
    if price is None:
        return "without a price"
    if getattr(price, "term", "not stated") != "not stated":
        return str(getattr(price, "label", "")) or term_words(price.term)
    return term_words("assumed" if price.kind == "assumed" else "own")


def term_words(term: str) -> str:
    """A term of payment in words; one that this page does not know keeps its own."""
    return TERMS.get(term, term.replace("-", " "))


def mixed_terms(named: Sequence[tuple[str, str]]) -> None:
    """Warn where prices that are compared have different terms; `named`: (what is paid, its terms)."""
    if len({terms for _, terms in named}) > 1:
        told = ", ".join(f"{name}: {terms}" for name, terms in named)
        st.warning(
            f"These prices are of different terms ({escaped(told)}): part of a difference in cost is that of "
            "the terms.",
            icon=":material/payments:",
        )


TERMS = {
    "on-demand": "on demand",
    "spot": "spot",
    "reserved": "one-year rent",
    "one-year": "one-year rent",
    "three-year": "three-year rent",
    "capacity-block": "capacity block",
    "assumed": "assumed price",
    "not stated": "terms not stated",
    "own": "stated price",
}
"""Terms of a price in words."""

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
    key = f"{navigation.MUTED}-{place}" if muted(result.confidence) else f"tiles-{place}"
    with st.container(key=key):
        if scenario.stages.blocks is not None:
            st.info(
                "Only a part of the model is simulated: throughput, MFU and cost of a run have no meaning "
                "here."
            )
            st.metric("Step time", f"{result.step.time_s:.4f} s")
            st.caption(DOES_NOT_FIT if not result.memory.fits else badge(result.confidence))
            return
        helps = explanations.of_result(scenario, result)
        rows, bases = tiles(result), figure_bases(scenario, result)
        for start in range(0, len(rows), columns):
            for spot, (label, value, name) in zip(
                st.columns(columns), rows[start : start + columns], strict=False
            ):
                with spot, st.container(gap=None):
                    st.metric(label, value, help=helps.get(name))
                    lines = [source[name] for source in (intervals, published) if source and name in source]
                    if not result.memory.fits:
                        lines.insert(0, f":red[{DOES_NOT_FIT}]")
                    if name == "cost_usd" and result.run.cost_usd is not None:
                        lines.append(price_words(scenario))
                    basis = bases[name]
                    st.caption("  \n".join([basis_badge(basis.level, basis.reason), *lines]))
        st.caption(STATISTIC)


STATISTIC = (
    "Each figure is predicted with every input at its stated value. Duration, GPU-hours and cost are of the "
    "main phase without interruptions; Run & cost has the whole run."
)


def beside(rows: Sequence[Row], bands: Mapping[str, Band] | None = None) -> dict[str, str]:
    """Distance from the published value in words, by the name of the figure.

    `bands`: intervals of the figures, where they are known; a published value outside its own is said to be.
    """
    found = {}
    for row in rows:
        name = FIGURES.get(row.quantity)
        if name is not None and name not in found:
            value = row.published * UNITS.get(row.unit, 1.0)
            words = f"{row.relative_error:+.1%} from the published {written(name, value)}"
            band = None if bands is None else bands.get(name)
            outside = band is not None and not band.p10 <= value <= band.p90
            found[name] = f"{words}  \nwhich is outside P10 to P90" if outside else words
    return found


UNITS = {"kh": 1e3, "M$": 1e6, "G": 1e9}
"""Factors of the units of published figures."""


FIGURES = {
    "time per step": "step_time_s",
    "MFU, causal": "mfu_causal",
    "MFU, non-causal": "mfu_noncausal",
    "tokens per day": "tokens_per_day",
    "pre-training GPU-hours for 14.8T tokens": "gpu_hours",
    "pre-training cost at $2 per GPU-hour": "cost_usd",
}
"""The figure that each published quantity (simulator/data/published) belongs to."""


# -- uncertainty -------------------------------------------------------------------------------------
# Uncertainty of figures and of differences between scenarios, computed in jobs.

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


def sides(named: Sequence[tuple[str, str, str, tuple[str, ...]]]) -> list[tuple[str, Scenario, Result]]:
    """(name, scenario, result) of scenarios given as (name, words while it is simulated, preset, changes).

    One that cannot be predicted is left out, and it is said why.
    """
    found = []
    for name, words, preset, texts in named:
        try:
            scenario = state.build(preset, texts)
            found.append((name, scenario, state.result_of(scenario, f"Simulating {words}")))
        except MoesimError as error:
            st.error(escaped(f"{name}: {error}"), icon=":material/error:")
    return found


def draws(place: str, scenarios: Sequence[Scenario], what: str = "intervals follow") -> list[Any] | None:
    """Random draws of every scenario's step time; None while one is computed, which is said in `what`.

    Scenarios share the draws of the sources that they have in common. Scenarios that differ only in prices
    have the same draws.
    """
    found = []
    for number, scenario in enumerate(scenarios):
        key = f"draws/{state.cache_key(without_prices(scenario))}"
        try:
            work = (predictions.relative_draws, scenario)
            found.append(long_work.value(f"{place} {number}", key, what, *work))
            if found[-1] is None:
                return None  # one at a time: the page has one line for it
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
    with st.expander("A check of these intervals: 200 simulated steps, all uncertain inputs moved together"):
        if not first_order:
            st.caption("The intervals above come first.")
            return
        key = f"interval by engine/{state.cache_key(without_prices(scenario))}"
        work = (predictions.interval_by_engine, scenario)
        try:
            whole: Result | None = widgets.long_work("interval by engine", key, "Simulate 200 steps", *work)
            found = None if whole is None else moesim.reprice(whole, scenario).uncertainty
        except MoesimError as error:
            st.caption(f"No interval: {escaped(error)}")
            return
        if found is None or found.by_engine is None:
            return
        engine, columns = found.by_engine, {}
        known = {name: band for name, band in engine.bands.items() if name in first_order}
        for kind, bands in (("estimated", first_order), ("simulated", known)):
            for point in POINTS:
                columns[f"{kind} {point}"] = [
                    written(name, getattr(bands[name], point.lower())) for name in known
                ]
        st.dataframe({"figure": [TITLES.get(name, name) for name in known], **columns}, hide_index=True)
        st.caption(
            f"Over these {engine.draws} draws the estimated step time differs from the simulated one by "
            f"{engine.first_order_mean:+.2%} in the mean and {engine.first_order_rms:.2%} rms."
        )


def changes(place: str, first: Side, other: Side, what: str = "intervals follow") -> dict[str, Band] | None:
    """Intervals of the differences between two results, by figure; None while they are computed."""
    known = draws(place, [first[0], other[0]], what)
    return None if known is None else bands_of_changes(first[1], known[0], other[1], known[1])


def intervals(results: Sequence[Result], known: Sequence[Any]) -> list[dict[str, Band]]:
    """Intervals of the figures of every result, from its draws."""
    return [bands_of_draws(result, own) for result, own in zip(results, known, strict=True)]


# -- figure table ------------------------------------------------------------------------------------
# A table of figures as HTML: a column for each subject, with intervals and differences below the
# figures.

STYLE = """<style>
.figures {overflow-x: auto}
.figures table {border-collapse: collapse; width: 100%; font-size: 0.875rem;
  font-variant-numeric: tabular-nums}
.figures th, .figures td {text-align: left; vertical-align: top; padding: 0.3rem 0.75rem 0.3rem 0;
  border-bottom: 1px solid light-dark(#e3e6eb, #333946); min-width: 8.5rem; line-height: 1.3;
  overflow-wrap: anywhere}
.figures tbody th {font-weight: 400; min-width: 7rem; color: light-dark(#4a505b, #b6bbc6)}
.figures thead th {font-weight: 600; font-size: 0.95rem; border-bottom-width: 2px}
@media (max-width: 640px) {.figures table {font-size: 0.8rem}
  .figures th, .figures td {min-width: 6.5rem; padding-right: 0.4rem} .figures tbody th {min-width: 4.8rem}}
.figures .group th {font-weight: 600; padding-top: 0.8rem; color: inherit}
.figures .main {font-weight: 600; font-size: 0.95rem}
.figures small {display: block; font-size: 0.78rem; color: light-dark(#5f6670, #a3a8b4); font-weight: 400}
.figures .roofline, .figures .roofline .main {color: light-dark(#5f6670, #a3a8b4); font-style: italic}
.figures .better {color: light-dark(#116b2c, #56d364)}
.figures .worse {color: light-dark(#b42318, #ff8f85)}
.figures .badge {display: inline-block; border-radius: 0.6rem; padding: 0 0.5rem; font-size: 0.75rem;
  font-style: normal; font-weight: 600; border: 1px solid currentColor}
.figures .measured {color: light-dark(#116b2c, #56d364)}
.figures .published {color: light-dark(#0b5cad, #79c0ff)}
.figures .peak-only {color: light-dark(#5f6670, #a3a8b4)}
</style>"""
"""Colours with at least 4.5 to 1 against the page in both themes; none is the only cue."""


def table(label: str, heads: Sequence[str], lines: Sequence[str], faint: Sequence[bool]) -> str:
    """The whole table; `heads` are HTML, `lines` come from `line` and `group`, `faint` mutes columns."""
    cells = "".join(_cell("th", head, mute, ' scope="col"') for head, mute in zip(heads, faint, strict=True))
    return (
        f'{STYLE}<div class="figures" tabindex="0" role="region" aria-label="{escape(label)}">'
        f'<table><thead><tr><th scope="col">&nbsp;</th>{cells}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def line(label: str, cells: Sequence[str], faint: Sequence[bool]) -> str:
    """A row of HTML cells."""
    joined = "".join(_cell("td", cell, mute) for cell, mute in zip(cells, faint, strict=True))
    return f'<tr><th scope="row">{escape(label)}</th>{joined}</tr>'


def group(title: str, columns: int) -> str:
    """A heading over the rows that follow."""
    return f'<tr class="group"><th scope="rowgroup" colspan="{columns + 1}">{escape(title)}</th></tr>'


def main(text: str) -> str:
    """A figure, drawn strongly."""
    return f'<span class="main">{escape(text)}</span>'


def note(text: str) -> str:
    """A smaller line below a figure."""
    return f"<small>{escape(text)}</small>" if text else ""


def difference(text: str, better: bool) -> str:
    """A line with a difference beyond its own uncertainty; one within it is a plain `note`."""
    return f'<small class="{"better" if better else "worse"}">{escape(text)}</small>'


def delta(told: str, low: str, high: str, sure: bool, better: bool) -> str:
    """A line with a difference and its P10 to P90: coloured beyond its uncertainty, else grey and said so."""
    if sure:
        return difference(f"{told} ({low} to {high})", better)
    return note(f"{told}, uncertain ({low} to {high})")


def badge_of(confidence: str) -> str:
    """The word for a level of confidence in its colour."""
    return f'<span class="badge {escape(confidence)}">{escape(rates(confidence))}</span>'


def _cell(tag: str, content: str, faint: bool, more: str = "") -> str:
    return f"<{tag}{more}{' class=roofline' if faint else ''}>{content}</{tag}>"
