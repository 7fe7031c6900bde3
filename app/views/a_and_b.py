"""Two scenarios in one table on every page: A is pinned, B is the next pinned one or the current one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import streamlit as st

from moesim.app import confidence, pinned, state
from moesim.app.escaping import escaped
from moesim.app.views import headline, uncertainty
from moesim.hwmodels.errors import MoesimError
from moesim.hwmodels.units import in_unit
from moesim.simulator.predict.band import Band
from moesim.simulator.predict.result import Result
from moesim.simulator.scenario import Scenario
from moesim.simulator.studies.compare import changes

FIGURES = ("step_time_s", "tokens_per_s_per_gpu", "mfu_causal", "days", "cost_usd")


def show(kept: Sequence[pinned.Kept]) -> None:
    """Draw the table, with buttons to open either side on this page, and to unpin."""
    current = (pinned.label(state.preset(), state.overrides()), state.preset(), state.overrides())
    sides = [*kept, current][:2]
    with st.container(border=True, key="a-and-b"):
        found = []
        for letter, (label, preset, texts) in zip("AB", sides, strict=True):
            try:
                scenario = state.build(preset, texts)
                found.append((scenario, state.result_of(scenario, f"Simulating {letter}")))
            except MoesimError as error:
                st.error(escaped(f"{letter}, {label}: {error}"), icon=":material/error:")
        if len(found) == 2:
            same = found[0][0] == found[1][0]
            bands = None if same else uncertainty.changes("a and b", found[0], found[1])
            labels = [label for label, _, _ in sides]
            st.markdown("\n".join(table(labels, found, bands)))
        _buttons(sides, current, len(kept))


def table(
    labels: Sequence[str], sides: Sequence[tuple[Scenario, Result]], bands: Mapping[str, Band] | None
) -> list[str]:
    """Lines of a Markdown table: A, B and their difference, which is grey inside its own uncertainty."""
    first, second = (result for _, result in sides)
    names = {name: label for label, _, name in headline.tiles(first) if name in FIGURES}
    lines = [
        "| | " + " | ".join([*names.values(), "Memory", "Confidence"]) + " |",
        "|---" + "|---:" * len(names) + "|---:|:---|",
    ]
    for letter, label, (_, result) in zip("AB", labels, sides, strict=True):
        shown = {name: value for _, value, name in headline.tiles(result)}
        memory = f"{in_unit(result.memory.total_bytes, 'GiB', 'bytes'):.1f} GiB"
        fit = memory if result.memory.verdict == "fits" else f"{memory}, {result.memory.verdict}"
        cells = [escaped(shown[name]) for name in names] + [fit, confidence.badge(result.confidence)]
        lines.append(f"| **{letter}** {_cell(label)} | " + " | ".join(cells) + " |")
    differ = changes(first, second)
    cells = [_difference(name, differ.get(name), bands) for name in names]
    known = "" if bands is not None or differ == {} else " :gray[(how sure is being computed)]"
    more = in_unit(second.memory.total_bytes - first.memory.total_bytes, "GiB", "bytes")
    lines.append(f"| **B - A**{known} | " + " | ".join([*cells, f"{more:+.1f} GiB", ""]) + " |")
    return lines


def _difference(name: str, by: float | None, bands: Mapping[str, Band] | None) -> str:
    """A difference as a cell; grey while its uncertainty is computed, and "(uncertain)" inside it."""
    if by is None:
        return ""
    told = escaped(headline.change(name, by))
    if told == headline.SAME or headline.sure(name, bands)[0]:
        return f"**{told}**"
    return f":gray[{told}{' (uncertain)' if bands is not None else ''}]"


def _cell(text: str) -> str:
    """A text inside a table of Markdown."""
    return escaped(text).replace("|", "\\|")


def _buttons(sides: Sequence[pinned.Kept], current: pinned.Kept, kept: int) -> None:
    with st.container(horizontal=True, gap="small"):
        for letter, (label, preset, texts) in zip("AB", sides, strict=True):
            st.button(
                f"Show {letter}",
                key=f"show {letter}",
                on_click=_open,
                args=(preset, texts),
                disabled=(preset, texts) == current[1:],
                help=f"Make {escaped(label)} the scenario of every page",
            )
        for number in range(min(kept, 2)):
            st.button(
                f"Unpin {'AB'[number]}", key=f"unpin {number}", on_click=pinned.unpin, args=(number,),
                type="tertiary",
            )  # fmt: skip


def _open(preset: str, texts: tuple[str, ...]) -> None:
    state.open_scenario(preset, texts)
