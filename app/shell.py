"""What all pages share: navigation, the scenario's headline, and errors as one sentence."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import streamlit as st

from moesim.app import jobs, state, widgets

ICON = Path(__file__).resolve().parent / "icon.png"
"""Without one of our own the browser fetches a page's icon from a font server."""

SIDEBAR: Any = 200
"""Width in pixels: at 1280 the charts need the rest."""


def run(pages_of: Sequence[tuple[str, str, str]]) -> None:
    """Draw the page that the address names. `pages_of`: module below `app/views`, title, icon."""
    st.set_page_config(page_title="moesim", page_icon=str(ICON), layout="wide", initial_sidebar_state=SIDEBAR)
    jobs.warm_up()
    pages = [
        st.Page(_guarded(name), title=title, icon=icon, url_path=name, default=number == 0)
        for number, (name, title, icon) in enumerate(pages_of)
    ]
    page = st.navigation(pages)
    state.synchronise()
    page.run()
    _current()
    state.publish()


def _current() -> None:
    """What the numbers of every page are of."""
    with st.sidebar:
        st.caption(f"Scenario: **{state.preset()}**")
        if state.overrides():
            st.code("\n".join(text[:60] for text in state.overrides()), language=None, wrap_lines=True)
            st.button("Undo all changes", on_click=state.open_scenario, args=(state.preset(), ()))


def _guarded(name: str) -> Callable[[], None]:
    def show() -> None:
        widgets.guard(lambda: importlib.import_module(f"moesim.app.views.{name}").show())

    show.__name__ = name
    return show
