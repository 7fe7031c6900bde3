"""The head of every page: the current scenario with its name, facts and changes, undo, redo and pins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from html import escape
from typing import Any
from urllib.parse import urlencode

import streamlit as st

from moesim.app import forms, long_work, page_switch, scenario_store, state, texts, uploads, visitors, widgets
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
# One bar on every page: A is pinned, B is the next pinned scenario or the current one, B - A is below them.

FIGURES = {
    "step_time_s": False,
    "cost_usd": False,
    "days": False,
    "tokens_per_s_per_gpu": True,
    "mfu_causal": True,
}
"""Figures of the bar, and whether a larger value is better."""
MOST_KEYS = 6
"""Differing keys that the bar states."""


def show_pins() -> None:
    """Draw the pinned scenario A beside B with their difference, and buttons to open and to unpin them."""
    kept = scenario_store.pinned()
    if not kept:
        return
    current = scenario_store.current()
    with suppress(MoesimError), st.container(border=True, key="a-and-b"):
        named = [
            (f"{n}, {side[0]}", n, *side[1:]) for n, side in zip("AB", [*kept, current][:2], strict=True)
        ]
        place = st.empty()
        found = [(scenario, result) for _, scenario, result in headline.sides(named)]
        with st.container(horizontal=True, gap="small", vertical_alignment="center"):
            if len(found) == 2:
                st.caption(_differing(found[0][0], found[1][0]), width="content")
            _buttons([*kept, current][:2], current, len(kept))
            bands = None
            if (
                len(found) == 2 and found[0][0] != found[1][0]
            ):  # its progress stands in this row: nothing moves
                bands = headline.changes("a and b", found[0], found[1], "")
        if len(found) == 2:
            labels = [label for label, _, _ in [*kept, current][:2]]
            place.html(table(labels, found, bands))


def table(
    labels: Sequence[str], sides: Sequence[tuple[Scenario, Result]], bands: Mapping[str, Band] | None
) -> str:
    """A, B and their difference as HTML; the difference is grey inside its own uncertainty."""
    first, second = (result for _, result in sides)
    names = {name: label for label, _, name in headline.tiles(first) if name in FIGURES}
    names = {name: names[name] for name in FIGURES}
    faint = [False] * (len(names) + 1)
    lines = []
    for letter, label, (_, result) in zip("AB", labels, sides, strict=True):
        shown = {name: value for _, value, name in headline.tiles(result)}
        memory = f"{in_unit(result.memory.total_bytes, 'GiB', 'bytes'):.1f} GiB, {result.memory.verdict}"
        mark = headline.note(headline.DOES_NOT_FIT if not result.memory.fits else "")
        cells = [headline.main(shown[name]) + mark for name in names] + [escape(memory)]
        lines.append(headline.line(f"{letter}  {label}", cells, faint))
    differ = changes(first, second)
    cells = [_difference(name, differ.get(name), bands) for name in names]
    more = in_unit(second.memory.total_bytes - first.memory.total_bytes, "GiB", "bytes")
    lines.append(headline.line("B - A", [*cells, f"{more:+.1f} GiB"], faint))
    heads = [*map(escape, names.values()), "Memory"]
    return headline.table("A beside B", heads, lines, faint)


def _differing(first: Scenario, other: Scenario) -> str:
    """The keys that differ, with their values in B."""
    texts = links.overrides_between(first, other)
    told = [escaped(links.readable(text)) for text in texts[:MOST_KEYS]]
    told += [f"{len(texts) - MOST_KEYS} more keys"] if len(texts) > MOST_KEYS else []
    return f"B differs in {', '.join(told)}" if told else "A and B are the same scenario"


def _difference(name: str, by: float | None, bands: Mapping[str, Band] | None) -> str:
    """One difference with its interval, which may follow."""
    if by is None:
        return ""
    told = headline.change(name, by)
    if told == headline.SAME:
        return headline.note(told)
    band = None if bands is None else bands.get(name)
    if band is None:
        return headline.note(told) + headline.note("interval follows")
    ends = headline.change(name, band.p10), headline.change(name, band.p90)
    return headline.delta(told, *ends, band.has_sign, (by > 0.0) == FIGURES[name])


def _buttons(sides: Sequence[scenario_store.Kept], current: scenario_store.Kept, kept: int) -> None:
    for letter, (label, preset, own) in zip("AB", sides, strict=True):
        note, shown = f"Make {escaped(label)} the scenario of every page", (preset, own) == current[1:]
        open_, key = state.open_scenario, f"show {letter}"
        widgets.button(f"Show {letter}", key, open_, preset, own, disabled=shown, help=note, type="tertiary")
    for number in range(min(kept, 2)):
        key, undo = f"unpin {number}", scenario_store.unpin
        widgets.button(f"Unpin {'AB'[number]}", key, undo, number, type="tertiary")


MOST_CHIPS = 8
"""Changes that are shown as chips; the rest is listed behind a button."""

REFUSED = ":red-badge[:material/error: refused: the page says why]"


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
    """Two lines of Markdown: step, cost, fit and confidence; model, GPUs, tokens and profile below them."""
    gpus = " + ".join(f"{machine.n_gpus:,} x {machine.accelerator.name}" for machine in scenario.machines)
    parts = [escaped(scenario.shape.name), escaped(gpus)]
    if scenario.serving is not None:
        parts.append(f"served by {escaped(scenario.serving.engine)}")
    if not scenario.trains:
        return " · ".join([*parts, escaped(scenario.calibration.name)])
    assumed = "" if is_stated(scenario, "run.tokens") else " (assumed)"
    parts.append(f"{compact(scenario.run.tokens)} tokens{assumed}")
    first = [verdict or ":gray[step and cost follow]"]
    if result is not None:
        memory = result.memory
        used, limit = (in_unit(size, "GiB", "bytes") for size in (memory.total_bytes, memory.capacity_bytes))
        colour, icon = headline.VERDICTS[memory.verdict]
        first = [f"**{texts.written('step_time_s', result.step.time_s)}** a step"]
        if scenario.stages.blocks is None:
            first.append(f"**{escaped(texts.money(result.run.cost_usd))}** {headline.price_words(scenario)}")
        first.append(f":{colour}-badge[:material/{icon}: {memory.verdict}, {used:.1f} of {limit:.1f} GiB]")
        first.append(texts.badge(result.confidence))
        parts.append(escaped(result.profile))
    return f"{' · '.join(first)}  \n:small[{' · '.join(parts)}]"


def _scenario_header_buttons() -> None:
    pinned, now = scenario_store.pinned(), (state.preset(), state.overrides())
    free = len(pinned) < scenario_store.MOST - 1 and all(kept[1:] != now for kept in pinned)
    pin = "Pin this scenario: it stays beside what you change next"
    with st.container(horizontal=True, width="content", gap="small", key="scenario-buttons"):
        for key, icon, note, act, possible in (
            ("undo change", "undo", "Undo the last change", state.undo, state.can_undo()),
            ("redo change", "redo", "Redo the change that was undone last", state.redo, state.can_redo()),
            ("pin", "keep", pin, scenario_store.pin, free),
        ):
            widgets.button(f":material/{icon}:", key, act, help=note, disabled=not possible)
        widgets.button(":material/link:", "copy link", _ask_link, help="Copy a link to this page")
    if st.session_state.get(LINK_OF) == _here():  # drawn again with the page, which would else close it
        _show_link()


LINK_OF = "link shown"
"""Session key with the page and scenario whose link is shown."""


def _here() -> tuple[str, str, tuple[str, ...]]:
    return str(st.context.url or "").partition("?")[0], state.preset(), state.overrides()


def _ask_link() -> None:
    st.session_state[LINK_OF] = _here()


def _no_link() -> None:
    st.session_state.pop(LINK_OF, None)


@st.dialog("A link to this page", on_dismiss=_no_link)
def _show_link() -> None:
    """Offer the address of this page, short and long, each with a button that copies it."""
    state.publish()
    query = urlencode({k: st.query_params.get_all(k) for k in st.query_params}, doseq=True)
    base = str(st.context.url or "").partition("?")[0]
    code = scenario_store.short_link(query)
    if code is None:
        st.warning(
            f"No short link: {escaped(scenario_store.store_problem() or 'the address is too long')}",
            icon=":material/link_off:",
        )
    else:
        st.caption("Short, for as long as this server keeps it:")
        st.code(f"{base}?{scenario_store.SHORT}={code}", language=None, wrap_lines=True)
    warning = links.only_here(state.preset(), state.overrides())
    st.caption(escaped(warning or "Long, which holds the whole scenario and works on any moesim dashboard:"))
    st.code(f"{base}?{query}", language=None, wrap_lines=True, height=160)


def _chips() -> None:
    """Draw what each action changed as a button that takes it back."""
    own = state.actions()
    if not own:
        return
    with st.container(horizontal=True, gap="small", key="chips"):
        for keys, words in own[:MOST_CHIPS]:
            _chip(keys, words)
        if len(own) > MOST_CHIPS:
            with st.popover(f"{len(own) - MOST_CHIPS} more changes", width="content"):
                for keys, words in own[MOST_CHIPS:]:
                    _chip(keys, words)
        if len(own) > 1:
            st.button("Undo all changes", on_click=state.reset, type="tertiary", key="undo all")


def _chip(keys: Sequence[str], words: str) -> None:
    shown = [links.readable(text) for text in state.overrides() if overridden_key(text) in keys]
    note = f"Take back {escaped(', '.join(shown))}"
    widgets.button(f"{escaped(words)} ✕", f"chip {keys[0]}", state.take_back, keys, help=note)


def _menu() -> None:
    """Draw what can be done with the scenario as an object, and the others to switch to."""
    name = "scenario name"
    st.session_state[name] = state.title()
    note = "Empty: it is called by what differs from its preset"
    more: dict[str, Any] = {"on_change": _renamed, "args": (name,), "help": note}
    st.text_input("Name", key=name, max_chars=state.MOST_NAME, **more)
    st.caption(
        f"A change of {escaped(uploads.with_names(state.preset()))}." if state.overrides() else "As shipped."
    )
    with st.container(horizontal=True):
        st.button("Duplicate", icon=":material/content_copy:", on_click=scenario_store.duplicate)
        if state.overrides():
            st.button(
                "Back to the preset", icon=":material/restart_alt:", on_click=state.reset, key="to preset"
            )
    warning = links.only_here(state.preset(), state.overrides())
    if warning is not None:
        st.warning(escaped(warning), icon=":material/link_off:")
    others = [
        entry for entry in scenario_store.recent(visitors.current()) if entry.number != state.object_id()
    ]
    if others:
        st.markdown("**Recent scenarios**")
    for entry in others[:8]:
        key, wide = f"recent {entry.number}", {"type": "tertiary", "width": "stretch"}
        label = ": ".join(filter(None, (entry.title, entry.figures)))
        widgets.button(escaped(label), key, scenario_store.open_recent, entry.number, **wide)


def _renamed(name: str) -> None:
    state.rename(st.session_state[name])


# -- job tray ----------------------------------------------------------------------------------------
# The tray in the sidebar of every page: this visitor's searches, sweeps and simulations.

POLL_S = 1.0

ENDS = {"done": ":material/check_circle:", "stopped": ":material/stop_circle:", "failed": ":material/error:"}
"""Icon of each way to end."""

STYLE = """<style>
.st-key-tray {position: fixed; bottom: 0; left: 0; width: 210px; max-height: 40vh; overflow-y: auto;
  z-index: 5; padding: 0.4rem 0.6rem; background: light-dark(#f8f8f7, #21201d); border-top: 1px solid
  light-dark(#d5d8dd, #3a404c)}
[data-testid=stSidebarContent]:has(.st-key-tray) {padding-bottom: 40vh}
.st-key-tray [data-testid=stVerticalBlock] {gap: 0.15rem}
.st-key-tray [data-testid=stMarkdownContainer] {margin-bottom: 0}
.st-key-tray [data-testid=stMarkdownContainer] p {margin: 0; line-height: 1.3}
.st-key-tray [data-testid=stProgress] p, .st-key-tray [data-testid=stCaptionContainer] p
  {font-size: 0.8rem; font-variant-numeric: tabular-nums}
.st-key-tray [data-testid=stProgress] {padding-top: 0.2rem}
.st-key-tray button {min-height: 1.6rem; padding: 0 0.3rem}
.st-key-tray button p {font-size: 0.85rem}
</style>"""
"""At the foot of the sidebar whatever its pages need, and close together."""


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
