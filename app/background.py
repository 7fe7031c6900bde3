"""Runs slow work in the background: a page appears at once and is redrawn when the work is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import streamlit as st

from moesim.app import jobs, long_work, page_switch, visitors
from moesim.app.tray import TrayEntry, tray


def value(place: str, key: str, what: str, function: Callable[..., Any], *args: Any) -> Any:
    """The value of `function(*args)`, or None while it is computed; the page shows `what` meanwhile.

    `place` names the spot on the page and `key` the result; work of this place for an older key is cancelled.
    Raises what the work raised.
    """
    known = jobs.cache.get(key)
    if known is not None:
        return known
    name = f"beside {place}"
    entry: TrayEntry | None = st.session_state.get(name)
    if entry is None or entry.key != key or entry.ended == "done":  # done, but no longer in the cache
        if entry is not None:
            tray.give_up(entry)
        entry = st.session_state[name] = tray.beside(
            visitors.current(), long_work.origin(what[:1].upper() + what[1:]), key, function, *args
        )
    if entry.is_open:
        _poll(name, entry, what)
        return None
    if entry.error is not None:
        raise entry.error
    if entry.state == "stopped":
        raise jobs.JobError("the computation was stopped")
    return jobs.cache.get(key)


@page_switch.redrawn(1.0)
def _poll(name: str, entry: TrayEntry, what: str) -> None:
    """Draw the page again, once, when the work is done."""
    if entry.is_open:
        st.caption(f":material/hourglass_top: {what}")
    elif st.session_state.get(f"{name} drawn") != entry.number:
        st.session_state[f"{name} drawn"] = entry.number
        st.rerun(scope="app")
