"""The page Compare: two to four scenarios side by side, their differences and the causes of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import streamlit as st
from msgspec import Struct

import moesim
from moesim.app import scenario_links, scenario_store, visitors, widgets
from moesim.app.charts import differences as charts
from moesim.app.texts import compact, escaped, meaning, money, muted, written
from moesim.app.views import headline
from moesim.hwmodels.units import in_unit
from moesim.simulator.predict.figures import powered_figures
from moesim.simulator.predict.result import Result
from moesim.simulator.predict.work_size import Band
from moesim.simulator.scenario import Scenario
from moesim.simulator.studies.compare import bands_of_changes, waterfall

# -- comparability -----------------------------------------------------------------------------------
# Sentences on why two predictions are hard to compare.

Side = tuple[Scenario, Result]

STANDS_ON = {
    "measured": "rates measured on the accelerator",
    "published": "published or derived rates",
    "peak-only": "datasheet peaks and an assumed efficiency",
}
"""The evidence behind the GEMM rates, by confidence."""


def unlike(sides: Sequence[Side]) -> list[str]:
    """Sentences on the differences that make totals hard to compare; the first scenario is A."""

    def each(words: Sequence[str]) -> str:
        """One clause per scenario, such as "A has 1,024, B has 2,048"."""
        return ", ".join(f"{letter} has {word}" for letter, word in zip("ABCD", words, strict=False))

    found = []
    gpus = [f"{scenario.machine.n_gpus:,}" for scenario, _ in sides]
    if len(set(gpus)) > 1:
        found.append(
            f"Not the same number of GPUs: {each(gpus)}. Compare figures per GPU, per dollar or per "
            "token; step time, days and tokens a day are those of the whole cluster."
        )
    kinds = [result.confidence for _, result in sides]
    if len(set(kinds)) > 1:
        words = [f"{STANDS_ON[result.confidence]} (profile {result.profile})" for _, result in sides]
        found.append(
            f"Not the same kind of profile: {each(words)}. Part of a difference between them is that of the "
            "profiles, not of the plans."
        )
    tokens = [f"{compact(result.run.tokens)} tokens" for _, result in sides]
    if len(set(tokens)) > 1:
        found.append(f"Not the same run: {each(tokens)}. Days, GPU-hours and cost are of these.")
    models = [scenario.shape.name for scenario, _ in sides]
    if len(set(models)) > 1:
        found.append(f"Not the same model: {each(models)}.")
    return found


# -- compare table -----------------------------------------------------------------------------------
# The table of the page Compare: what each scenario is, its figures, and their differences from the
# first.

PER = {
    "tokens_per_usd": "Tokens per $",
    "usd_per_billion_tokens": "Cost per B tokens",
    "gpu_hours_per_billion_tokens": "GPU-hours per B tokens",
}
"""Figures per dollar or per token, which stay comparable where GPUs, prices or tokens differ."""
MORE_IS_BETTER = frozenset(
    {"tokens_per_s_per_gpu", "mfu_causal", "mfu_noncausal", "tokens_per_day", "tokens_per_usd"}
)
IN_DOLLARS = frozenset({"usd_per_billion_tokens", "cost_usd"})


class Column(Struct, frozen=True):
    """One scenario: its title, intervals of its figures, and those of its differences from the first.

    `differences` is None while they are computed; `bands` is empty then.
    """

    title: str
    scenario: Scenario
    result: Result
    bands: Mapping[str, Band]
    differences: Mapping[str, Band] | None


def text(columns: Sequence[Column]) -> str:
    """The table as HTML; every text from a scenario is escaped."""
    faint = [muted(column.result.confidence) for column in columns]
    first = columns[0].result
    heads, prices, profiles, memories = [], [], [], []
    for column in columns:
        stated, level = column.scenario.machine.price_per_gpu_hour, column.result.confidence
        memory = column.result.memory
        size = f"{in_unit(memory.total_bytes, 'GiB', 'bytes'):.1f} GiB on the fullest GPU"
        fit = "fits" if memory.verdict == "fits" else f"<b>{memory.verdict}</b>"
        heads.append(f"{escape(column.title)}<small>{headline.badge_of(level)}</small>")
        prices.append(
            "no price"
            if stated is None
            else escape(stated.text)
            + headline.note(f"{headline.price_words(column.scenario)}, {stated.date}")
        )
        profiles.append(escape(column.result.profile) + headline.note(meaning(level)))
        memories.append(fit + headline.note(size))
    body = [
        headline.line("GPUs", [f"{c.scenario.machine.n_gpus:,}" for c in columns], faint),
        headline.line("Price of a GPU-hour", prices, faint),
        headline.line("Profile", profiles, faint),
        headline.line("Memory", memories, faint),
        headline.group("Figures", len(columns)),
    ]
    labels = {name: label for label, _, name in headline.tiles(first)} | PER
    for name, label in labels.items():
        cells = [_figure(column, columns[0], name) for column in columns]
        body.append(headline.line(label, cells, faint))
    return headline.table("Scenarios side by side", heads, body, faint)


def _written(name: str, value: float | None) -> str:
    if value is None or name in IN_DOLLARS:
        return money(value)
    return written(name, value)


def _figure(column: Column, first: Column, name: str) -> str:
    value, band = powered_figures(column.result)[name], column.bands.get(name)
    ends = "" if band is None else f"{_written(name, band.p10)} to {_written(name, band.p90)}"
    mark = "" if column.result.memory.fits else headline.DOES_NOT_FIT
    cell = headline.main(_written(name, value)) + headline.note(ends) + headline.note(mark)
    base = powered_figures(first.result)[name]
    if column is first or value is None or base is None:
        return cell
    by = value - base
    told, band = _change(name, by), None if column.differences is None else column.differences.get(name)
    if told == headline.SAME or band is None:  # it may as well be none, or nobody knows yet
        return cell + headline.note(told)
    low, high = _change(name, band.p10), _change(name, band.p90)
    return cell + headline.delta(told, low, high, band.has_sign, (by > 0.0) == (name in MORE_IS_BETTER))


def _change(name: str, by: float) -> str:
    if name not in IN_DOLLARS:
        return headline.change(name, by)
    shown = _written(name, abs(by))
    return headline.SAME if shown == _written(name, 0.0) else f"{'-' if by < 0 else '+'}{shown}"


def show() -> None:
    """Draw the page."""
    scenario_store.synchronise()
    kept, current = scenario_store.pinned(), scenario_store.current()
    _choose(kept, current)
    warning = next((w for _, name, texts in kept if (w := scenario_links.only_here(name, texts))), None)
    if warning is not None:
        st.warning(escaped(warning), icon=":material/link_off:")
    others = [side for side in kept if side[1:] != current[1:]]
    if not kept and current[2]:
        others = [(scenario_links.named(current[1], ()), current[1], ())]
        st.caption("Nothing is chosen yet: the scenario stands beside its preset as shipped.")
    elif not others:
        st.caption("Nothing else is chosen yet: choose above what this scenario is to be compared with.")
    named = [*others, current]
    sides = headline.sides([(label, label, preset, texts) for label, preset, texts in named])
    if not sides:
        return
    for number, (_, _, result) in enumerate(sides):
        if not result.memory.fits:
            st.error(
                f"{'ABCD'[number]} {result.memory.shortage}. Its times and prices are those of a plan "
                "which cannot run as it is.",
                icon=":material/memory:",
            )
    headline.mixed_terms(
        [("ABCD"[n], headline.price_words(scenario)) for n, (_, scenario, _) in enumerate(sides)]
    )
    for sentence in unlike([(s, r) for _, s, r in sides]):
        st.warning(escaped(sentence), icon=":material/balance:")
    known = headline.draws("compare", [scenario for _, scenario, _ in sides])
    _table(sides, known)
    if len(sides) > 1:
        _differences(sides, known)


def _choose(kept: Sequence[scenario_store.Kept], current: scenario_store.Kept) -> None:
    """Choose what to compare with among pinned and recent scenarios and presets; what is chosen is pinned."""
    words: dict[str, str] = {}
    for label, name, own in kept:
        words[scenario_links.written(name, own)] = label
    for entry in scenario_store.recent(visitors.current()):
        shown = f"{entry.title} ({entry.figures})" if entry.figures else entry.title
        words.setdefault(entry.written, f"recent: {shown}")
    for name in moesim.presets():
        words.setdefault(scenario_links.written(name, ()), f"preset: {name}")
    pinned = [scenario_links.written(name, own) for _, name, own in kept]
    key = f"compared {len(pinned)}"
    st.session_state[key] = pinned
    st.multiselect(
        f"Compare {escaped(current[0])} with",
        list(words),
        key=key,
        format_func=lambda text: words.get(text, text),
        max_selections=scenario_store.MOST - 1,
        placeholder="recent scenarios and presets",
        help="Scenarios chosen here are pinned, as with the pin in the bar above",
        on_change=lambda: scenario_store.pin_all(st.session_state[key]),
    )


Sides = list[tuple[str, Scenario, Result]]


def _table(sides: Sides, known: list[Any] | None) -> None:
    results = [result for _, _, result in sides]
    bands = None if known is None else headline.intervals(results, known)
    differ = [_bands(results, number, known) for number in range(len(sides))]
    columns = [
        Column(_column(number, sides), scenario, result, own, difference)
        for number, ((_, scenario, result), own, difference) in enumerate(
            zip(sides, bands or [{}] * len(sides), differ, strict=True)
        )
    ]
    st.html(text(columns))
    st.caption(
        "Predicted values, below them P10 to P90, and the difference from A with its own interval: grey "
        "where that contains zero or is not known yet. Scenarios share the random draws of every source that "
        "they have in common."
    )
    ends = None if bands is None else [(own["step_time_s"].p10, own["step_time_s"].p90) for own in bands]
    names = [_column(n, sides) for n in range(len(sides))]
    times = [result.step.time_s for result in results]
    chart = charts.side_by_side(names, times, "step time (s)", ends)
    widgets.figure(chart, "Step time of each scenario", "sides")


def _bands(results: Sequence[Result], number: int, known: list[Any] | None) -> dict[str, Band] | None:
    """Intervals of the differences against the first, where the draws are known."""
    return None if known is None else bands_of_changes(results[0], known[0], results[number], known[number])


def _column(number: int, sides: Sides) -> str:
    return f"{'ABCD'[number]}: {sides[number][0]}"


def _differences(sides: Sides, known: list[Any] | None) -> None:
    st.header("Where the difference comes from")
    options = list(range(1, len(sides)))
    other = options[-1]
    if len(options) > 1:
        other = st.radio(
            "Against A",
            options,
            index=len(options) - 1,
            format_func=lambda n: escaped(_column(n, sides)),
            horizontal=True,
        )
    (_, first_scenario, first), (_, other_scenario, second) = sides[0], sides[other]
    changed = scenario_links.overrides_between(first_scenario, other_scenario)
    letter = "ABCD"[other]
    delta = second.step.time_s - first.step.time_s
    if not changed:
        st.info(f"A and {letter} are the same scenario: nothing differs.", icon=":material/equal:")
        return
    if delta == 0.0:
        st.info(f"A step of A and of {letter} takes the same time.", icon=":material/equal:")
    else:
        bands = _bands([first, second], 1, None if known is None else [known[0], known[other]])
        sure, words = headline.sure("step_time_s", bands)
        st.markdown(
            f"{letter} takes **{delta:+.3f} s** a step ({delta / first.step.time_s:+.1%}) against A"
            f"{f', {words}' if words else ''}. The causes are those on the critical path, and their "
            "differences add up to it."
        )
        if not sure and bands is not None:
            st.info(
                "The difference lies within its own uncertainty: which one is faster is not known. Its "
                "causes are grey.",
                icon=":material/question_mark:",
            )
        causes = [(row.cause, row.seconds[1] - row.seconds[0]) for row in waterfall([first, second])]
        widgets.figure(
            charts.waterfall("A", first.step.time_s, causes, letter, second.step.time_s, sure=sure),
            f"Waterfall from {first.step.time_s:.3f} s to {second.step.time_s:.3f} s by cause",
            "waterfall",
        )
    with st.expander("What was changed"):
        st.code("\n".join(map(scenario_links.readable, changed)), language=None)
