"""A visitor's scenarios as objects: the current one is stored as it changes; others can be opened again."""

from __future__ import annotations

import streamlit as st

from moesim.app import scenario_links, scenario_store, state, visitors
from moesim.app.escaping import escaped
from moesim.hwmodels.errors import InputError


def remember() -> None:
    """Store the current scenario, if it was changed since; a preset as shipped is not stored."""
    number, preset, texts = state.object_id(), state.preset(), state.overrides()
    shown = (number, preset, texts)
    if not texts and not preset.startswith("upload-"):
        return
    if st.session_state.get("remembered") != shown:
        st.session_state["remembered"] = shown
        scenario_store.put(visitors.current(), number, state.title(), scenario_links.written(preset, texts))


def recent() -> list[scenario_store.StoredScenario]:
    """The visitor's scenarios, the one changed last first."""
    return scenario_store.recent(visitors.current())


def notice() -> None:
    """Say in one sentence where the visitor's scenarios cannot be kept; the page works all the same."""
    problem = scenario_store.problem()
    if problem is not None:
        st.warning(escaped(problem), icon=":material/warning:")


def open_recent(number: str) -> None:
    """Make a stored scenario the current one; one that cannot be read is forgotten, and that is said."""
    found = next((entry for entry in recent() if entry.number == number), None)
    if found is None:
        return
    try:
        preset, texts = scenario_links.read(found.written)
    except InputError as error:
        scenario_store.remove(visitors.current(), number)
        st.session_state[state.LINK_PROBLEM] = f"{found.name} cannot be opened any more: {error}"
        return
    st.session_state["scenario id"] = number
    state.open_scenario(preset, texts)


def duplicate() -> None:
    """Make a copy of the current scenario the current one, under a name of its own."""
    name = state.title()
    state.open_scenario(state.preset(), state.overrides(), new=True)
    state.rename(f"{name} copy")


def forget(number: str) -> None:
    """Remove a scenario from the list; the current one stays open."""
    scenario_store.remove(visitors.current(), number)
