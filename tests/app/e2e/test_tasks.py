"""What people come for, done in a real browser with no more clicks than promised."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

pytest.importorskip("streamlit", reason="the dashboard extra is not installed")

Error: Any = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").Error

from app_sessions import HOME, JOB  # noqa: E402

from e2e.visitor import Clicks, Visit, Visitor, thorough, until  # noqa: E402

CONFIG = Path(__file__).resolve().parents[2] / "golden" / "models" / "qwen3-30b-a3b.json"
LONG_MS = 600_000
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
    assert page.locator(".st-key-chips").get_by_role("button", name="8 SMs").count() == 1, (
        "the change is no chip"
    )
    assert clicks.count <= 2


def test_a_config_json_becomes_an_opened_plan_in_five_clicks_and_is_priced_in_one_more(
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
    gpus = page.get_by_test_id("stNumberInput").get_by_role("spinbutton").first
    assert gpus.input_value() == "512"
    clicks.on(gpus)
    page.keyboard.press("Control+A")
    page.keyboard.type("64")  # a search of a second
    page.keyboard.press("Enter")
    page.wait_for_function("location.search.includes('start.gpus%3D64')")
    visitor.settled()
    clicks.on(page.get_by_role("button", name="Find a plan"))
    page.get_by_role("button", name="Open the best plan").wait_for(timeout=LONG_MS)
    assert page.get_by_text("64 x h100-sxm").count() >= 1
    visitor.settled()
    shown = visitor.metric("Step time").inner_text()
    clicks.on(page.get_by_role("button", name="Open the best plan"))
    page.wait_for_url("**/result?**")
    visitor.settled()
    assert visitor.metric("Step time").inner_text() == shown, "the opened plan is not the one that was found"
    assert page.locator(".st-key-chips button").count() >= 1, "what the plan set is no chip"
    assert clicks.count <= 5
    priced = Clicks()
    priced.on(page.get_by_role("link", name="Run & cost"))
    page.wait_for_url("**/run_cost?**")
    assert visitor.metric("Cost, whole run").inner_text().startswith("$")
    assert priced.count <= 1
    page.go_back()
    page.wait_for_url("**/result?**")
    visitor.settled()
    _the_link_holds_the_file(visitor, visit(), shown)


def _the_link_holds_the_file(visitor: Visitor, other: Visitor, shown: str) -> None:
    """The same numbers without a click; that the file comes with the link is tested apart."""
    assert "packed=" in visitor.page.url
    other.open(visitor.page.url.removeprefix(f"{visitor.base}/"))
    assert other.metric("Step time").inner_text() == shown


def test_a_run_with_failures_and_a_three_year_price_takes_four_clicks(visit: Visit) -> None:
    visitor, clicks = visit(), Clicks()
    page = visitor.open("run_cost")
    before, days = (visitor.metric(label).inner_text() for label in ("Cost", "Days"))
    clicks.on(page.get_by_role("combobox", name="Failure rate from"))
    assert page.get_by_text("Assumed by rule: run.failures = llama3-16k-h100").count() == 1
    clicks.on(page.get_by_role("option", name="meta-rsc1"))
    page.locator(".st-key-chips").get_by_text("failures from meta-rsc1").first.wait_for()
    visitor.settled()
    page.get_by_text("Best interval").wait_for()  # between checkpoints
    assert float(visitor.metric("Days").inner_text()) != float(days), "another failure rate, the same days"
    assert "meta-rsc1" in page.url
    visitor.settled()
    rate = page.get_by_test_id("stSlider").filter(has_text="US dollars per GPU-hour").get_by_role("slider")
    for _ in range(2):  # the framework may take the first click for closing the list of choices
        clicks.on(page.get_by_text("own rate: three-year rent"))
        with suppress(Error):
            page.get_by_text("three-year rent", exact=True).last.wait_for(timeout=5000)
            break
    visitor.settled()
    rate.focus()
    page.keyboard.press("ArrowLeft")
    other_than(page, "Cost", before)
    assert clicks.count <= 4
    assert page.locator(".st-key-scenario-bar").get_by_text("three-year rent").count() == 1


def test_the_largest_exposed_communication_is_found_in_two_clicks(visit: Visit) -> None:
    visitor, clicks = visit(), Clicks()
    page = visitor.open("timeline")
    frame = page.frame_locator("iframe[title*=timeline]").first
    frame.locator("#name:not(:empty)").wait_for()
    clicks.on(frame.locator("#exposed"))
    longest = [
        float(text.replace(",", ""))
        for text in frame.locator("#table-body td:nth-child(2)").all_inner_texts()
    ]
    assert longest == sorted(longest, reverse=True) and len(longest) > 50
    clicks.on(frame.locator("#table-body button"))
    shown = frame.locator("#facts div").filter(has_text="Duration").locator("dd").inner_text()
    assert float(shown.replace(",", "").removesuffix(" ms")) == pytest.approx(longest[0], rel=1e-3)
    assert "pipeline rank" in frame.locator("#where").inner_text()
    assert clicks.count <= 2
    frame.locator("#table-head button").nth(1).click()  # shortest first
    frame.locator("th[aria-sort=ascending]").wait_for()
    frame.locator("#path").click()
    frame.locator("#search").fill("dispatch")
    frame.locator("#found", has_text="on path").wait_for()


def test_the_trace_is_saved_in_one_click(visit: Visit) -> None:
    page = visit().open("timeline")
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Perfetto trace").click()
    assert waiting.value.suggested_filename.endswith(".trace.json.gz")


def test_a_link_is_copied_in_two_clicks_and_shows_the_same_numbers_elsewhere(visit: Visit) -> None:
    visitor, clicks = visit(), Clicks()
    page = visitor.open("result?preset=deepseek-v3-2048xh800&set=communication.sms%3D8")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=visitor.base)
    shown = visitor.metric("Step time").inner_text()
    clicks.on(page.locator(".st-key-copy-link button"))
    codes = page.get_by_role("dialog").get_by_test_id("stCode")
    codes.nth(1).wait_for()
    short, long = (codes.nth(n).inner_text().strip() for n in range(2))
    clicks.on(codes.first.get_by_role("button", name="Copy to clipboard"))
    page.wait_for_function("navigator.clipboard.readText().then(text => text.includes('link='))")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert clicks.count <= 2 and copied == short and len(short) < 60
    assert "communication.sms%3D8" in long
    for address in (copied, long):
        other = visit()
        other.open(address.removeprefix(f"{visitor.base}/"))
        assert other.metric("Step time").inner_text() == shown


def test_a_plan_that_does_not_fit_is_repaired_in_three_clicks(visit: Visit) -> None:
    visitor, clicks = visit(), Clicks()
    unfit = (*JOB, "parallel.microbatch=4", "batch.sequence_length=8192")
    page = visitor.open(f"scenario?{urlencode({'preset': HOME, 'set': unfit}, doseq=True)}")
    page.get_by_text("Legal, but does not fit").wait_for()
    assert page.get_by_text("of a plan that does not fit").count() >= 4, "its figures are marked"
    clicks.on(page.get_by_role("button", name="Find the nearest plan that fits"))
    repair = page.locator(".st-key-repair-0 button").first
    repair.wait_for(timeout=LONG_MS)
    visitor.settled()
    clicks.on(repair)
    page.get_by_text("Legal, but does not fit").wait_for(state="detached")
    visitor.settled()
    assert page.get_by_text("of a plan that does not fit").count() == 0
    assert clicks.count <= 3


def test_undo_redo_and_a_pin_follow_through_the_pages(visit: Visit) -> None:
    visitor = visit()
    page = visitor.open("result?preset=deepseek-v3-2048xh800&set=communication.sms%3D8")
    changed = visitor.metric("Step time").inner_text()
    page.locator(".st-key-pin button").first.click()
    visitor.settled()
    chip = page.locator(".st-key-chips").get_by_role("button", name="8 SMs")
    chip.click()  # the chip takes the change back
    other_than(page, "Step time", changed)
    page.locator(".st-key-a-and-b table").wait_for()
    page.get_by_role("link", name="Evidence").click()
    page.wait_for_url("**/evidence?**")
    rows = page.locator(".st-key-a-and-b tbody tr")
    rows.first.wait_for()
    assert rows.count() == 3 and changed in rows.first.inner_text()
    visitor.settled()
    page.locator(".st-key-undo-change button").first.click()
    chip.wait_for()
    visitor.settled()
    page.locator(".st-key-redo-change button").first.click()
    chip.wait_for(state="detached")


# -- What if NVLink were twice as fast --------------------------------------------------------------

MOST_CLICKS_OF_LINKS = 1
DOUBLED = "cluster.node.accelerator.scale_up_bandwidth=400 GB/s"


def buttons(page: Any) -> Any:
    return page.get_by_test_id("stMain").get_by_test_id("stButtonGroup").filter(has_text="NVLink bandwidth")


def doubled(page: Any) -> None:
    """Wait until the page has the figures of twice the bandwidth, with the difference from now."""
    page.get_by_test_id("stCode").filter(has_text=DOUBLED).first.wait_for()
    until(page, "!!document.querySelector('[data-testid=stMain] [data-testid=stMetricDelta]')")


def test_nvlink_is_doubled_in_one_click(visit: Visit) -> None:
    visitor = visit()
    page = visitor.open("what_if")
    before = visitor.metric("Step time").inner_text()
    clicks = 1
    buttons(page).get_by_text("x2", exact=True).click()
    doubled(page)
    assert clicks <= MOST_CLICKS_OF_LINKS
    assert visitor.metric("Step time").inner_text() != before
    assert "what-if.scale_up%3D2.0" in page.url
    other = visit()
    other.open("what_if?" + page.url.partition("?")[2])
    doubled(other.page)
    assert other.metric("Step time").inner_text() == visitor.metric("Step time").inner_text()


@thorough
def test_nvlink_is_doubled_by_the_keyboard(visit: Visit) -> None:
    visitor = visit()
    page = visitor.open("what_if")
    buttons(page).locator("button").filter(has_text="x2").focus()
    page.keyboard.press("Enter")
    doubled(page)
    page.keyboard.press("Enter")  # once more takes it back
    page.get_by_text("# nothing is changed").wait_for()
    assert page.get_by_test_id("stException").count() == 0


# -- three clusters compared ------------------------------------------------------------------------

MOST_CLICKS_OF_CLUSTERS = 5
ADDRESS = urlencode({"preset": HOME, "set": JOB}, doseq=True)
"""OLMoE on 16 H100, whose quick searches take seconds; the clicks are those of any scenario."""


def test_three_clusters_are_compared_in_five_clicks(visit: Visit) -> None:
    visitor = visit()
    page = visitor.open(f"hardware?{ADDRESS}")
    clicks = 0

    def click(place: object) -> None:
        nonlocal clicks
        clicks += 1
        place.click()  # type: ignore[attr-defined]

    main = page.get_by_test_id("stMain")
    click(main.get_by_test_id("stMultiSelect").locator("input"))  # the scenario's own cluster is there
    for name in ("h200-1024", "b200-1024"):
        page.keyboard.type(name)  # the list is long: typing finds it
        click(page.get_by_role("option", name=name, exact=True))
        main.get_by_test_id("stMultiSelect").get_by_text(name, exact=True).wait_for()
    page.keyboard.press("Escape")
    visitor.settled()
    click(main.get_by_role("button", name="Compare", exact=True))
    until(page, "document.querySelectorAll('.figures thead th').length === 4")
    until(page, "document.querySelectorAll('.figures tbody tr').length > 10")
    assert clicks <= MOST_CLICKS_OF_CLUSTERS
    head = main.locator(".figures thead").inner_text()
    assert all(name in head for name in ("h100-1024", "h200-1024", "b200-1024"))
    per_usd = main.locator(".figures tbody tr").filter(has_text="Tokens per $").locator(".main")
    assert per_usd.count() == 3
    cost = main.locator(".figures tbody tr").filter(has_text="Cost of the run").locator(".main")
    assert cost.count() == 3 and all(text.startswith("$") for text in cost.all_inner_texts())
    for button in ("h200-1024", "b200-1024"):
        main.get_by_role("button", name=button, exact=True).wait_for()
    # The choices are in the address: another session asks the same, and the plans are known already.
    other = visit()
    other.open("hardware?" + page.url.partition("?")[2])
    other.page.locator(".figures thead th").nth(3).wait_for()
    shown = other.page.locator(".figures tbody").inner_text()
    assert shown == main.locator(".figures tbody").inner_text()
    assert page.get_by_test_id("stException").count() == 0
    visitor.screenshot("hardware")


# -- what outlives other pages, a reload and Back ---------------------------------------------------


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


# -- a point of Curves becomes the scenario's value -------------------------------------------------

EIGHT_BLOCKS = {
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
    page = visitor.open(f"curves?{urlencode(EIGHT_BLOCKS, doseq=True)}")
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
