"""What if NVLink were twice as fast: how many clicks it takes from the page What-if, and by the keyboard."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("streamlit", reason="the dashboard extra is not installed")

from e2e.visitor import Visit, thorough, until

MOST_CLICKS = 2
DOUBLED = "cluster.node.accelerator.scale_up_bandwidth=400 GB/s"


def buttons(page: Any) -> Any:
    return page.get_by_test_id("stMain").get_by_test_id("stButtonGroup").filter(has_text="NVLink bandwidth")


def shown(page: Any) -> None:
    """Wait until the page has the figures of twice the bandwidth, with the difference from now."""
    page.get_by_test_id("stCode").filter(has_text=DOUBLED).first.wait_for()
    until(page, "!!document.querySelector('[data-testid=stMain] [data-testid=stMetricDelta]')")


def test_nvlink_is_doubled_in_two_clicks(visit: Visit) -> None:
    visitor = visit()
    page = visitor.open("what_if")
    before = visitor.metric("Step time").inner_text()
    clicks = 1
    buttons(page).get_by_text("x2", exact=True).click()
    shown(page)
    assert clicks <= MOST_CLICKS
    assert visitor.metric("Step time").inner_text() != before
    assert "what-if.scale_up%3D2.0" in page.url
    other = visit()
    other.open("what_if?" + page.url.partition("?")[2])
    shown(other.page)
    assert other.metric("Step time").inner_text() == visitor.metric("Step time").inner_text()


@thorough
def test_nvlink_is_doubled_by_the_keyboard(visit: Visit) -> None:
    visitor = visit()
    page = visitor.open("what_if")
    buttons(page).locator("button").filter(has_text="x2").focus()
    page.keyboard.press("Enter")
    shown(page)
    page.keyboard.press("Enter")  # once more takes it back
    page.get_by_text("Nothing is changed").wait_for()
    assert page.get_by_test_id("stException").count() == 0
