"""Undo and redo of a session: the scenarios that were current, oldest first, and which one is now."""

from __future__ import annotations

import streamlit as st

MOST_STEPS = 100

Shown = tuple[str, str, tuple[str, ...]]
"""(id of the scenario object, preset, changes)."""


def record(shown: Shown) -> None:
    """Remember what is current now; what had been undone is forgotten once something else is changed."""
    steps, at = _steps()
    if steps and steps[at] == shown:
        return
    kept = [*steps[: at + 1], shown][-MOST_STEPS:]
    st.session_state["history"], st.session_state["history at"] = kept, len(kept) - 1


def can_undo() -> bool:
    """Whether something was current before."""
    return _steps()[1] > 0


def can_redo() -> bool:
    """Whether something was undone."""
    steps, at = _steps()
    return at + 1 < len(steps)


def step(by: int) -> Shown | None:
    """Make current what came one change before (-1) or was undone last (+1); return it, or None at an end."""
    steps, at = _steps()
    if not 0 <= at + by < len(steps):
        return None
    st.session_state["history at"] = at + by
    return steps[at + by]


def _steps() -> tuple[list[Shown], int]:
    return st.session_state.get("history", []), st.session_state.get("history at", 0)
