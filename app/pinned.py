"""Scenarios that a visitor pinned to compare with, held in the session and in the address."""

from __future__ import annotations

import streamlit as st

from moesim.app import scenario_links, state, uploads
from moesim.app.escaping import escaped
from moesim.hwmodels.errors import InputError
from moesim.simulator.common.key_values import overridden_key, split_key_value

MOST = 4
"""Scenarios that are compared at most: the pinned ones and the current one."""

PARAMETER = "with"
"""Query parameter of a pinned scenario, as `scenario_links.written` writes it."""

_WRITTEN = "pins written"
"""Session key with what the address was given last, which may come back once more after an unpin."""

Kept = tuple[str, str, tuple[str, ...]]
"""A pinned scenario: label, preset, changes."""


def pinned() -> list[Kept]:
    """The pinned scenarios, in the order of pinning; the first is A."""
    found: list[Kept] = st.session_state.setdefault("kept", [])
    return found


def synchronise() -> None:
    """Take the pinned scenarios of a shared link over, and write a changed list back into the address."""
    given = st.query_params.get_all(PARAMETER)
    if given and not pinned() and given != st.session_state.get(_WRITTEN):
        for text in given[: MOST - 1]:
            try:
                preset, texts = scenario_links.read(text)
            except InputError as error:
                st.error(escaped(f"The link's parameter {PARAMETER} {error}."))
                return
            pinned().append((label(preset, texts), preset, texts))
    wanted = [scenario_links.written(preset, texts) for _, preset, texts in pinned()]
    st.session_state[_WRITTEN] = wanted
    if wanted != given:
        if wanted:
            st.query_params[PARAMETER] = wanted
        else:
            del st.query_params[PARAMETER]


def pin() -> None:
    """Pin the current scenario."""
    mine = (label(state.preset(), state.overrides()), state.preset(), state.overrides())
    if len(pinned()) < MOST - 1 and mine not in pinned():
        pinned().append(mine)


def unpin(number: int) -> None:
    """Remove a pinned scenario."""
    del pinned()[number]


def is_pinned() -> bool:
    """Whether the current scenario is pinned as it is."""
    return any(kept[1:] == (state.preset(), state.overrides()) for kept in pinned())


def label(preset: str, texts: tuple[str, ...]) -> str:
    """A short name of a scenario: the one that it was given, or what was changed, or its preset's."""
    for text in texts:
        if overridden_key(text) == "name":
            return (split_key_value(text)[1] or "").strip('"')[:48]
    short = ", ".join(text.replace("parallel.", "").replace("communication.", "") for text in texts)
    return (short if len(short) <= 48 else f"{short[:45]}...") or uploads.with_names(preset)
