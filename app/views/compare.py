"""The page compare."""

from __future__ import annotations

import streamlit as st

from moesim.app import state


def show() -> None:
    """Draw the page."""
    found = state.result()
    if found is not None:
        st.metric("Step time", f"{found.step.time_s:.3f} s")
