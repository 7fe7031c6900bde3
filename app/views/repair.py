"""What to do about a scenario that is illegal or does not fit: mark its field, offer plans that fit."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import streamlit as st

from moesim.app import predictions, scenario_form, state, widgets
from moesim.app.escaping import escaped
from moesim.app.views import headline
from moesim.hwmodels.errors import InfeasibleError, InputError, MoesimError
from moesim.hwmodels.units import in_unit
from moesim.simulator.common.key_values import overridden_key
from moesim.simulator.model.recompute import recompute_label
from moesim.simulator.planner.nearest import Repair
from moesim.simulator.scenario import Scenario

PLAN_KEYS = ("schedule", "recompute")
"""Keys of a repair that stand at the top of a scenario; the others are below `parallel`."""


def guard(show: Callable[[Scenario], None]) -> None:
    """Draw what depends on the current scenario, or say what is wrong with it and how to mend it."""
    try:
        show(state.current())
    except MoesimError as error:
        keys = [error.key] if isinstance(error, InputError) and error.key is not None else []
        _mark([*keys, *map(overridden_key, scenario_form.left_out())])
        widgets.complain(error)
        if isinstance(error, InputError | InfeasibleError) and not scenario_form.left_out():
            widgets.guard(lambda: offer(state.current()))


def offer(scenario: Scenario) -> None:
    """Search the nearest plans that fit on request, and offer each with what it changes."""
    if scenario.fleet is not None or scenario.stages.blocks is not None:
        return
    found: tuple[Repair, ...] | None = widgets.long_work(
        "repair",
        f"repair/{state.cache_key(scenario)}",
        "Find the nearest plan that fits",
        predictions.nearest_plans,
        scenario,
        with_progress=True,
    )
    for number, repair in enumerate(found or ()):
        row = repair.row
        words = "; ".join(f"{key} {_text(before)} -> {_text(after)}" for key, before, after in repair.changes)
        with st.container(horizontal=True, vertical_alignment="center"):
            st.button(
                escaped(words), key=f"repair {number}", icon=":material/build:",
                on_click=_use, args=(repair,), help="Change the scenario to this plan",
            )  # fmt: skip
            st.caption(
                f"{headline.written('step_time_s', row.time_s)} a step, "
                f"{in_unit(row.memory_bytes, 'GiB', 'bytes'):.1f} GiB, {row.verdict}"
            )


def _use(repair: Repair) -> None:
    """Make the repaired plan the scenario's; its layers are those that the repair balanced."""
    for key in ("stages.layers", "stages.mtp"):
        state.set_override(key, None)
    state.adopt(repair.row.scenario, new=False)


def _text(value: object) -> str:
    return recompute_label(value) if isinstance(value, tuple) else str(value)


def _mark(keys: Sequence[str]) -> None:
    """Mark the inputs of keys with a frame and a word, whatever they show."""
    names = [re.sub(r"[^a-zA-Z0-9_-]", "-", f"st-key-input {key}") for key in keys]
    if names:
        boxes = ", ".join(f".{name} [data-baseweb]" for name in names)
        labels = ", ".join(f".{name} label p::after" for name in names)
        st.html(
            f"<style>{boxes} {{outline: 2px solid light-dark(#b3261e, #ff8a80); border-radius: 0.5rem}} "
            f"{labels} {{content: ' not possible here'; color: light-dark(#b3261e, #ff8a80)}}</style>"
        )
