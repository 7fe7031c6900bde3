"""Parts of every page: navigation, the scenario's headline, and errors as one sentence."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import streamlit as st

from moesim.app import jobs, page_switch, pinned, scenario_list, state, widgets
from moesim.app.page_style import STYLE, headings
from moesim.app.pages import ALONE, grouped

ICON = Path(__file__).resolve().parent / "icon.png"
"""The page's icon; without it the browser would fetch one from a font server."""

SIDEBAR: Any = 210
"""Width in pixels; on a window 1280 pixels wide the charts need the rest."""

ROOT = "first"
"""Path that the framework demands for the start page but does not serve."""


def run(pages_of: Sequence[tuple[str, str, str]]) -> None:
    """Draw the page that the address names; `pages_of` lists (module below `app/views`, title, icon)."""
    st.set_page_config(page_title="moesim", page_icon=str(ICON), layout="wide", initial_sidebar_state=SIDEBAR)
    jobs.warm_up()
    hidden = "visibility" in inspect.signature(st.Page).parameters  # not in every release
    pages = {
        name: st.Page(
            _guarded(name, title),
            title=title,
            icon=icon,
            url_path=ROOT if hidden and number == 0 else name,
            default=number == 0,
        )
        for number, (name, title, icon) in enumerate(pages_of)
    }
    st.session_state[page_switch.PAGES] = pages
    groups = grouped(list(pages))
    listed = [pages[name] for names in groups.values() for name in names]
    page = st.navigation([*listed, _by_name(*pages_of[0])] if hidden else listed, expanded=True)
    st.html(STYLE + headings(groups))
    state.synchronise()
    pinned.synchronise()
    facts = _view("scenario_header").show()
    page.run()
    _view("scenario_header").show_facts(facts)
    state.publish()
    scenario_list.remember()
    scenario_list.notice()
    _view("job_tray").show()


def _view(name: str) -> Any:
    """A module of the pages, which are above this one: they are named, not imported."""
    return importlib.import_module(f"moesim.app.views.{name}")


def failed(error: Exception) -> bool:
    """Show one sentence in place of a page that failed; the framework has logged the traceback on stderr."""
    st.error(
        f"This page could not be drawn ({type(error).__name__}): that is a fault of the program, and the log "
        "of the server says where. Open the page again, or go back to the preset.",
        icon=":material/error:",
    )
    return True


def _by_name(name: str, title: str, icon: str) -> Any:
    """The start page again, for a link that names it, because the framework serves it at the root only."""
    return st.Page(_guarded(name, title), title=title, icon=icon, url_path=name, visibility="hidden")


def _guarded(name: str, title: str) -> Callable[[], None]:
    def show() -> None:
        page_switch.note_drawn(name)
        if name in ALONE:
            widgets.guard(lambda: _view(name).show())
            return
        if name != "compare":  # which shows the pinned scenarios itself
            _view("scenario_header").show_pins()
        st.title(title, anchor=False)
        widgets.guard(lambda: _view(name).show())

    show.__name__ = name
    return show
