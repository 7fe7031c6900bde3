"""Starts long work from a page, shows its progress there, and finds it again on another visit.

Every job is an entry of the visitor's tray (`tray`): it goes on while another page is open and after a
reload, until it is done, the visitor stops it, or the visitor has left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import streamlit as st

from moesim.app import forms, jobs, page_switch, state, visitors
from moesim.app.texts import escaped
from moesim.app.tray import JobOrigin, TrayEntry, tray

TITLES: Mapping[str, str] = {
    "plan": "Plan search",
    "serving plan": "Serving sizing",
    "training sizing": "Training sizing",
    "repair": "Nearest plan that fits",
    "sweep": "Sweep",
    "fleet plan": "Fleet search",
    "neighbours": "Single changes",
    "tornado": "Ranking the uncertain inputs",
    "interval by engine": "Checking the intervals",
    "whole": "Every GPU simulated",
    "evidence": "Scoreboard",
    "trace own": "Reading a trace",
    "trace other": "Reading a trace",
}
"""Titles in the tray by the place on a page; another place has the label of its button."""

NOT_STARTED = "not started"
"""Session key with the reason why the work of the last click was not started."""


def long_work(name: str, key: str, label: str, function: Callable[..., Any], *args: Any) -> Any:
    """The value of long work, or None while it was not requested or still runs.

    Shows a button that starts it, then its progress with a stop button; work that this visitor started
    earlier is picked up again. `name` names the place on the page and `key` the result. Raises what the work
    raised, once.
    """
    found = taken_up(name, key)
    if found is not None:
        return found
    entry = tray.find(visitors.current(), key)
    if (entry is None or not entry.is_open) and st.button(label, key=f"start {name}", type="primary"):
        start(name, key, function, *args, title=TITLES.get(name, label))
        st.rerun()
    return None


def taken_up(name: str, key: str) -> Any:
    """The value of a key that is known, or None; work of this visitor that still runs shows its progress.

    Never starts anything. Raises what the work raised, once.
    """
    known = jobs.cache.get(key)
    if known is not None:
        return known
    entry = tray.find(visitors.current(), key)
    if entry is None:
        return None
    if entry.is_open:
        _progress(name, entry)
    elif entry.ended == "stopped":
        st.caption(f"Stopped before its end{f': {entry.error}' if entry.error else ''}.")
    elif entry.error is not None and not entry.told:
        entry.told = True
        raise entry.error
    return None


def known(key: str) -> bool:
    """Whether the result of a key is there, or being computed for this visitor."""
    return tray.known(visitors.current(), key)


def start(
    name: str,
    key: str,
    function: Callable[..., Any],
    *args: Any,
    title: str = "",
    budget_s: float | None = None,
) -> None:
    """Start the long work of a place on a page; what ran there before goes on, and stands in the tray."""
    started = origin(title or TITLES.get(name, name))
    tray.start(visitors.current(), started, key, function, *args, budget_s=budget_s)


def start_on_click(name: str, key: str, function: Callable[..., Any], *args: Any) -> None:
    """Start long work from a click; that too much runs already is said above the page."""
    try:
        start(name, key, function, *args)
    except jobs.JobError as error:
        st.session_state[NOT_STARTED] = str(error)


def origin(title: str) -> JobOrigin:
    """The page and the scenario that the visitor sees now, with the page's form."""
    page = str(st.session_state.get(page_switch.PAGE, ""))
    own = prefix(page)
    fields = [text for texts in forms.parameters().values() for text in texts if text.startswith(own)]
    return JobOrigin(title, state.title(), page, state.preset(), state.overrides(), tuple(fields))


def prefix(page: str) -> str:
    """What the names of a page's form fields start with."""
    return {"planner": "plan.", "what_if": "what-if."}.get(page, f"{page}.")


@page_switch.redrawn(0.5)
def _progress(name: str, entry: TrayEntry) -> None:
    """Show the progress of a job; redraw the page when it ends."""
    if not entry.is_open:
        st.rerun(scope="app")
    left, right = st.columns([5, 1], vertical_alignment="center")
    with left:
        bar(entry)
    right.button(
        "Stop",
        key=f"stop job {name}",
        on_click=tray.stop,
        args=(visitors.current(), entry.number),
        icon=":material/stop_circle:",
    )


def bar(entry: TrayEntry, short: bool = False) -> None:
    """Draw how far a job is, what it does and how long it will take; `short` leaves out what it does."""
    share, doing = entry.progress.share, entry.progress.text
    left = entry.left_s
    if entry.state == "waiting":
        text = "waiting for a free processor"
    elif share is None:
        text = f"{duration(entry.elapsed_s)} so far, time left unknown"
    elif left is None:
        text = f"starting, {duration(entry.elapsed_s)} so far"
    else:
        text = f"{share:.0%}, about {duration(left)} left"
    st.progress(share or 0.0, text=text if short or entry.state == "waiting" else f"{text}: {escaped(doing)}")


def duration(seconds: float) -> str:
    """Seconds in words, such as "8 s", "3 min 20 s" or "1 h 5 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s" if whole % 60 else f"{whole // 60} min"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


# -- background --------------------------------------------------------------------------------------
# Runs slow work in the background: a page appears at once and is redrawn when the work is done.


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
            visitors.current(), origin(what[:1].upper() + what[1:] or "Intervals"), key, function, *args
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
