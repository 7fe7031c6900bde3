"""What people come for, done in a real browser with no more clicks than promised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("streamlit", reason="the dashboard extra is not installed")

from e2e.visitor import Clicks, Visit, Visitor, until

CONFIG = Path(__file__).resolve().parents[2] / "golden" / "models" / "qwen3-30b-a3b.json"
LONG_MS = 240_000
"""As long as a plan search may take on a machine that others use too."""


def other_than(page: Any, label: str, old: str) -> None:
    """Wait until a tile shows something else."""
    page.wait_for_function(
        "([label, old]) => [...document.querySelectorAll('[data-testid=stMetric]')].some(tile =>"
        " tile.innerText.includes(label) && !tile.innerText.includes(old))",
        arg=[label, old],
    )


def test_eight_sms_take_two_clicks(visit: Visit) -> None:
    visitor, clicks = visit(), Clicks()
    page = visitor.open("result")
    before = visitor.metric("Step time").inner_text()
    clicks.on(page.get_by_role("link", name="Scenario"))
    number = (
        page.get_by_test_id("stNumberInput").filter(has_text="Communication SMs").get_by_role("spinbutton")
    )
    clicks.on(number)
    page.keyboard.press("Control+A")
    page.keyboard.type("8")
    page.keyboard.press("Enter")
    other_than(page, "Step time", before)
    assert page.get_by_role("button", name="communication.sms=8").count() == 1, "the change is no chip"
    assert clicks.count <= 2


def test_a_config_json_on_512_h100_is_planned_in_six_clicks_and_its_best_plan_opened_in_three(
    visit: Visit,
) -> None:
    visitor, clicks = visit(), Clicks()
    page = visitor.open("start")
    upload = page.get_by_test_id("stFileUploader").get_by_role("button", name="Upload", exact=True)
    clicks.upload(page, upload, str(CONFIG))
    until(
        page,
        "[...document.querySelectorAll('[data-testid=stSelectbox]')].some(box => (box.innerText +"
        " box.querySelector('input')?.value).includes('qwen3-30b-a3b (uploaded)'))",
    )
    visitor.settled()
    assert page.get_by_test_id("stNumberInput").get_by_role("spinbutton").first.input_value() == "512"
    clicks.on(page.get_by_role("button", name="Find a plan"))
    page.get_by_role("button", name="Open the best plan").wait_for(timeout=LONG_MS)
    assert clicks.count <= 6
    assert page.get_by_text("512 x h100-sxm").count() == 1
    clicks = Clicks()
    visitor.settled()
    shown = visitor.metric("Step time").inner_text()
    clicks.on(page.get_by_role("button", name="Open the best plan"))
    page.wait_for_url("**/result?**")
    visitor.settled()
    assert visitor.metric("Step time").inner_text() == shown, "the opened plan is not the one that was found"
    assert page.get_by_role("button", name="parallel.").count() >= 1, "what the plan set is no chip"
    assert clicks.count <= 3
    _the_link_holds_the_file(visitor, visit(), shown)


def _the_link_holds_the_file(visitor: Visitor, other: Visitor, shown: str) -> None:
    """The same numbers without a click; that the file comes with the link is tested apart."""
    assert "packed=" in visitor.page.url
    other.open(visitor.page.url.removeprefix(f"{visitor.base}/"))
    assert other.metric("Step time").inner_text() == shown


def test_a_run_with_failures_and_terms_takes_four_clicks(visit: Visit) -> None:
    visitor, clicks = visit(), Clicks()
    page = visitor.open("run_cost")
    before, days = (visitor.metric(label).inner_text() for label in ("Cost", "Days"))
    clicks.on(page.get_by_role("combobox", name="Failure rate as at"))
    assert page.get_by_text("Assumed by rule: run.failures = llama3-16k-h100").count() == 1
    clicks.on(page.get_by_role("option", name="meta-rsc1"))
    page.get_by_role("button", name="run.failures").wait_for()
    visitor.settled()
    page.get_by_text("Best interval").wait_for()  # between checkpoints
    assert float(visitor.metric("Days").inner_text()) != float(days), "another failure rate, the same days"
    assert "meta-rsc1" in page.url
    page.wait_for_timeout(1500)  # a person looks at the numbers before the next click
    for _ in range(2):  # the framework may take the first click for closing the list of choices
        clicks.on(page.get_by_text("rent: reserved"))
        page.wait_for_timeout(3000)
        if page.get_by_role("button", name="run.price").count():
            break
    other_than(page, "Cost", before)
    assert clicks.count <= 4


def test_undo_redo_and_a_pin_follow_through_the_pages(visit: Visit) -> None:
    visitor = visit()
    page = visitor.open("result?preset=deepseek-v3-2048xh800&set=communication.sms%3D8")
    changed = visitor.metric("Step time").inner_text()
    page.get_by_role("button", name="keep").first.click()
    visitor.settled()
    page.get_by_role("button", name="communication.sms=8").click()  # the chip takes the change back
    other_than(page, "Step time", changed)
    page.locator(".st-key-a-and-b table").wait_for()
    page.get_by_role("link", name="Evidence").click()
    page.wait_for_url("**/evidence?**")
    rows = page.locator(".st-key-a-and-b tbody tr")
    rows.first.wait_for()
    assert rows.count() == 3 and changed in rows.first.inner_text()
    visitor.settled()
    page.locator(".st-key-undo-change button").first.click()
    page.get_by_role("button", name="communication.sms=8").wait_for()
    visitor.settled()
    page.locator(".st-key-redo-change button").first.click()
    page.get_by_role("button", name="communication.sms=8").wait_for(state="detached")
