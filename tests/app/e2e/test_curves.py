"""The page Curves in a browser: a point is chosen with the mouse and becomes the scenario's value."""

from __future__ import annotations

from urllib.parse import urlencode

import pytest

pytest.importorskip("streamlit", reason="the dashboard extra is not installed")

from e2e.visitor import Visit

SMALL = {
    "preset": "deepseek-v3-2048xh800",
    "set": [
        "cluster.nodes=8",
        "parallel.pp=4",
        "parallel.ep=16",
        "batch.sequences=256",
        "stages={blocks: [moe*2, moe*2, moe*2, moe*2]}",
        "communication.sms=16",
    ],
}


def test_a_chosen_point_becomes_the_value_of_the_scenario(visit: Visit) -> None:
    visitor = visit()
    page = visitor.open(f"curves?{urlencode(SMALL, doseq=True)}")
    page.get_by_text("the bar at the present value").wait_for()  # it draws the charts anew
    visitor.settled()
    points = page.locator(".st-key-curve-of-sms .scatterlayer .trace .point")
    points.nth(2).click(force=True)  # 2, 4, 8, 12, ...
    page.get_by_role("button", name="Use 8", exact=True).click()
    page.wait_for_function("!location.search.includes('communication.sms%3D16')")
    visitor.settled()
    assert "communication.sms%3D8" in page.url
    page.get_by_text("Communication SMs = 8").wait_for()
    assert page.get_by_test_id("stException").count() == 0
