"""The page Timeline in a real browser: a pair seen and the trace saved, keys, pointer, search."""

from __future__ import annotations

import gzip
import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("streamlit", reason="the dashboard extra is not installed")

from e2e.visitor import EVERY, WAIT_MS, Visit, Visitor, thorough, until

TIMES = re.compile(r"([\d,.]+) ms long, from ([\d,.]+) ms to ([\d,.]+) ms")


def number(text: str) -> float:
    return float(text.replace(",", "").removesuffix(" ms"))


class StepCanvas:
    """The timeline on a visitor's page, as a person sees and handles it; it counts clicks."""

    def __init__(self, visitor: Visitor) -> None:
        self.page, self.clicks = visitor.page, 0
        self.frame = self.page.frame_locator("iframe[title*=timeline]").first
        self.frame.locator("#name:not(:empty)").wait_for()
        self.page.wait_for_timeout(300)  # the frame takes its height

    def at(self, lane: str, share: float, canvas: str = "step") -> tuple[float, float]:
        """The point on a row at a share of the canvas's window."""
        place = self.frame.locator(f"#{canvas}")
        place.scroll_into_view_if_needed()
        box = place.bounding_box()
        lanes = (one.split(":") for one in (place.get_attribute("data-lanes") or "").split("|"))
        top, height = next((float(y), float(h)) for name, y, h in lanes if name == lane)
        gutter = 158
        return box["x"] + gutter + share * (box["width"] - gutter), box["y"] + top + height / 2

    def click(self, lane: str, share: float, canvas: str = "step") -> None:
        self.page.mouse.click(*self.at(lane, share, canvas))
        self.clicks += 1
        self.page.wait_for_timeout(100)

    def until(self, is_true: Callable[[], bool]) -> None:
        """Wait until the frame shows what was asked for."""
        end = time.monotonic() + WAIT_MS / 1e3
        while not is_true():
            assert time.monotonic() < end
            self.page.wait_for_timeout(30)

    def key(self, name: str, is_true: Callable[[], bool]) -> None:
        """Press a key and wait for what it does."""
        self.page.keyboard.press(name)
        self.until(is_true)

    def lanes(self) -> list[str]:
        return str(self.frame.locator("#step").get_attribute("data-lanes")).split("|")

    def window(self, canvas: str = "step") -> tuple[float, float]:
        """Begin and end of what a canvas shows, ms."""
        place = self.frame.locator(f"#{canvas}")
        return float(place.get_attribute("data-from-ms")), float(place.get_attribute("data-to-ms"))

    def text(self, name: str) -> str:
        return str(self.frame.locator(f"#{name}").inner_text())

    def fact(self, name: str) -> str:
        return str(self.frame.locator("#facts div").filter(has_text=name).locator("dd").first.inner_text())

    def phases(self) -> list[list[str]]:
        """The rows of the table of phases."""
        rows: list[list[str]] = self.frame.locator("#phases").evaluate(
            "body => [...body.rows].map(row => [...row.cells].map(cell => cell.textContent))"
        )
        return rows


def test_a_pair_is_seen_and_the_trace_saved_in_two_clicks(visit: Visit, tmp_path: Path) -> None:
    visitor = visit()
    page = visitor.open("scenario")
    page.get_by_role("link", name="Timeline").click()
    page.wait_for_url("**/timeline?**")
    canvas = StepCanvas(visitor)
    canvas.click("3", 0.5)
    assert canvas.text("name") == "F&B pair" and "pipeline rank 3" in canvas.text("where")
    for _ in range(50):  # facts and phases are drawn one after the other
        begin, end = (number(canvas.fact(name)) for name in ("Begin", "End"))
        rows = canvas.phases()
        inside = [row for row in rows if not row[0].startswith(("pipeline send", "exposed"))]
        held = all(begin - 2e-3 <= number(row[3]) < number(row[4]) <= end + 2e-3 for row in inside)
        if held:
            break
        page.wait_for_timeout(100)
    streams = {row[0] for row in rows}
    assert {"compute stream", "communication stream", "hidden communication"} <= streams
    assert held, (begin, end, inside)
    with page.expect_download() as waiting:  # at once: what the click above changed must not take this one
        page.get_by_role("button", name="Perfetto trace").click()
        canvas.clicks += 1
    path = tmp_path / waiting.value.suggested_filename
    waiting.value.save_as(path)
    assert canvas.clicks <= 3
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    pairs = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("F&B")]
    assert any(
        e["ts"] / 1e3 == pytest.approx(begin, abs=1e-3)
        and (e["ts"] + e["dur"]) / 1e3 == pytest.approx(end, abs=1e-3)
        for e in pairs
    ), "the pair that was seen is in the trace"
    visitor.screenshot("timeline_pair")


