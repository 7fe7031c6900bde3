"""The head of every page: the current scenario with its name, facts and changes, undo, redo and pins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import streamlit as st

from moesim.app import forms, long_work, page_switch, scenario_store, state, texts, visitors, widgets
from moesim.app import scenario_links as links
from moesim.app.texts import compact, escaped
from moesim.app.tray import TrayEntry, tray
from moesim.app.views import headline
from moesim.hwmodels.errors import InfeasibleError, MoesimError
from moesim.hwmodels.units import in_unit
from moesim.simulator.common.texts import overridden_key
from moesim.simulator.predict.result import Result
from moesim.simulator.predict.work_size import Band
from moesim.simulator.scenario import Scenario
from moesim.simulator.scenario.stated import is_stated
from moesim.simulator.studies.compare import changes

# -- a and b -----------------------------------------------------------------------------------------
# Two scenarios in one table on every page: A is pinned, B is the next pinned one or the current one.

FIGURES = ("step_time_s", "tokens_per_s_per_gpu", "mfu_causal", "days", "cost_usd")


def show_pinned(kept: Sequence[scenario_store.Kept]) -> None:
    """Draw the table, with buttons to open either side on this page, and to unpin."""
    current = scenario_store.current()
    sides = [*kept, current][:2]
    with st.container(border=True, key="a-and-b"):
        named = [(f"{n}, {side[0]}", n, *side[1:]) for n, side in zip("AB", sides, strict=True)]
        found = [(scenario, result) for _, scenario, result in headline.sides(named)]
        if len(found) == 2:
            same = found[0][0] == found[1][0]
            bands = None if same else headline.changes("a and b", found[0], found[1])
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
        cells = [escaped(shown[name]) for name in names] + [fit, texts.badge(result.confidence)]
        title = escaped(label).replace("|", "\\|")
        lines.append(f"| **{letter}** {title} | " + " | ".join(cells) + " |")
    differ = changes(first, second)
    cells = []
    for name in names:
        by = differ.get(name)
        told = "" if by is None else escaped(headline.change(name, by))
        if by is not None and (told == headline.SAME or headline.sure(name, bands)[0]):
            told = f"**{told}**"
        elif by is not None:  # grey while its uncertainty is computed, and "(uncertain)" inside it
            told = f":gray[{told}{' (uncertain)' if bands is not None else ''}]"
        cells.append(told)
    known = "" if bands is not None or differ == {} else " :gray[(how sure is being computed)]"
    more = in_unit(second.memory.total_bytes - first.memory.total_bytes, "GiB", "bytes")
    lines.append(f"| **B - A**{known} | " + " | ".join([*cells, f"{more:+.1f} GiB", ""]) + " |")
    return lines


def _buttons(sides: Sequence[scenario_store.Kept], current: scenario_store.Kept, kept: int) -> None:
    with st.container(horizontal=True, gap="small"):
        for letter, (label, preset, texts) in zip("AB", sides, strict=True):
            note = f"Make {escaped(label)} the scenario of every page"
            shown = (preset, texts) == current[1:]
            widgets.button(
                f"Show {letter}", f"show {letter}", _open, preset, texts, disabled=shown, help=note
            )
        for number in range(min(kept, 2)):
            key, undo = f"unpin {number}", scenario_store.unpin
            widgets.button(f"Unpin {'AB'[number]}", key, undo, number, type="tertiary")


def _open(preset: str, texts: tuple[str, ...]) -> None:
    state.open_scenario(preset, texts)


MOST_CHIPS = 8
"""Changes that are shown as chips; the rest is listed behind a button."""

REFUSED = ":red-badge[:material/error: refused: the page says why]"

HIDDEN = ("name", "description")
"""Changes that are no chips, because the scenario's name shows them."""


def show() -> Any:
    """Draw the head; returns the place of the facts, for `show_facts` once the page knows the result."""
    with st.container(horizontal=True, vertical_alignment="center", key="scenario-bar"):
        with st.popover(escaped(state.title()), icon=":material/folder_open:", width="content"):
            _menu()
        facts = st.empty()
        try:
            scenario = state.current()
            facts.markdown(_facts(scenario, state.known_result(scenario)))
        except MoesimError:
            facts.markdown(REFUSED)
        _scenario_header_buttons()
    problem = st.session_state.get(state.LINK_PROBLEM)
    if problem is not None:
        st.error(escaped(problem), icon=":material/link_off:")
    not_started = st.session_state.pop(long_work.NOT_STARTED, None)
    if not_started is not None:
        st.error(escaped(not_started), icon=":material/hourglass_disabled:")
    _chips()
    return facts


