"""Inputs for one scenario key each, and parts that several pages share."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import streamlit as st

from moesim.app import pages, state, uploads
from moesim.app.long_work import long_work as long_work
from moesim.app.texts import escaped
from moesim.hwmodels.errors import InputError, MoesimError
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.outline import ClusterOutline


def value_of(scenario: Scenario, key: str) -> Any:
    """The value of a dotted key that was chosen last, even where the scenario refuses it."""
    refused = state.refused(key)
    if refused is not None:
        return refused
    value: Any = scenario
    for part in key.split("."):
        value = getattr(value, part)
    return value


def place(key: str, value: object) -> str:
    """Set a widget to the scenario's value and return the widget's key."""
    name = f"input {key}"
    st.session_state[name] = value
    return name


def _between(value: object, least: float, most: float) -> float:
    """A number clamped to limits; a value that is not a number (a refused text) counts as the least."""
    plain = isinstance(value, int | float) and not isinstance(value, bool) and value == value
    return min(max(float(value), least), most) if plain else least  # type: ignore[arg-type]


def _changed(key: str, name: str, convert: Callable[[Any], object]) -> None:
    state.set_override(key, convert(st.session_state[name]))


def number(
    scenario: Scenario, key: str, label: str, least: int = 1, most: int = 1_000_000, note: str | None = None
) -> None:
    """Draw an input for an integer."""
    name = place(key, int(_between(value_of(scenario, key), least, most)))
    st.number_input(
        label, least, most, step=1, key=name, help=note, on_change=_changed, args=(key, name, int)
    )


def fraction(
    scenario: Scenario, key: str, label: str, most: float, step: float, note: str | None = None
) -> None:
    """Draw a slider for a sourced fraction; its value counts as an assumption stated in the scenario."""
    value = value_of(scenario, key)
    name = place(key, _between(getattr(value, "value", value), 0.0, most))
    st.slider(label, 0.0, most, step=step, key=name, help=note, on_change=_changed, args=(key, name, float))


def choice(
    scenario: Scenario,
    key: str,
    label: str,
    options: Sequence[str],
    note: str | None = None,
    on_change: Callable[[str, str], None] | None = None,
) -> None:
    """Draw a choice of names; a value that is not among them (a description written out) is preserved."""
    value = value_of(scenario, key)
    if isinstance(value, ClusterOutline):
        value = scenario.machine
    shown = uploads.portable(value) if isinstance(value, str) else getattr(value, "name", "custom")
    known = list(options) if shown in options else [shown, *options]
    name = place(key, shown)
    st.selectbox(
        label,
        known,
        key=name,
        help=note,
        format_func=uploads.with_names,
        on_change=on_change or (lambda k, n: _changed(k, n, str)),
        args=(key, name),
    )


def toggle(scenario: Scenario, key: str, label: str, note: str | None = None) -> None:
    """Draw a yes-or-no input."""
    name = place(key, bool(value_of(scenario, key)))
    st.checkbox(label, key=name, help=note, on_change=_changed, args=(key, name, bool))


def complain(*errors: MoesimError) -> None:
    """Show each error as one sentence, with buttons for the nearest legal values and for undoing."""
    for error in errors:
        st.error(escaped(error), icon=":material/error:")
    with st.container(horizontal=True):
        for error in errors:
            if not isinstance(error, InputError) or error.key is None:
                continue
            for value in error.nearest:
                shown = str(value).lower() if isinstance(value, bool) else str(value)
                label, name = escaped(f"Set {error.key} = {shown}"), f"nearest {error.key} {shown}"
                button(label, name, state.set_override, error.key, value, type="primary")
            if state.override(error.key) is not None:
                label, name = escaped(f"Take {error.key} back"), f"take back {error.key}"
                button(label, name, state.take_back, (error.key,))
        if state.overrides():
            button("Undo the last change", "undo", state.undo)
        if state.overrides() or state.preset() != pages.HOME:
            button("Back to the preset", "reset", state.reset)


def guard(show: Callable[[], None]) -> None:
    """Run part of a page; an error that a visitor can cause is shown as one sentence."""
    try:
        show()
    except MoesimError as error:
        complain(error)


def button(label: str, key: str, act: Callable[..., None], *args: Any, **options: Any) -> None:
    """Draw a button that calls a function before the page is drawn again."""
    st.button(label, key=key, on_click=act, args=args, **options)


def download(
    label: str, data: Any, name: str, kind: str = "text/csv", key: str | None = None, **options: Any
) -> None:
    """Offer a file; the page is not drawn again for it."""
    st.download_button(label, data, name, kind, key=key, on_click="ignore", **options)


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], **options: Any) -> Any:
    """Draw rows below their header over the whole width; two columns of one title would be one."""
    assert len(set(header)) == len(header), header
    columns = {title: [row[number] for row in rows] for number, title in enumerate(header)}
    return st.dataframe(columns, width="stretch", hide_index=True, **options)


@lru_cache(maxsize=1)
def _has_alt() -> bool:
    return "alt" in inspect.signature(st.plotly_chart).parameters


PAINT_S = 0.35
"""Time for a browser to fetch the parts of a tile and to draw it: assumed, enough on a quiet machine only."""
READ = "charts read"
"""Session key that says whether the browser has read the library of charts."""


def numbers_first() -> None:
    """Let the browser draw the numbers sent so far before the first chart of a session comes.

    A chart makes it read a library of 5 MB, during which it draws nothing.
    """
    if st.context.url and not st.session_state.get(READ):  # no address: nobody watches
        time.sleep(PAINT_S)


def figure(chart: Any, alt: str, key: str | None = None, **options: Any) -> Any:
    """Draw a Plotly figure over the whole width, with an alternative text for screen readers."""
    extra: dict[str, Any] = {"alt": alt} if _has_alt() else {}
    unused = ["lasso2d", "select2d", "zoomIn2d", "zoomOut2d", "autoScale2d"]
    config = {"displaylogo": False, "displayModeBar": "hover", "modeBarButtonsToRemove": unused}
    st.session_state[READ] = True
    return st.plotly_chart(chart, width="stretch", config=config, key=key, **extra, **options)