@thorough
def test_over_an_action_the_page_shows_duration_begin_and_end(visit_strictly: Visit) -> None:
    visitor = visit_strictly()
    page = visitor.open("timeline")
    canvas = StepCanvas(visitor)
    page.mouse.move(*canvas.at("5", 0.4))
    canvas.frame.locator("#tip").wait_for()
    lines = canvas.text("tip").splitlines()
    told = next(found for line in lines if (found := TIMES.search(line)))
    length, begin, end = map(number, told.groups())
    assert end - begin == pytest.approx(length, abs=0.06) and length > 1
    assert lines[0] == "F&B pair" and "pipeline rank 5" in lines[1] and "micro-batch" in lines[1]
    canvas.click("5", 0.4)
    assert number(canvas.fact("Duration")) == length
    assert "hidden" in canvas.fact("Communication")
    assert visitor.outside == [] and visitor.blocked == []


def test_keys_pointer_and_every_event_on_one_walk_and_the_opened_action_outlives_a_reload(
    visit: Visit,
) -> None:
    visitor = visit()
    visitor.open("timeline")
    canvas = StepCanvas(visitor)
    whole = canvas.window()
    _the_keyboard_alone_is_enough(canvas, whole)
    _wheel_and_drag_move_time_and_never_the_page(canvas, whole)
    canvas.frame.locator("#step").focus()
    canvas.key("0", lambda: canvas.window() == whole)
    assert int(canvas.frame.locator("#step").get_attribute("data-events")) > 130_000
    few = canvas.lanes()
    canvas.frame.get_by_role("button", name="Every event").click()
    canvas.until(lambda: len(canvas.lanes()) > 5 * len(few))
    address = visitor.page.url
    canvas.click("1", 0.3)
    canvas.until(lambda: "pipeline rank 1" in canvas.text("where"))
    where = canvas.text("where")
    canvas.until(lambda: visitor.page.url != address)  # which holds the opened action
    visitor.page.reload()
    visitor.settled()
    assert StepCanvas(visitor).text("where") == where


def _the_keyboard_alone_is_enough(canvas: StepCanvas, whole: tuple[float, float]) -> None:
    canvas.frame.locator("#step").focus()
    before = canvas.text("where")
    canvas.key("ArrowRight", lambda: canvas.text("where") != before)
    assert canvas.text("where").partition(",")[0] in canvas.frame.locator("#said").text_content()
    canvas.key("ArrowDown", lambda: "pipeline rank 1" in canvas.text("where"))
    canvas.key("f", lambda: canvas.window()[1] - canvas.window()[0] < 0.1 * (whole[1] - whole[0]))
    fitted = canvas.window()
    canvas.page.keyboard.down("d")
    canvas.until(lambda: canvas.window()[0] > fitted[0])
    canvas.page.keyboard.up("d")
    canvas.key("0", lambda: canvas.window() == whole)
    canvas.page.keyboard.press("?")
    canvas.frame.get_by_role("dialog").wait_for()
    canvas.page.keyboard.press("Escape")
    canvas.frame.get_by_role("dialog").wait_for(state="hidden")
    path = canvas.frame.locator("#path")
    canvas.key("c", lambda: path.get_attribute("aria-pressed") == "true")
    canvas.key("c", lambda: path.get_attribute("aria-pressed") == "false")


