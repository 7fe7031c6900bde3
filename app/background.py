"""Runs slow work in the background: a page appears at once and is redrawn when the work is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import streamlit as st

from moesim.app import jobs


def value(place: str, key: str, what: str, function: Callable[..., Any], *args: Any) -> Any:
    """The value of `function(*args)`, or None while it is computed; the page shows `what` meanwhile.

    `place` names the spot on the page and `key` the result; work of this place for an older key is cancelled.
    Raises what the work raised.
    """
    known = jobs.cache.get(key)
    if known is not None:
        return known
    name = f"beside {place}"
    job: jobs.Job | None = st.session_state.get(name)
    if job is None or job.key != key:
        if job is not None and not job.done:
            job.cancel()
        job = st.session_state[name] = jobs.submit(key, function, *args, lane="beside")
    if job.done:
        return job.result()
    _poll(name, job, what)
    return None


@st.fragment(run_every=1.0)
def _poll(name: str, job: jobs.Job, what: str) -> None:
    """Draw the page again, once, when the work is done."""
    if not job.done:
        st.caption(f":material/hourglass_top: {what}")
    elif st.session_state.get(f"{name} drawn") != job.key:
        st.session_state[f"{name} drawn"] = job.key
        st.rerun(scope="app")
