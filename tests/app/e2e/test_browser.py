"""The dashboard in a real browser: pages, changes, downloads, links, two people at once, hostile files."""

from __future__ import annotations

import base64
import gzip
import http.client
import json
import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

pytest.importorskip("streamlit", reason="the dashboard extra is not installed")

from e2e.visitor import COVERED, EVERY, Visit, findings, thorough
from moesim.app.pages import PAGES
from moesim.simulator.predict.result import Result

SENTENCE = "[data-testid=stAlertContentError] [data-testid=stMarkdownContainer]"
FEWER_SMS = "?preset=deepseek-v3-2048xh800&set=communication.sms%3D8"
NAMES = [page[0] for page in PAGES] if EVERY else ["start", "scenario", "result", "planner", "compare"]


@pytest.mark.parametrize("name", NAMES)
def test_every_page_opens_can_be_read_and_asks_nobody_else(
    name: str, visit_strictly: Visit, axe: str | None
) -> None:
    visitor = visit_strictly()
    page = visitor.open(name)
    # Compare and Planner wait for a button first: they show that much at once.
    first = ".js-plotly-plot:visible, [data-testid=stMetric]:visible, [data-testid=stButton]:visible"
    page.get_by_test_id("stMain").locator(first).first.wait_for()
    assert page.get_by_test_id("stException").count() == 0
    assert page.get_by_role("dialog").count() == 0, "the framework does not know this page"
    assert page.locator("[data-testid=stAlertContentError]").count() == 0
    assert "Traceback" not in page.content()
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "scrolls sideways"
    assert page.evaluate(COVERED) == 0, "a toolbar covers a legend"
    visitor.screenshot(name)
    if axe is not None:
        assert findings(page, axe) == []
    assert visitor.outside == [] and visitor.blocked == []


UNLIKE = "&set=batch.sequences%3D4096&set=recompute%3Dnone&set=cluster.nodes%3D128"


@thorough
@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("scenario?preset=deepseek-v3-2048xh800&set=parallel.ep%3D48", "Set parallel.ep = 32"),
        (
            f"compare?preset=deepseek-v3-2048xh800{UNLIKE}&with=%5B%22deepseek-v3-2048xh800%22%5D",
            "Not the same",
        ),
    ],
)
def test_what_is_wrong_can_be_read_too(address: str, shown: str, visit: Visit, axe: str | None) -> None:
    if axe is None:
        pytest.skip("axe-core is not installed (pip install axe-playwright-python)")
    page = visit().open(address)
    page.get_by_text(shown).first.wait_for()
    assert findings(page, axe) == []


RULES = """() => {
    const own = [...document.styleSheets].find(
        sheet => sheet.ownerNode.textContent.includes('st-key-roofline'));
    const rules = list => [...list].flatMap(
        rule => rule.selectorText ? [rule.selectorText] : rules(rule.cssRules));
    return rules(own.cssRules);
}"""
"""Selectors of the dashboard's own style sheet."""


@thorough
def test_the_style_of_every_page_applies_to_something(visit: Visit) -> None:
    page = visit().open("result?preset=deepseek-v3-2048xh800&set=communication.sms%3D8")
    page.get_by_role("button", name="Simulate single changes").first.wait_for()
    rules = page.evaluate(RULES)
    plain = [re.sub(r":focus-visible|:not\(:disabled\)|::before", "", rule) for rule in rules]
    of_others = (
        "st-key-roofline",
        "st-key-timeline",
        "st-key-a-and-b",
        "st-key-progress-line",
        "stDialog",
        "stMultiSelect",
        "stDataFrame",
        "stMarkdownBadge",
        "js-plotly-plot",
        " li",
    )
    unused = [
        rule
        for rule in plain
        if not any(part in rule for part in of_others) and not page.locator(rule).count()
    ]
    assert len(rules) >= 8 and unused == []