def _wheel_and_drag_move_time_and_never_the_page(canvas: StepCanvas, whole: tuple[float, float]) -> None:
    page, (x, y) = canvas.page, canvas.at("2", 0.25)
    page.mouse.move(x, y)
    scrolled = page.evaluate("document.querySelector('[data-testid=stMain]').scrollTop")
    for _ in range(5):
        page.mouse.wheel(0, -200)
        page.wait_for_timeout(40)
    closer = canvas.window()
    assert closer[1] - closer[0] < 0.4 * (whole[1] - whole[0])
    under = closer[0] + 0.25 * (closer[1] - closer[0])
    assert under == pytest.approx(0.25 * whole[1], rel=0.02), "the time under the pointer stays there"
    page.mouse.down()
    page.mouse.move(x - 150, y, steps=5)
    page.mouse.up()
    canvas.until(lambda: canvas.window()[0] > closer[0])
    moved = canvas.window()
    assert moved[1] - moved[0] == pytest.approx(closer[1] - closer[0])
    assert page.evaluate("document.querySelector('[data-testid=stMain]').scrollTop") == scrolled
    page.mouse.dblclick(x, y)
    page.wait_for_timeout(200)
    fitted = canvas.window()
    begin, end = number(canvas.fact("Begin")), number(canvas.fact("End"))
    assert fitted[0] < begin < end < fitted[1] and end - begin > 0.7 * (fitted[1] - fitted[0])


@thorough
def test_a_search_counts_what_it_finds_and_enter_goes_through_it(visit: Visit) -> None:
    visitor = visit()
    page = visitor.open("timeline")
    canvas = StepCanvas(visitor)
    canvas.frame.locator("#step").focus()
    page.keyboard.press("/")
    page.keyboard.type("dispatch F mb 12")
    canvas.frame.locator("#found", has_text="found").wait_for()
    found = int(number(canvas.text("found").split()[0]))
    shown = []
    for _ in range(3):
        page.keyboard.press("Enter")
        page.wait_for_timeout(150)
        shown.append((canvas.text("name"), canvas.text("where"), number(canvas.fact("Begin"))))
    assert canvas.text("found") == f"3 of {found:,}" and found > 16
    assert all("dispatch F" in name and "micro-batch 12" in where for name, where, _ in shown)
    assert [begin for *_, begin in shown] == sorted({begin for *_, begin in shown})
    low, high = canvas.window("inside")
    assert low <= shown[-1][2] <= high
    page.keyboard.press("Escape")
    page.wait_for_timeout(150)
    assert canvas.text("found") == ""


@pytest.mark.parametrize("width", [1280, 390] if EVERY else [1280])
def test_the_timeline_can_be_read_in_both_themes(width: int, visit: Visit, axe: str | None) -> None:
    if axe is None:
        pytest.skip("axe-core is not installed (pip install axe-playwright-python)")
    visitor = visit()
    visitor.page.set_viewport_size({"width": width, "height": 800})
    page = visitor.open("timeline")
    canvas = StepCanvas(visitor)
    canvas.frame.locator("#listed summary").click()
    canvas.frame.locator("#exposed").click()
    canvas.frame.locator("#table-body tr").nth(1).wait_for()
    inner = next(frame for frame in page.frames if "component" in frame.url)
    inner.evaluate(axe)
    found = []
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        bright = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g)[0] > 128"
        until(inner, bright if theme == "light" else f"!({bright})")
        # The heading of the first level is the page's, outside of the frame.
        options = "{resultTypes: ['violations'], rules: {'page-has-heading-one': {enabled: false}}}"
        told = inner.evaluate(f"axe.run(document, {options})")
        found += [
            f"{theme}: {rule['id']}: {node['html'][:120]}"
            for rule in told["violations"]
            for node in rule["nodes"]
        ]
        visitor.screenshot(f"timeline_{width}_{theme}")
    page.emulate_media(color_scheme="light")
    assert found == []
    assert inner.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
