"""The head of every page: the current scenario with its name, facts and changes, undo, redo and pins."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import streamlit as st

from moesim.app import confidence, history, long_work, pinned, scenario_list, state
from moesim.app import scenario_links as links
from moesim.app.escaping import escaped
from moesim.app.views import a_and_b, headline
from moesim.hwmodels.errors import InfeasibleError, MoesimError
from moesim.hwmodels.units import in_unit
from moesim.simulator.common.key_values import overridden_key
from moesim.simulator.predict.result import Result
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.stated import is_stated

MOST_CHIPS = 8
"""Changes that are shown as chips; the rest is listed behind a button."""

REFUSED = ":red-badge[:material/error: refused: the page says why]"

HIDDEN = ("name", "description")
"""Changes that are no chips, because the scenario's name shows them."""


def show() -> Any:
    """Draw the head; returns the place of the facts, for `show_facts` once the page knows the result."""
    with st.container(horizontal=True, vertical_alignment="center", key="scenario-bar"):
        with st.popover(escaped(state.title()), icon=":material/folder_open:", width="content"):
            _menu()
        facts = st.empty()
        facts.markdown(_known_facts())
        _buttons()
    problem = st.session_state.get(state.LINK_PROBLEM)
    if problem is not None:
        st.error(escaped(problem), icon=":material/link_off:")
    not_started = st.session_state.pop(long_work.NOT_STARTED, None)
    if not_started is not None:
        st.error(escaped(not_started), icon=":material/hourglass_disabled:")
    _chips()
    return facts


def _known_facts() -> str:
    """The facts as far as they are known without waiting."""
    try:
        scenario = state.current()
    except MoesimError:
        return REFUSED
    return _facts(scenario, state.known_result(scenario))


def show_facts(place: Any) -> None:
    """Fill in what the bar says about the current scenario, predicted at the latest now."""
    try:
        scenario = state.current()
    except MoesimError:
        return
    try:
        place.markdown(_facts(scenario, state.result_of(scenario)))
    except InfeasibleError:
        place.markdown(_facts(scenario, None, ":red-badge[:material/error: cannot run]"))
    except MoesimError:
        place.markdown(_facts(scenario, None, ":red-badge[:material/error: not predicted]"))


def _facts(scenario: Scenario, result: Result | None, verdict: str = "") -> str:
    """Model, GPUs, tokens, fit, confidence and profile in one line of Markdown."""
    gpus = " + ".join(f"{machine.n_gpus:,} x {machine.accelerator.name}" for machine in scenario.machines)
    tokens = headline.compact(scenario.run.tokens)
    assumed = "" if is_stated(scenario, "run.tokens") else " (assumed)"
    parts = [escaped(scenario.shape.name), escaped(gpus), f"{tokens} tokens{assumed}"]
    if result is not None:
        memory = result.memory
        used, limit = (in_unit(size, "GiB", "bytes") for size in (memory.total_bytes, memory.capacity_bytes))
        colour, icon = headline.VERDICTS[memory.verdict]
        parts.append(f":{colour}-badge[:material/{icon}: {memory.verdict}, {used:.1f} of {limit:.1f} GiB]")
        parts.append(confidence.badge(result.confidence))
        parts.append(escaped(result.profile))
    return " · ".join([*parts, verdict] if verdict else parts)


def _buttons() -> None:
    full = len(pinned.pinned()) >= pinned.MOST - 1
    buttons: tuple[tuple[str, str, str, Callable[[], None], bool], ...] = (
        ("undo change", "undo", "Undo the last change", state.undo, history.can_undo()),
        ("redo change", "redo", "Redo the change that was undone last", state.redo, history.can_redo()),
        ("pin", "keep", "Pin this scenario: it stays beside what you change next, on every page", pinned.pin,
         not full and not pinned.is_pinned()),
    )  # fmt: skip
    with st.container(horizontal=True, width="content", gap="small", key="scenario-buttons"):
        for key, icon, note, act, possible in buttons:
            st.button(f":material/{icon}:", key=key, help=note, on_click=act, disabled=not possible)


def _chips() -> None:
    """Draw each change as a button that takes it back."""
    own = [text for text in state.overrides() if overridden_key(text) not in HIDDEN]
    if not own:
        return
    with st.container(horizontal=True, gap="small", key="chips"):
        for text in own[:MOST_CHIPS]:
            _chip(text)
        if len(own) > MOST_CHIPS:
            with st.popover(f"{len(own) - MOST_CHIPS} more changes", width="content"):
                for text in own[MOST_CHIPS:]:
                    _chip(text)
        if len(own) > 1:
            st.button("Undo all changes", on_click=state.reset, type="tertiary", key="undo all")


def _chip(text: str) -> None:
    key = overridden_key(text)
    st.button(
        f"{escaped(links.readable(text))} ✕",
        key=f"chip {key}",
        on_click=state.set_override,
        args=(key, None),
        help=f"Take {escaped(key)} back",
    )


def _menu() -> None:
    """Draw what can be done with the scenario as an object, and the others to switch to."""
    name = "scenario name"
    st.session_state[name] = state.title()
    st.text_input("Name", key=name, max_chars=state.MOST_NAME, on_change=_renamed, args=(name,))
    with st.container(horizontal=True):
        st.button("Duplicate", icon=":material/content_copy:", on_click=scenario_list.duplicate)
        if state.overrides():
            st.button(
                "Back to the preset", icon=":material/restart_alt:", on_click=state.reset, key="to preset"
            )
    warning = links.only_here(state.preset(), state.overrides())
    if warning is not None:
        st.warning(escaped(warning), icon=":material/link_off:")
    st.caption("The address of this page is a link to this scenario.")
    others = [entry for entry in scenario_list.recent() if entry.number != state.object_id()]
    if others:
        st.markdown("**Recent scenarios**")
    for entry in others[:8]:
        st.button(
            escaped(entry.name), key=f"recent {entry.number}", on_click=scenario_list.open_recent,
            args=(entry.number,), type="tertiary", width="stretch",
        )  # fmt: skip


def _renamed(name: str) -> None:
    state.rename(st.session_state[name])


def show_pins() -> None:
    """Draw the pinned scenario A beside B, the next pinned one or the current, with their difference."""
    kept = pinned.pinned()
    if not kept:
        return
    with suppress(MoesimError):  # the page says what is wrong with it
        a_and_b.show(kept)