def show_facts(place: Any) -> None:
    """Fill in what the bar says about the current scenario, predicted at the latest now."""
    try:
        scenario = state.current()
    except MoesimError:
        return
    if not scenario.trains:
        return
    try:
        place.markdown(_facts(scenario, state.result_of(scenario)))
    except InfeasibleError:
        place.markdown(_facts(scenario, None, ":red-badge[:material/error: cannot run]"))
    except MoesimError:
        place.markdown(_facts(scenario, None, ":red-badge[:material/error: not predicted]"))


def _facts(scenario: Scenario, result: Result | None, verdict: str = "") -> str:
    """Model, GPUs, tokens, fit, confidence and profile in one line of Markdown."""
    gpus = " + ".join(f"{machine.n_gpus:,} x {machine.accelerator.name}" for machine in scenario.machines)
    parts = [escaped(scenario.shape.name), escaped(gpus)]
    if scenario.serving is not None:
        parts.append(f"served by {escaped(scenario.serving.engine)}")
    if not scenario.trains:
        return " · ".join([*parts, escaped(scenario.calibration.name)])
    assumed = "" if is_stated(scenario, "run.tokens") else " (assumed)"
    parts.append(f"{compact(scenario.run.tokens)} tokens{assumed}")
    if result is not None:
        memory = result.memory
        used, limit = (in_unit(size, "GiB", "bytes") for size in (memory.total_bytes, memory.capacity_bytes))
        colour, icon = headline.VERDICTS[memory.verdict]
        parts.append(f":{colour}-badge[:material/{icon}: {memory.verdict}, {used:.1f} of {limit:.1f} GiB]")
        parts.append(texts.badge(result.confidence))
        parts.append(escaped(result.profile))
    return " · ".join([*parts, verdict] if verdict else parts)


def _scenario_header_buttons() -> None:
    pinned, now = scenario_store.pinned(), (state.preset(), state.overrides())
    free = len(pinned) < scenario_store.MOST - 1 and all(kept[1:] != now for kept in pinned)
    with st.container(horizontal=True, width="content", gap="small", key="scenario-buttons"):
        for key, icon, note, act, possible in (
            ("undo change", "undo", "Undo the last change", state.undo, state.can_undo()),
            ("redo change", "redo", "Redo the change that was undone last", state.redo, state.can_redo()),
            (
                "pin",
                "keep",
                "Pin this scenario: it stays beside what you change next",
                scenario_store.pin,
                free,
            ),
        ):
            widgets.button(f":material/{icon}:", key, act, help=note, disabled=not possible)


def _chips() -> None:
    """Draw each change as a button that takes it back."""
    own = [text for text in state.overrides() if overridden_key(text) not in HIDDEN]
    if not own:
        return
    with st.container(horizontal=True, gap="small", key="chips"):
        for text in own[:MOST_CHIPS]:
            _chip(text)
        if len(own) > MOST_CHIPS:
            with st.popover(f"{len(own) - MOST_CHIPS} more changes", width="content"):
                for text in own[MOST_CHIPS:]:
                    _chip(text)
        if len(own) > 1:
            st.button("Undo all changes", on_click=state.reset, type="tertiary", key="undo all")


def _chip(text: str) -> None:
    key = overridden_key(text)
    label, note = f"{escaped(links.readable(text))} ✕", f"Take {escaped(key)} back"
    widgets.button(label, f"chip {key}", state.set_override, key, None, help=note)


def _menu() -> None:
    """Draw what can be done with the scenario as an object, and the others to switch to."""
    name = "scenario name"
    st.session_state[name] = state.title()
    st.text_input("Name", key=name, max_chars=state.MOST_NAME, on_change=_renamed, args=(name,))
    with st.container(horizontal=True):
        st.button("Duplicate", icon=":material/content_copy:", on_click=scenario_store.duplicate)
        if state.overrides():
            st.button(
                "Back to the preset", icon=":material/restart_alt:", on_click=state.reset, key="to preset"
            )
    warning = links.only_here(state.preset(), state.overrides())
    if warning is not None:
        st.warning(escaped(warning), icon=":material/link_off:")
    st.caption("The address of this page is a link to this scenario.")
    others = [
        entry for entry in scenario_store.recent(visitors.current()) if entry.number != state.object_id()
    ]
    if others:
        st.markdown("**Recent scenarios**")
    for entry in others[:8]:
        key, wide = f"recent {entry.number}", {"type": "tertiary", "width": "stretch"}
        widgets.button(escaped(entry.name), key, scenario_store.open_recent, entry.number, **wide)


