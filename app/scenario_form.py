"""The scenario whose values a form shows while some of its changes are refused."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import streamlit as st

from moesim.app import state
from moesim.hwmodels.errors import MoesimError
from moesim.simulator.common.key_values import overridden_key, value_of
from moesim.simulator.scenario import Scenario


def accepted() -> tuple[Scenario, tuple[str, ...]]:
    """(the nearest scenario to the current one that can be built, the changes it leaves out).

    Raises InputError where not even the preset can be built.
    """
    texts = state.overrides()
    for first in (texts, texts[:-1]):  # usually the last change is the refused one
        with suppress(MoesimError):
            return _usable(first), texts[len(first) :]
    kept: tuple[str, ...] = ()
    for text in texts:
        with suppress(MoesimError):
            _usable((*kept, text))
            kept = (*kept, text)
    return _usable(kept), tuple(text for text in texts if text not in kept)


def _usable(texts: Sequence[str]) -> Scenario:
    """A scenario whose names can all be resolved, as a form needs it; raises InputError otherwise."""
    scenario = state.build(state.preset(), texts)
    assert scenario.shape and scenario.machine and scenario.recipe and scenario.calibration
    return scenario


def form() -> Scenario:
    """The scenario whose values a form shows; refused changes stay in their widgets (see `refused`).

    Raises InputError where not even the preset can be built.
    """
    scenario, left_out = accepted()
    st.session_state["refused"] = left_out
    return scenario


def left_out() -> tuple[str, ...]:
    """The changes that the scenario of `form` leaves out, because they cannot be built."""
    found: tuple[str, ...] = st.session_state.get("refused", ())
    return found


def refused(key: str) -> Any:
    """The value of a change that the scenario of `form` leaves out; None where it accepted the change."""
    texts = [t for t in left_out() if overridden_key(t) == key]
    with suppress(MoesimError):
        return value_of(texts[-1], key) if texts else None
    return None
