"""Opens another page from a page."""

from __future__ import annotations

import streamlit as st

PAGES = "pages"
"""Session key of the pages by name, which the navigation sets."""


def go(name: str) -> None:
    """Open another page, with the scenario and the forms as they are now."""
    st.switch_page(st.session_state[PAGES][name])
