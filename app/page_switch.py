"""Opens another page from a page, and keeps an opened page against timers of the page before it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

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


# -- stale timers ------------------------------------------------------------------------------------
# Keeps a timer of a page that is gone from emptying the page after it.
#
# Where a click is answered with another page, timers of the page before may fire until the browser
# knows. The framework (1.60 to 1.67) runs such a request after the new page was drawn: it announces the
# page before, for which the browser empties the new one, and only then finds that the fragment does not
# exist any more. Here the request is dropped before anything is announced. `page_switch.redrawn` answers
# requests for fragments that both pages have.


def ignore() -> None:
    """Drop what timers ask for of fragments that do not exist any more.

    The framework has no public place for this, so its method that runs the script is wrapped.
    """
    from streamlit.runtime.scriptrunner.script_runner import ScriptRunner

    run = ScriptRunner._run_script

    @wraps(run)
    def run_existing(runner: Any, request: Any) -> None:
        wanted = request.fragment_id_queue if request.is_auto_rerun else ()
        if not wanted or any(map(runner._fragment_storage.contains, wanted)):
            run(runner, request)

    ScriptRunner._run_script = run_existing  # type: ignore[assignment, method-assign]
