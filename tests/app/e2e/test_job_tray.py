"""The tray in a real browser: a search goes on over other pages and a reload, and can be stopped there.

A file of its own: tests of one file share a visitor's cookies, and so the jobs in the tray.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlencode

from app_sessions import HOME, JOB

from e2e.visitor import Visit, findings

SMALL = f"?{urlencode({'preset': HOME, 'set': JOB}, doseq=True)}"


def tray(page: Any) -> Any:
    return page.locator(".st-key-tray")


def test_a_search_is_followed_over_pages_and_a_reload_and_stopped(visit: Visit, browser: Any) -> None:
    visitor = visit()
    page = visitor.open("planner")
    assert tray(page).count() == 0
    page.get_by_role("button", name="Search", exact=True).click()
    tray(page).get_by_text("Plan search").wait_for()
    page.get_by_role("link", name="Calibration").click()
    page.wait_for_url("**/calibration?**")
    tray(page).get_by_text(re.compile(r"\d+%, about .* left")).wait_for()
    page.reload()
    tray(page).get_by_text("Plan search").wait_for()
    visitor.screenshot("job-tray")
    box = tray(page).bounding_box()
    assert box is not None and box["y"] >= 0 and box["y"] + box["height"] <= 800, "the tray is out of view"
    stranger = browser.new_context()
    other = stranger.new_page()
    other.goto(f"{visitor.base}/planner")
    other.get_by_role("button", name="Search", exact=True).wait_for()
    assert tray(other).count() == 0, "another visitor sees nothing of it"
    stranger.close()
    tray(page).get_by_role("button", name="Stop").click()
    tray(page).get_by_text("Stopped after").wait_for()
    tray(page).get_by_role("button", name="Open").click()
    page.wait_for_url("**/planner?**")
    visitor.settled()
    assert page.get_by_test_id("stException").count() == 0
    tray(page).get_by_role("button", name="Close").click()
    tray(page).wait_for(state="detached")


def test_the_result_of_a_search_opens_from_another_page(visit: Visit, axe: str | None) -> None:
    visitor = visit()
    page = visitor.open(f"result{SMALL}")
    page.get_by_role("button", name="Simulate single changes").click()
    tray(page).get_by_text("Done in").wait_for()
    page.get_by_role("link", name="Evidence").click()
    page.wait_for_url("**/evidence?**")
    tray(page).get_by_role("button", name="Open").first.wait_for()
    if axe is not None:
        assert not [text for text in findings(page, axe) if "tray" in text]
    page.locator("[class*='st-key-tray-entry']", has_text="Single changes").get_by_role(
        "button", name="Open"
    ).click()
    page.wait_for_url("**/result?**")
    page.get_by_role("button", name="Try").first.wait_for()
