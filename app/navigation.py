"""Parts of every page: navigation, the scenario's headline, and errors as one sentence."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import streamlit as st

from moesim.app import jobs, state, widgets
from moesim.app import scenario_links as changes
from moesim.app.escaping import escaped
from moesim.app.page_style import STYLE
from moesim.simulator.common.key_values import overridden_key

ICON = Path(__file__).resolve().parent / "icon.png"
"""The page's icon; without it the browser would fetch one from a font server."""

SIDEBAR: Any = 210
"""Width in pixels; on a window 1280 pixels wide the charts need the rest."""

START = "start"
"""Path that the framework demands for the start page but does not serve."""


def run(pages_of: Sequence[tuple[str, str, str]]) -> None:
    """Draw the page that the address names; `pages_of` lists (module below `app/views`, title, icon)."""
    st.set_page_config(page_title="moesim", page_icon=str(ICON), layout="wide", initial_sidebar_state=SIDEBAR)
    jobs.warm_up()
    hidden = "visibility" in inspect.signature(st.Page).parameters  # not in every release
    pages = [
        st.Page(
            _guarded(name, title),
            title=title,
            icon=icon,
            url_path=START if hidden and number == 0 else name,
            default=number == 0,
        )
        for number, (name, title, icon) in enumerate(pages_of)
    ]
    page = st.navigation([*pages, _by_name(*pages_of[0])] if hidden else pages)
    st.html(STYLE)
    state.synchronise()
    page.run()
    _current()
    state.publish()


def failed(error: Exception) -> bool:
    """Show one sentence in place of a page that failed; the framework has logged the traceback on stderr."""
    st.error(
        f"This page could not be drawn ({type(error).__name__}): that is a fault of the program, and the log "
        "of the server says where. Open the page again, or go back to the preset.",
        icon=":material/error:",
    )
    return True


def _current() -> None:
    """Show which scenario the numbers of every page belong to."""
    with st.sidebar:
        st.caption("Scenario")
        st.text(state.title())
        warning = changes.only_here(state.preset(), state.overrides())
        if state.overrides():
            own = [text for text in state.overrides() if overridden_key(text) not in ("name", "description")]
            st.code("\n".join(map(changes.readable, own)), language=None, wrap_lines=True)
            st.button("Undo all changes", on_click=state.reset)
        if warning is not None:
            st.warning(escaped(warning), icon=":material/link_off:")


def _by_name(name: str, title: str, icon: str) -> Any:
    """The start page again, for a link that names it, because the framework serves it at the root only."""
    return st.Page(_guarded(name, title), title=title, icon=icon, url_path=name, visibility="hidden")


def _guarded(name: str, title: str) -> Callable[[], None]:
    def show() -> None:
        st.title(title, anchor=False)
        widgets.guard(lambda: importlib.import_module(f"moesim.app.views.{name}").show())

    show.__name__ = name
    return show
