"""Opens another page from a page, and keeps an opened page against timers of the page before it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import streamlit as st
from streamlit.runtime.scriptrunner import get_script_run_ctx

P = ParamSpec("P")

PAGES = "pages"
"""Session key of the pages by name, which the navigation sets."""

PAGE = "page"
"""Session key of the name of the page to which work that is started now belongs."""

_DRAWN = "drawn page"
"""Session key of the page that is drawn: our name of it, and the framework's."""


def go(name: str) -> None:
    """Open another page, with the scenario and the forms as they are now."""
    st.switch_page(st.session_state[PAGES][name])


def note_drawn(name: str) -> None:
    """Note which page this run of the script draws."""
    st.session_state[PAGE] = name
    st.session_state[_DRAWN] = (name, _asked())


def redrawn(every_s: float | None) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """A fragment that the browser redraws every so many seconds; None for one that it does not.

    The browser's timer may fire after another page was drawn and before the browser knows: it then asks for
    the fragment on the page before, takes that for a change of page, and empties the new one. Such a request
    is answered with the whole page that is drawn.
    """

    def fragment(function: Callable[P, None]) -> Callable[P, None]:
        @wraps(function)
        def drawn(*args: P.args, **options: P.kwargs) -> None:
            name, asked = st.session_state.get(_DRAWN, ("", _asked()))
            if asked != _asked():
                go(name)
            function(*args, **options)

        shown: Callable[P, None] = st.fragment(drawn, run_every=every_s)
        return shown

    return fragment


def _asked() -> str:
    """The framework's name of the page that the browser asks for; empty outside of a server."""
    return getattr(get_script_run_ctx(), "page_script_hash", "")
