"""Compare: two to four scenarios side by side, their differences and where these come from."""

from __future__ import annotations

import json
from typing import Any

import streamlit as st

from moesim.app import overrides, state, widgets
from moesim.app.charts import study as charts
from moesim.app.views import headline
from moesim.app.words import escaped
from moesim.hwmodels.errors import InputError, MoesimError
from moesim.simulator.result import Result
from moesim.simulator.scenario import Scenario
from moesim.simulator.study.compare import changes, waterfall

MOST = 4
PARAMETER = "with"
"""Query parameter of a further scenario: a JSON list of its preset and overrides."""

Kept = tuple[str, str, tuple[str, ...]]
"""A scenario of the comparison: label, preset, overrides."""


def show() -> None:
    """Draw the page."""
    _from_address()
    kept = _kept()
    st.markdown(
        "The current scenario is compared with those kept here. Keep this one, change something on another "
        "page, and come back."
    )
    with st.container(horizontal=True):
        st.button(
            "Keep the current scenario",
            on_click=_keep,
            disabled=len(kept) >= MOST - 1,
            type="primary",
            key="keep",
        )
        for number, (label, _, _) in enumerate(kept):
            st.button(f"Remove {escaped(label)}", key=f"remove {number}", on_click=_remove, args=(number,))
    warning = next((w for _, name, texts in kept if (w := overrides.only_here(name, texts))), None)
    if warning is not None:
        st.warning(escaped(warning), icon=":material/link_off:")
    if not kept:
        st.info("Nothing is kept yet: keep the current scenario, then change one of its values.")
        return
    named = [*kept, (_label(state.preset(), state.overrides()), state.preset(), state.overrides())]
    sides = []
    for label, preset, texts in named:
        try:
            scenario = state.build(preset, texts)
            sides.append((label, scenario, state.result_of(scenario, f"Simulating {label}")))
        except MoesimError as error:
            st.error(escaped(f"{label}: {error}"), icon=":material/error:")
    if len(sides) > 1:
        _table(sides)
        _differences(sides)


def _kept() -> list[Kept]:
    found: list[Kept] = st.session_state.setdefault("kept", [])
    return found


def _from_address() -> None:
    """A shared link brings its scenarios along; a changed list is written back."""
    given = st.query_params.get_all(PARAMETER)
    if given and not _kept():
        for text in given[: MOST - 1]:
            try:
                preset, texts = state.kept_of(text)
            except InputError as error:
                st.error(escaped(f"The link's parameter {PARAMETER} {error}."))
                return
            _kept().append((_label(preset, texts), preset, texts))
    wanted = [json.dumps([preset, *texts]) for _, preset, texts in _kept()]
    if wanted != given:
        if wanted:
            st.query_params[PARAMETER] = wanted
        else:
            del st.query_params[PARAMETER]


def _label(preset: str, texts: tuple[str, ...]) -> str:
    short = ", ".join(text.replace("parallel.", "").replace("communication.", "") for text in texts)
    return (short if len(short) <= 48 else f"{short[:45]}...") or preset


def _keep() -> None:
    _kept().append((_label(state.preset(), state.overrides()), state.preset(), state.overrides()))


def _remove(number: int) -> None:
    del _kept()[number]


Sides = list[tuple[str, Scenario, Result]]


def _table(sides: Sides) -> None:
    rows: list[dict[str, Any]] = []
    tables = [headline.tiles(result) for _, _, result in sides]
    differ = [changes(sides[0][2], result) for _, _, result in sides]
    for number, (label, value, name) in enumerate(tables[0]):
        row = {"figure": label, _column(0, sides): value}
        for n in range(1, len(sides)):
            row[_column(n, sides)] = tables[n][number][1]
            by = differ[n].get(name)
            row[f"{'ABCD'[n]} - A"] = "" if by is None else headline.change(name, by)
        rows.append(row)
    memory = [result.memory for _, _, result in sides]
    rows.append(
        {
            "figure": "Memory",
            **{_column(n, sides): "fits" if m.fits else "does not fit" for n, m in enumerate(memory)},
            **{f"{'ABCD'[n]} - A": "" for n in range(1, len(sides))},
        }
    )
    st.dataframe(rows, hide_index=True)
    widgets.figure(
        charts.side_by_side(
            [_column(n, sides) for n in range(len(sides))],
            [result.step.time_s for _, _, result in sides],
            "step time (s)",
        ),
        "Step time of each scenario",
        "sides",
    )


def _column(number: int, sides: Sides) -> str:
    return f"{'ABCD'[number]}: {sides[number][0]}"


def _differences(sides: Sides) -> None:
    st.subheader("Where the difference comes from")
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
    causes = [(row.cause, row.seconds[1] - row.seconds[0]) for row in waterfall([first, second])]
    delta = second.step.time_s - first.step.time_s
    st.markdown(
        f"{'ABCD'[other]} takes **{delta:+.3f} s** a step ({delta / first.step.time_s:+.1%}) against A; the "
        "causes are those on the critical path, and their differences add up to it."
    )
    widgets.figure(
        charts.waterfall("A", first.step.time_s, causes, "ABCD"[other], second.step.time_s),
        f"Waterfall from {first.step.time_s:.3f} s to {second.step.time_s:.3f} s by cause",
        "waterfall",
    )
    changed = overrides.overrides_between(first_scenario, other_scenario)
    if changed:
        with st.expander("What was changed"):
            st.code("\n".join(map(overrides.told, changed)), language=None)
