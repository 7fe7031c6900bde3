"""The choice of a model on the page Scenario: a search over the shipped ones, and how an upload was read."""

from __future__ import annotations

import streamlit as st

from moesim.app import state, uploads, widgets
from moesim.app.escaping import escaped
from moesim.hwmodels.frozen import short
from moesim.simulator.model.catalogue import (
    MOST_SEARCHED,
    CatalogueRow,
    catalogue,
    context_text,
    row_of,
    search,
)
from moesim.simulator.model.library import shipped_models
from moesim.simulator.scenario import Scenario

READ = "model upload"
"""Session key with what the last uploaded model was read as."""

NOTE = (
    "Every word must occur in the name, the kinds of attention, the experts or the source; "
    "`<100B`, `>1T` and `active<10B` compare sizes"
)


def choice(scenario: Scenario) -> None:
    """Draw the list of models."""
    widgets.choice(scenario, "model", "Model", list(shipped_models()), on_change=_chosen)


def finder() -> None:
    """Draw the search over the shipped models, with a table of what it finds."""
    with st.popover("Find a model", width="stretch", icon=":material/search:"):
        text = st.text_input("Search", help=NOTE, key="model search", max_chars=MOST_SEARCHED)
        rows = search(catalogue(), text)
        st.caption(f"{len(rows)} of {len(catalogue())} shipped models")
        if not rows:
            return
        st.dataframe([_cells(row) for row in rows], hide_index=True, width="stretch")
        st.selectbox(
            "Use", [row.name for row in rows], index=None, key="model found", on_change=_taken,
            placeholder="Choose a model of the table",
        )  # fmt: skip


def facts(scenario: Scenario) -> None:
    """Draw the sizes of the chosen model, and how an upload was read."""
    row = row_of(scenario.shape)
    parts = [
        f"{short(row.parameters_total, 4)} parameters",
        f"{short(row.parameters_activated, 4)} activated",
        f"{row.layers} layers",
        f"attention: {row.attention}",
        f"experts: {row.experts}" if row.experts != "dense" else "dense",
        f"context {context_text(row.context)}" if row.context else "",
        f"not modelled: {'; '.join(row.not_modelled)}" if row.not_modelled else "",
    ]
    st.caption(escaped(f"{row.name}: " + ", ".join(part for part in parts if part)))
    read = st.session_state.get(READ)
    if not isinstance(read, uploads.Kept) or read.reading is None:
        return
    if isinstance(scenario.model, str) and scenario.model.endswith(read.token):
        _reading(read.name, read.reading)


def remember(kept: uploads.Kept) -> None:
    """Keep what an uploaded model was read as, for `facts`."""
    st.session_state[READ] = kept


def _reading(name: str, reading: uploads.ConfigReading) -> None:
    with st.expander(escaped(f"How {name} was read")):
        rows = [{"key": key, "value": value, "as": meaning} for key, value, meaning in reading.understood]
        if rows:
            st.dataframe(rows, hide_index=True, width="stretch")
        ignored = ", ".join(reading.ignored) or "nothing"
        st.markdown(escaped(f"Ignored, no part in time or memory: {ignored}."))
        for text in reading.not_modelled:
            st.markdown(escaped(f"Not modelled: {text}."))


def _cells(row: CatalogueRow) -> dict[str, str | int]:
    return {
        "name": row.name,
        "total": short(row.parameters_total, 4),
        "activated": short(row.parameters_activated, 4),
        "layers": row.layers,
        "attention": row.attention,
        "experts": row.experts,
        "context": context_text(row.context),
    }


def _taken() -> None:
    name = st.session_state["model found"]
    if name is not None:
        state.set_override("model", name)
        state.follow(model_changed=True)


def _chosen(key: str, name: str) -> None:
    state.set_override(key, st.session_state[name])
    state.follow(model_changed=True)