def test_what_is_downloaded_is_what_was_shown_and_opens(visit: Visit, tmp_path: Path) -> None:
    visitor = visit()
    page = visitor.open(f"result{FEWER_SMS}")
    shown = visitor.metric("Step time").inner_text()
    files = {}  # tests/app/test_downloads.py reads every kind, without a browser
    for name in ("Report (HTML)", "Result (JSON)", "Trace (Perfetto)"):
        with page.expect_download() as waiting:
            page.get_by_role("button", name=name).click()
        suggested = waiting.value.suggested_filename
        assert re.fullmatch(r"[A-Za-z0-9-]+(\.[a-z]+)+", suggested)
        files[name] = tmp_path / suggested
        waiting.value.save_as(files[name])
    result = Result.model_validate_json(files["Result (JSON)"].read_text("utf-8"))
    assert f"{result.step.time_s:.3f} s" == shown
    trace = json.loads(gzip.decompress(files["Trace (Perfetto)"].read_bytes()))
    last_us = max(event["ts"] + event["dur"] for event in trace["traceEvents"] if event["ph"] == "X")
    assert last_us == pytest.approx(1e6 * result.step.time_s)
    visitor.outside.clear()
    page.goto(files["Report (HTML)"].as_uri())  # from the disk, without the server
    assert shown in page.inner_text("body")
    assert [address for address in visitor.outside if not address.startswith("file:")] == []


MARKUP = "![x](http://127.0.0.1:9/p.png) [click](http://127.0.0.1:9/) http://127.0.0.1:9/ $x$ :red[y]"


@pytest.mark.parametrize(
    "address",
    [
        "result?" + urlencode({"preset": MARKUP}),
        "topology?" + urlencode({"preset": "deepseek-v3-2048xh800", "set": f"cluster.title={MARKUP[:28]}"}),
    ],
)
def test_text_from_a_link_is_shown_as_it_is_and_fetches_nothing(address: str, visit_strictly: Visit) -> None:
    visitor = visit_strictly()
    page = visitor.open(address)
    page.get_by_test_id("stMain").get_by_text("![x]").first.wait_for()
    assert page.locator("[data-testid=stMain] img[src*='127.0.0.1:9']").count() == 0
    assert page.locator("a[href*='127.0.0.1:9']").count() == 0
    assert visitor.outside == [] and visitor.blocked == []


def test_another_site_cannot_frame_the_dashboard(browser: Any, base: str) -> None:
    page = browser.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.set_content(f"<iframe src='{base}/_stcore/health'></iframe>")
    end = time.monotonic() + 10.0
    while not any("frame-ancestors" in text for text in said) and time.monotonic() < end:
        page.wait_for_timeout(50)
    assert any("frame-ancestors" in text for text in said)
    page.close()


HOSTILE = {
    "bomb.yaml.gz": gzip.compress(b"\0" * 100_000_000, compresslevel=1),
    "binary.json": bytes(range(256)),
}
"""Every kind of hostile file: tests/app/test_uploads.py, without a browser."""


def test_hostile_uploads_are_refused_in_one_sentence_each(visit: Visit) -> None:
    visitor = visit()
    page = visitor.open("calibration")
    for name, data in HOSTILE.items():
        # The browser's own filter by file type is advice only: the file is handed over all the same.
        page.locator("input[type=file]").first.set_input_files(
            {"name": name, "mimeType": "application/octet-stream", "buffer": data}
        )
        message = page.locator(SENTENCE).filter(has_text=name).first
        message.wait_for()
        text = message.inner_text()
        assert "Traceback" not in text and text.count("\n") == 0
        visitor.settled()
    assert page.get_by_test_id("stException").count() == 0
    assert server_goes_on(visitor.base)


def server_goes_on(base: str) -> bool:
    from moesim.app import server_command

    return server_command.healthy(int(base.rsplit(":", 1)[1]))


def handshake(base: str, host: str, origin: str) -> int:
    """Status of a request to open the page's WebSocket; 101 is a yes."""
    address = base.removeprefix("http://")
    headers = {
        "Host": host,
        "Origin": origin,
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": base64.b64encode(b"0123456789abcdef").decode(),
    }
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request("GET", "/_stcore/stream", headers=headers)
    status = connection.getresponse().status
    connection.close()
    return status


def test_other_sites_and_other_names_get_no_connection(base: str) -> None:
    host = base.removeprefix("http://")
    assert handshake(base, host, base) == 101
    assert handshake(base, host, "http://evil.example") != 101
    assert handshake(base, "evil.example", "http://evil.example") != 101  # DNS rebinding


def test_an_upload_without_a_session_is_refused(base: str) -> None:
    connection = http.client.HTTPConnection(base.removeprefix("http://"), timeout=60)
    connection.request("PUT", "/_stcore/upload_file/nobody/nothing", body=b"x")
    assert connection.getresponse().status in (400, 403, 404, 405)
    connection.close()
