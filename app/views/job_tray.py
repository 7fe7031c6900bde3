"""The tray in the sidebar of every page: this visitor's searches, sweeps and simulations."""

from __future__ import annotations

from typing import Any

import streamlit as st

from moesim.app import forms, long_work, page_switch, state, visitors
from moesim.app.escaping import escaped
from moesim.app.tray import TrayEntry, tray

POLL_S = 1.0

ENDS = {"done": ":material/check_circle:", "stopped": ":material/stop_circle:", "failed": ":material/error:"}
"""Icon of each way to end."""

STYLE = """<style>
.st-key-tray [data-testid=stVerticalBlock] {gap: 0.15rem}
.st-key-tray [data-testid=stMarkdownContainer] {margin-bottom: 0}
.st-key-tray [data-testid=stMarkdownContainer] p {margin: 0; line-height: 1.3}
.st-key-tray [data-testid=stProgress] p, .st-key-tray [data-testid=stCaptionContainer] p
  {font-size: 0.8rem; font-variant-numeric: tabular-nums}
.st-key-tray [data-testid=stProgress] {padding-top: 0.2rem}
.st-key-tray button {min-height: 1.6rem; padding: 0 0.3rem}
.st-key-tray button p {font-size: 0.85rem}
</style>"""
"""Close together, because the tray shares the sidebar with the pages."""


def show() -> None:
    """Draw the tray, if this visitor has started anything; it follows running jobs by itself."""
    found = tray.of(visitors.current())
    if not found:
        return
    with st.sidebar, st.container(key="tray"):
        st.html(STYLE)
        st.caption("Your computations")
        following = any(entry.is_open for entry in found)
        # The same fragment in both cases, so that a click reaches its button while one becomes the other.
        page_switch.redrawn(POLL_S if following else None)(_entries)(following)


def _entries(following: bool) -> None:
    """Draw the entries; redraw the page once none is left, or none runs that this was `following`."""
    found = tray.of(visitors.current())
    for entry in found:
        with st.container(border=True, key=f"tray entry {entry.number}"):
            _entry(entry)
    if not found or (following and not any(entry.is_open for entry in found)):
        st.rerun(scope="app")


def _entry(entry: TrayEntry) -> None:
    origin, visitor = entry.origin, visitors.current()
    icon = "" if entry.is_open else f"{ENDS[entry.state]} "
    st.markdown(f"{icon}**{escaped(origin.title)}**")
    if origin.scenario:
        st.caption(escaped(origin.scenario))
    if entry.is_open:
        long_work.bar(entry, short=True)
    else:
        st.caption(_end(entry))
    with st.container(horizontal=True):
        pages = st.session_state.get(page_switch.PAGES, {})
        if origin.page in pages and st.button(
            "Open", key=f"tray open {entry.number}", type="tertiary", help="Open its page as it was"
        ):
            _open(entry, pages[origin.page])
        if entry.is_open:
            st.button(
                "Stop",
                key=f"tray stop {entry.number}",
                type="tertiary",
                on_click=tray.stop,
                args=(visitor, entry.number),
            )
        else:
            st.button(
                "Close",
                icon=":material/close:",
                key=f"tray close {entry.number}",
                type="tertiary",
                on_click=tray.close,
                args=(visitor, entry.number),
            )


def _end(entry: TrayEntry) -> str:
    """How a job ended, in words."""
    if entry.state == "done":
        return f"Done in {long_work.duration(entry.took_s)}"
    if entry.state == "stopped":
        reason = f": {escaped(entry.error)}" if entry.error is not None else ""
        return f"Stopped after {long_work.duration(entry.took_s)}{reason}"
    return f"Failed: {escaped(str(entry.error)[:300])}"


def _open(entry: TrayEntry, page: Any) -> None:
    """Open the page of a job with the scenario and the form that it was started with."""
    origin = entry.origin
    state.open_scenario(origin.preset, origin.changes)
    forms.take_over(long_work.prefix(origin.page), origin.fields)
    st.switch_page(page)
