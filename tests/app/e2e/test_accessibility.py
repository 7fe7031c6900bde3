"""Every page by the keyboard alone, without jumps of its layout, and what is muted or explained on it."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote

import pytest

pytest.importorskip("streamlit", reason="the dashboard extra is not installed")

from e2e.visitor import EVERY, SHIFTED, SHIFTS, Visit, quiet, thorough, until
from moesim.app.pages import PAGES

MOST_SHIFT = 0.1
"""Cumulative layout shift that is good (web.dev/cls)."""
NAMES = [page[0] for page in PAGES] if EVERY else ["start", "timeline"]
ROOFLINE = "?preset=deepseek-v3-2048xh800&set=profile%3Dgeneric-roofline&set=cluster%3Dh20-2048"

CONTROLS = """() => {
    const names = [], roving = new Set();
    for (const e of document.querySelectorAll(
        '[data-testid=stApp] :is(button, a[href], input, textarea, [role=slider], [role=combobox])')) {
        if (e.disabled || !e.checkVisibility({visibilityProperty: true})) continue;
        if (e.closest('[aria-hidden=true]')) continue;
        const box = e.getBoundingClientRect();
        if (!box.width || !box.height || e.closest('.modebar') || e.type === 'file') continue;
        const group = e.closest(
            '[role=radiogroup], [role=group], [data-testid=stButtonGroup], [role=tablist]');
        if (e.tabIndex < 0 && !group) continue;
        if (group) {
            if (roving.has(group)) continue;  // its other buttons are reached by the arrow keys
            roving.add(group);
            group.dataset.k = names.length;
        } else e.dataset.k = names.length;
        names.push((e.getAttribute('aria-label') || e.textContent || e.tagName).slice(0, 60));
    }
    return names;
}"""
"""Marks the controls that people can see, and names them; a group of buttons counts once."""

FOCUSED = """() => {
    let e = document.activeElement;
    if (!e || e === document.body) return null;
    if (e.tagName === 'IFRAME') {  // a component of ours: what has the focus is inside
        e = e.contentDocument.activeElement;
        if (!e || e === e.ownerDocument.body) return null;
    }
    const marked = e.closest('[data-k]');
    let seen = false;
    for (let p = e, n = 0; p && n < 4 && !seen; p = p.parentElement, n++) {
        const s = getComputedStyle(p);
        seen = (s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) > 0) || s.boxShadow !== 'none'
            || s.borderColor.includes('0, 114, 178');
    }
    const name = (e.getAttribute('aria-label') || e.textContent).slice(0, 60);
    return [marked ? Number(marked.dataset.k) : null, seen, name];
}"""
"""(number of the marked control that has the focus, whether that can be seen, its name)."""


@pytest.mark.parametrize("name", NAMES)
def test_nothing_jumps_and_the_keyboard_reaches_every_control(name: str, visit: Visit) -> None:
    visitor = visit()
    visitor.page.add_init_script(SHIFTS)
    page = visitor.open(name)
    quiet(page)  # fragments, charts and intervals come after the script
    visitor.settled()
    assert page.evaluate("window.shifts") != [], "the browser reports no shifts at all"
    if page.evaluate("window.firstNumber !== undefined"):
        assert page.evaluate(SHIFTED) <= MOST_SHIFT
    names = page.evaluate(CONTROLS)
    reached: set[int] = set()
    unseen: set[str] = set()
    for _ in range(3 * len(names) + 40):
        page.keyboard.press("Tab")
        at = page.evaluate(FOCUSED)
        if at is None:
            continue
        if at[0] is not None:
            reached.add(at[0])
        if not at[1]:
            unseen.add(at[2])
        if len(reached) == len(names):
            break
    assert len(names) >= len(PAGES)  # the navigation at least
    assert [text for number, text in enumerate(names) if number not in reached] == []
    assert unseen == set()


@pytest.mark.parametrize("name", ["result", "run_cost", "evidence"] if EVERY else ["result"])
def test_a_page_can_be_read_on_a_phone(name: str, visit: Visit) -> None:
    visitor = visit()
    visitor.page.set_viewport_size({"width": 390, "height": 800})
    page = visitor.open(name)
    page.get_by_test_id("stMetricValue").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "scrolls sideways"
    cut = page.evaluate(
        "[...document.querySelectorAll('[data-testid=stMetricValue] p')]"
        ".filter(value => value.scrollWidth > value.clientWidth + 1).map(value => value.textContent)"
    )
    assert cut == []


def colour(page: Any) -> str:
    return str(page.get_by_test_id("stMetricValue").first.evaluate("value => getComputedStyle(value).color"))


@thorough
def test_figures_of_a_roofline_say_so_and_are_muted(visit: Visit) -> None:
    page = visit().open("result")
    page.locator(".stMarkdownBadge", has_text="measured").first.wait_for()
    plain = colour(page)
    page = visit().open(f"result{ROOFLINE}")
    page.locator(".stMarkdownBadge", has_text="roofline").first.wait_for()
    assert page.locator(".st-key-roofline-figures").count() == 1
    assert colour(page) != plain
    page.get_by_text("roofline: no rate was measured here").first.wait_for()  # on the charts too


def test_a_tooltip_leads_to_the_row_of_its_source(visit: Visit) -> None:
    visitor = visit()
    page = visitor.open("result?preset=deepseek-v3-2048xh800&set=communication.sms%3D16")
    tile = page.get_by_test_id("stMetric").filter(has_text="Cost").first
    tile.get_by_test_id("stTooltipHoverTarget").hover()
    tip = page.get_by_test_id("stTooltipContent")
    tip.wait_for()
    assert "price of a GPU-hour" in tip.inner_text() and "eq. F6" in tip.inner_text()
    address = tip.get_by_role("link", name="Evidence").last.get_attribute("href")
    assert "communication.sms=16" in unquote(address)
    second = visit()
    page = second.open(address)
    box = page.get_by_role("textbox", name="Search")
    box.wait_for()
    assert box.input_value() == "price_per_gpu_hour"
    found = page.get_by_text(re.compile(r"^\d+ of \d+ numbers\.$"))
    found.wait_for()
    assert found.inner_text().startswith("1 of ")
    until(page, "location.search.includes('communication.sms')")
