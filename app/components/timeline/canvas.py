"""Draws a packed step in the browser, with the scripts of `frontend/` in a frame of the page.

It is a module of its own because the framework names a component after the module that declares it.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import streamlit.components.v1 as components
from msgspec import Struct

from moesim.app.components.timeline.packing import PackedStep

FRONTEND = Path(__file__).resolve().parent / "frontend"
"""Scripts, styles and HTML; nothing of them is built, and nothing else is fetched."""
FIRST_HEIGHT = 330
"""Height of all but the ranks' rows, until the frame tells its own."""


@cache
def _component() -> Any:
    """The component, declared while a page is drawn, because only then does the framework serve its files."""
    return components.declare_component("step", path=str(FRONTEND))


class OpenedAction(Struct, frozen=True):
    """An action that a visitor opened, and when, in milliseconds of the browser's clock."""

    action: int
    at_ms: float


def draw(step: PackedStep, opened: int, key: str) -> OpenedAction | None:
    """Draw a step with an action open; return the one that the visitor opened last in it, or None.

    `opened` is the number of an action over all ranks, or -1. The frame reads bytes of a new digest only.
    """
    ranks, digest = len(step.first_action) - 1, hashlib.sha256(step.data).hexdigest()
    value: Any = _component()(
        data=step.data,
        digest=digest,
        opened=opened,
        height=FIRST_HEIGHT + min(346, max(13, min(22, 272 // ranks)) * ranks),
        key=key,
        default=None,
    )
    if not isinstance(value, dict) or value.get("digest") != digest:
        return None  # of another scenario
    action: Any = value.get("action")
    at_ms: Any = value.get("at")
    known = type(action) is int and 0 <= action < step.first_action[-1] and isinstance(at_ms, int | float)
    return OpenedAction(action, at_ms) if known else None