def _renamed(name: str) -> None:
    state.rename(st.session_state[name])


def show_pins() -> None:
    """Draw the pinned scenario A beside B, the next pinned one or the current, with their difference."""
    kept = scenario_store.pinned()
    if not kept:
        return
    with suppress(MoesimError):  # the page says what is wrong with it
        show_pinned(kept)


# -- job tray ----------------------------------------------------------------------------------------
# The tray in the sidebar of every page: this visitor's searches, sweeps and simulations.

POLL_S = 1.0

ENDS = {"done": ":material/check_circle:", "stopped": ":material/stop_circle:", "failed": ":material/error:"}
"""Icon of each way to end."""

STYLE = """<style>
.st-key-tray [data-testid=stVerticalBlock] {gap: 0.15rem}
.st-key-tray [data-testid=stMarkdownContainer] {margin-bottom: 0}
.st-key-tray [data-testid=stMarkdownContainer] p {margin: 0; line-height: 1.3}
.st-key-tray [data-testid=stProgress] p, .st-key-tray [data-testid=stCaptionContainer] p
  {font-size: 0.8rem; font-variant-numeric: tabular-nums}
.st-key-tray [data-testid=stProgress] {padding-top: 0.2rem}
.st-key-tray button {min-height: 1.6rem; padding: 0 0.3rem}
.st-key-tray button p {font-size: 0.85rem}
</style>"""
"""Close together, because the tray shares the sidebar with the pages."""


def show_tray() -> None:
    """Draw the tray, if this visitor has started anything; it follows running jobs by itself."""
    found = tray.of(visitors.current())
    if not found:
        return
    with st.sidebar, st.container(key="tray"):
        st.html(STYLE)
        st.caption("Your computations")
        following = any(entry.is_open for entry in found)
        # The same fragment in both cases, so that a click reaches its button while one becomes the other.
        page_switch.redrawn(POLL_S if following else None)(_entries)(following)


def _entries(following: bool) -> None:
    """Draw the entries; redraw the page once none is left, or none runs that this was `following`."""
    found = tray.of(visitors.current())
    for entry in found:
        with st.container(border=True, key=f"tray entry {entry.number}"):
            _entry(entry)
    if not found or (following and not any(entry.is_open for entry in found)):
        st.rerun(scope="app")


def _entry(entry: TrayEntry) -> None:
    origin, visitor = entry.origin, visitors.current()
    icon = "" if entry.is_open else f"{ENDS[entry.state]} "
    st.markdown(f"{icon}**{escaped(origin.title)}**")
    if origin.scenario:
        st.caption(escaped(origin.scenario))
    if entry.is_open:
        long_work.bar(entry, short=True)
    else:
        st.caption(_end(entry))
    with st.container(horizontal=True):
        pages = st.session_state.get(page_switch.PAGES, {})
        if origin.page in pages and st.button(
            "Open", key=f"tray open {entry.number}", type="tertiary", help="Open its page as it was"
        ):
            # With the scenario and the form that the job was started with.
            state.open_scenario(origin.preset, origin.changes)
            forms.take_over(long_work.prefix(origin.page), origin.fields)
            st.switch_page(pages[origin.page])
        label, act, icon = "Close", tray.close, ":material/close:"
        if entry.is_open:
            label, act, icon = "Stop", tray.stop, ""
        key, more = f"tray {label.lower()} {entry.number}", {"icon": icon or None, "type": "tertiary"}
        widgets.button(label, key, act, visitor, entry.number, **more)


def _end(entry: TrayEntry) -> str:
    """How a job ended, in words."""
    if entry.state == "done":
        return f"Done in {long_work.duration(entry.took_s)}"
    if entry.state == "stopped":
        reason = f": {escaped(entry.error)}" if entry.error is not None else ""
        return f"Stopped after {long_work.duration(entry.took_s)}{reason}"
    return f"Failed: {escaped(str(entry.error)[:300])}"
