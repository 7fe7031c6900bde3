"""Help texts of figures in Markdown: formula, inputs with today's values, sources, links to Evidence."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import groupby
from urllib.parse import urlencode

import streamlit as st

from moesim.app import forms, state
from moesim.app import scenario_links as changes
from moesim.app.escaping import escaped
from moesim.app.explanations import Derivation, derivations, in_words
from moesim.simulator.common.key_values import overridden_key
from moesim.simulator.predict.result import Result
from moesim.simulator.scenario import Scenario

MOST_SOURCE_CHARACTERS = 140
"""Characters of a source that a tooltip shows; Evidence has all of it."""


def of_result(scenario: Scenario, result: Result) -> dict[str, str]:
    """The help text of every headline figure, by the figure's name; sources open in the page Evidence."""
    own = [overridden_key(text) for text in state.overrides()]
    return texts(derivations(scenario, result, own), address())


def address() -> dict[str, list[str] | str]:
    """Query parameters of the scenario of this session, which links to other pages keep."""
    return dict(changes.parameters(state.preset(), state.overrides()))


def evidence_link(query: Mapping[str, list[str] | str], find: str) -> str:
    """Address of the page Evidence, opened at the numbers that `find` finds, below the server's root."""
    fields = [f"evidence.find={json.dumps(find)}", f"evidence.part={json.dumps('numbers')}"]
    return f"evidence?{urlencode({**query, forms.PARAMETER: fields}, doseq=True)}"


def texts(found: Mapping[str, Derivation], query: Mapping[str, list[str] | str]) -> dict[str, str]:
    """Help texts in Markdown by the figure's name; text of a scenario in them is shown literally."""
    return {name: text(row, query) for name, row in found.items()}


def text(row: Derivation, query: Mapping[str, list[str] | str]) -> str:
    """One help text: the formula, then every input with its value, its source and a link to its row."""
    lines = [f"**{row.title}** (docs/model, {row.equations})", "", f"`{in_words(row.formula)}`", ""]
    for (source, find), items in groupby(row.inputs, key=lambda item: (item.source, item.find)):
        group = list(items)
        origin = f"{escaped(_cut(source))} ([Evidence]({evidence_link(query, find)}))"
        for item in group:
            meaning = "" if item.meaning == item.symbol else f" {escaped(item.meaning)}"
            end = f"; source: {origin}" if len(group) == 1 else ""
            lines.append(f"- `{item.symbol}`{meaning}: **{escaped(item.text)}**{end}")
        if len(group) > 1:
            lines.append(f"- source of these: {origin}")
    if row.note:
        lines += ["", escaped(row.note)]
    return "\n".join(lines)


def panel(helps: Mapping[str, str]) -> None:
    """The help texts of a page below each other, for the keyboard and for touch, which open no tooltip."""
    with st.expander("How these figures come about: formulas, inputs and sources"):
        columns = st.columns(2, gap="large")
        for number, text_ in enumerate(helps.values()):
            columns[number % 2].markdown(text_)


def _cut(source: str) -> str:
    if len(source) <= MOST_SOURCE_CHARACTERS:
        return source
    return source[:MOST_SOURCE_CHARACTERS].rsplit(" ", 1)[0] + " …"
