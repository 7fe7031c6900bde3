"""The page Compare: two to four scenarios side by side, their differences and the causes of these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import streamlit as st

from moesim.app import pinned, scenario_links, state, widgets
from moesim.app.charts import differences as charts
from moesim.app.escaping import escaped
from moesim.app.views import comparability, compare_table, headline, uncertainty
from moesim.hwmodels.errors import MoesimError
from moesim.simulator.predict.band import Band
from moesim.simulator.predict.result import Result
from moesim.simulator.scenario import Scenario
from moesim.simulator.studies.compare import bands_of_changes, waterfall


def show() -> None:
    """Draw the page."""
    pinned.synchronise()
    kept = pinned.pinned()
    st.markdown(
        "The current scenario is compared with those kept here. Keep this one, change something on another "
        "page, and come back."
    )
    with st.container(horizontal=True):
        st.button(
            "Keep the current scenario",
            on_click=pinned.pin,
            disabled=len(kept) >= pinned.MOST - 1,
            type="primary",
            key="keep",
        )
        for number, (label, _, _) in enumerate(kept):
            st.button(
                f"Remove {escaped(label)}", key=f"remove {number}", on_click=pinned.unpin, args=(number,)
            )
    warning = next((w for _, name, texts in kept if (w := scenario_links.only_here(name, texts))), None)
    if warning is not None:
        st.warning(escaped(warning), icon=":material/link_off:")
    if not kept:
        st.info("Nothing is kept yet: keep the current scenario, then change one of its values.")
        return
    named = [*kept, (pinned.label(state.preset(), state.overrides()), state.preset(), state.overrides())]
    sides = []
    for label, preset, texts in named:
        try:
            scenario = state.build(preset, texts)
            sides.append((label, scenario, state.result_of(scenario, f"Simulating {label}")))
        except MoesimError as error:
            st.error(escaped(f"{label}: {error}"), icon=":material/error:")
    if len(sides) > 1:
        for number, (_, _, result) in enumerate(sides):
            if not result.memory.fits:
                st.error(
                    f"{'ABCD'[number]} {result.memory.shortage}. Its times and prices are those of a plan "
                    "which cannot run as it is.",
                    icon=":material/memory:",
                )
        for sentence in comparability.unlike([(s, r) for _, s, r in sides]):
            st.warning(escaped(sentence), icon=":material/balance:")
        known = uncertainty.draws("compare", [scenario for _, scenario, _ in sides])
        _table(sides, known)
        _differences(sides, known)


Sides = list[tuple[str, Scenario, Result]]


def _table(sides: Sides, known: list[Any] | None) -> None:
    results = [result for _, _, result in sides]
    bands = None if known is None else uncertainty.intervals(results, known)
    differ = [_bands(results, number, known) for number in range(len(sides))]
    st.html(
        compare_table.text(
            [
                compare_table.Column(_column(number, sides), scenario, result, own, difference)
                for number, ((_, scenario, result), own, difference) in enumerate(
                    zip(sides, bands or [{}] * len(sides), differ, strict=True)
                )
            ]
        )
    )
    st.caption(
        "Predicted values, below them P10 to P90, and the difference from A with its own interval: grey "
        "where that contains zero or is not known yet. Scenarios share the random draws of every source that "
        "they have in common."
    )
    ends = None if bands is None else [(own["step_time_s"].p10, own["step_time_s"].p90) for own in bands]
    widgets.figure(
        charts.side_by_side(
            [_column(n, sides) for n in range(len(sides))],
            [result.step.time_s for result in results],
            "step time (s)",
            ends,
        ),
        "Step time of each scenario",
        "sides",
    )


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
