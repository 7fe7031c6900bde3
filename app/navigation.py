"""Parts of every page: navigation, the scenario's headline, and errors as one sentence."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import streamlit as st

from moesim.app import jobs, page_switch, scenario_store, state, widgets
from moesim.app.pages import ALONE, grouped

# -- page style --------------------------------------------------------------------------------------
# The style that every page adds to the framework's own theme (app/.streamlit/config.toml).

MUTED = "roofline"
"""First word of the key of a container whose figures are drawn muted, because they stand on a roofline."""

STYLE = """<style>
[data-testid=stMainBlockContainer] {padding: 1.75rem 2.5rem 3rem}
[data-testid=stHeader] {background: transparent}
[data-testid=stApp] [data-testid=stHeader], [data-testid=stApp] [data-testid=stHeader] *
  {pointer-events: none}
[data-testid=stApp] [data-testid=stHeader] :is(button, a, button *, a *) {pointer-events: auto}
[data-testid=stMainBlockContainer] h1 {padding-top: 0}
[data-testid=stMainBlockContainer] h2 {padding: 0.5rem 0 1rem}
[data-testid=stSidebarHeader] {height: 1.5rem; min-height: 0; margin-bottom: 0; padding-top: 0.5rem}
[data-testid=stBaseButton-primary]:not(:disabled),
[data-testid=stMultiSelect] :is([data-tag], [data-baseweb=tag])
  {color: light-dark(#ffffff, #0e1117)}
[data-testid=stSidebarNavItems] {padding-top: 0}
[data-testid=stSidebarNavItems] > li::before
  {display: block; margin: 0.6rem 0 0.15rem 0.5rem; font-size: 0.8rem; color: light-dark(#5c626b, #a8adb8)}
:is(.st-key-chips, .st-key-scenario-buttons) button {min-height: 2rem; padding: 0 0.6rem; border-radius: 1rem}
:is(.st-key-a-and-b, .st-key-chips) button {min-height: 1.8rem}
.st-key-a-and-b {gap: 0.25rem; padding: 0.4rem 0.9rem}
.st-key-scenario-bar [data-testid=stMarkdownContainer] p {line-height: 1.5}
[data-testid=stDialog] [data-testid=stCode] * {visibility: visible !important}
.st-key-scenario-bar [data-testid=stPopover] button {max-width: 22rem}
.st-key-scenario-bar [data-testid=stPopover] button p
  {overflow: hidden; text-overflow: ellipsis; white-space: nowrap; max-width: 18rem}
.st-key-progress-line {height: 1.7rem; overflow: hidden}
.st-key-timeline-canvas iframe {min-height: 34.5rem}
[data-testid=stApp] {font-variant-numeric: tabular-nums}
[data-testid=stCaptionContainer] {opacity: 1}
[data-testid=stCaptionContainer] :is(p, li):not([data-testid=stTooltipHoverTarget] *)
  {color: light-dark(#5c626b, #a8adb8)}
[data-testid=stCaptionContainer] .stMarkdownBadge {font-size: 0.75rem !important}
[class*=st-key-roofline] [data-testid=stMetricValue] {color: light-dark(#5f6670, #a3a8b4)}
.js-plotly-plot :is(.xtick, .ytick) text, .js-plotly-plot :is(.xtitle, .ytitle, .bartext-outside)
  {fill: light-dark(#4a505a, #c3c8d1) !important}
[data-testid=stMarkdownContainer] li {margin-bottom: 0.1rem}
:is(a, button, summary, [tabindex="0"], [role=slider]):focus-visible
  {outline: 2px solid light-dark(#0072b2, #56b4e9); outline-offset: 2px}
@media (max-width: 640px) {
  [data-testid=stMainBlockContainer] {padding-left: 1rem; padding-right: 1rem; padding-top: 3.5rem}
  :is([class*=st-key-tiles], [class*=st-key-roofline]) [data-testid=stColumn] {min-width: calc(50% - 1rem)}
}
</style>"""
"""Narrower margins than the framework's, because the content needs the width at 1280 pixels, and a clear top
bar. Dark text on the dark theme's light blue, because no blue contrasts both with white text and with the
dark page. Headings stand in the list of pages as generated content, because the framework's own sections
put elements between a list and its items, over which screen readers stumble. Digits of one width, so that
figures below each other can be compared. Captions have a colour of their own, because the framework's
transparency would take the contrast from badges in them. Words of charts stand out as much as those of the
page. Figures of a roofline are grey, with at least 4.5 to 1 against the page. A control that the keyboard
has reached has an outline. On a phone two tiles stand beside each other."""


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
    if hidden:  # the start page again, for a link that names it: the framework serves it at the root only
        name, title, icon = pages_of[0]
        again = st.Page(_guarded(name, title), title=title, icon=icon, url_path=name, visibility="hidden")
        listed.append(again)
    page = st.navigation(listed, expanded=True)
    # The heading of each group of pages stands before its first page in the list.
    rules, number = [], 1
    for heading, names in groups.items():
        if heading:
            place = f"[data-testid=stSidebarNavItems] > li:nth-child({number})::before"
            rules.append(f'{place} {{content: "{heading}"}}')
        number += len(names)
    st.html(f"{STYLE}<style>{chr(10).join(rules)}</style>")
    scenario_store.open_short_link()
    state.synchronise()
    scenario_store.synchronise()
    facts = _view("scenario_header").show()
    page.run()
    _view("scenario_header").show_facts(facts)
    state.publish()
    scenario_store.remember()
    scenario_store.notice()
    _view("scenario_header").show_tray()


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


def _guarded(name: str, title: str) -> Callable[[], None]:
    def show() -> None:
        page_switch.note_drawn(name)
        if name not in ALONE:
            if name != "compare":  # which shows the pinned scenarios itself
                _view("scenario_header").show_pins()
            st.title(title, anchor=False)
        widgets.guard(lambda: _view(name).show())

    show.__name__ = name
    return show
