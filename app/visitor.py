"""The visitor that a session belongs to, whatever page is open and after a reload."""

from __future__ import annotations

import re
import secrets

import streamlit as st

COOKIE = "moesim-visitor"
_TOKEN = re.compile(r"[0-9a-f]{32}")


def token() -> str:
    """The visitor's secret of 128 bits: the cookie's, or one of this session where there is none."""
    given = st.context.cookies.get(COOKIE, "")
    if isinstance(given, str) and _TOKEN.fullmatch(given):
        return given
    found: str = st.session_state.setdefault("visitor", secrets.token_hex(16))
    return found
