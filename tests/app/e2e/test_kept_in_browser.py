"""A visitor's work in a real browser: what outlives other pages, a reload and Back."""

from __future__ import annotations

from typing import Any

from e2e.visitor import Visit


def test_work_outlives_other_pages_a_reload_and_back(visit: Visit) -> None:
    visitor = visit()
    page = visitor.open("what_if")

    def slider() -> Any:
        return page.get_by_test_id("stSlider").filter(has_text="Communication SMs")

    def reads(value: str) -> None:
        """Wait until the slider and the address say so."""
        visitor.settled()
        slider().get_by_text(value, exact=True).first.wait_for()

    def left(field: str) -> None:
        slider().get_by_role("slider").focus()
        page.keyboard.press("ArrowLeft")
        page.wait_for_function("text => decodeURIComponent(location.search).includes(text)", arg=field)

    left("what-if.sms=19")
    left("what-if.sms=18")
    reads("18")
    page.get_by_role("link", name="Evidence").click()
    page.wait_for_url("**/evidence?**")
    visitor.settled()
    page.get_by_role("link", name="What-if").click()
    page.wait_for_url("**/what_if?**")
    reads("18")
    page.reload()
    reads("18")

    def back(value: str, field: str) -> None:
        """Back until the address has this field: the framework may push a page twice."""
        for _ in range(8):
            page.go_back()
            visitor.settled()
            if "/what_if?" in page.url and page.url.endswith(field):
                return reads(value)
        raise AssertionError(f"Back never came to {field}: {page.url}")

    back("19", "what-if.sms%3D19")
    back("20", "deepseek-v3-2048xh800")
    page.go_forward()
    reads("19")
    assert page.get_by_test_id("stException").count() == 0
