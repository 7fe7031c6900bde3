"""The page Trace in a real browser: a trace beside a prediction, its time lines, an upload that stops.

A file of its own: tests of one file share a visitor's cookies, and so the jobs in the tray.
"""

from __future__ import annotations

import gzip
import http.client
import json
import re
from pathlib import Path
from urllib.parse import urlencode

from app_sessions import HOME, JOB
from trace_files import launched, step, write

from e2e.visitor import Clicks, Visit, findings

SMALL = f"?{urlencode({'preset': HOME, 'set': JOB}, doseq=True)}"
HOSTILE = "<img src=x onerror=document.title=1>"


def test_a_trace_is_set_beside_the_prediction_in_three_clicks(
    visit: Visit, axe: str | None, tmp_path: Path
) -> None:
    path = write(tmp_path / "rank0.json", [*step(), *launched(HOSTILE, 100, 110, 5, 5)])
    visitor, clicks = visit(), Clicks()
    page = visitor.open(f"trace{SMALL}")
    clicks.upload(page, page.get_by_role("button", name="Upload", exact=True), str(path))
    clicks.on(page.get_by_role("button", name="Read the trace", exact=True))
    page.get_by_text("the sum of the bars").wait_for()
    frame = page.frame_locator("iframe[title*=timeline]").first
    canvas = frame.locator("#step[data-events]")
    canvas.wait_for()
    lanes = str(canvas.get_attribute("data-lanes"))
    assert lanes.startswith("7:") and "compu:" in lanes
    assert frame.locator("#path").is_hidden() and frame.locator("#inside").is_hidden()
    frame.locator("#search").fill("all_reduce")
    frame.locator("#found").get_by_text("found").wait_for()
    frame.locator("#search").press("Enter")
    frame.locator("#name").get_by_text("ncclDevKernel_AllReduce").wait_for()
    assert "measured, stream 9, all_reduce" in frame.locator("#where").inner_text()
    frame.locator("#search").fill("onerror")
    frame.locator("#search").press("Enter")
    frame.locator("#name").get_by_text(HOSTILE).wait_for()
    assert page.title() != "1", "no name of a kernel runs"
    with page.expect_download() as saved:
        clicks.on(page.get_by_role("button", name="Perfetto, both steps"))
    events = json.loads(gzip.decompress(Path(saved.value.path()).read_bytes()))["traceEvents"]
    assert {event["pid"] for event in events} == {1, 2}
    assert clicks.count == 3
    visitor.settled()
    visitor.screenshot("trace")
    assert visitor.outside == [] and visitor.blocked == []
    if axe is not None:
        assert findings(page, axe) == []
    page.set_viewport_size({"width": 390, "height": 800})
    page.wait_for_timeout(500)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.reload()
    page.get_by_text("the sum of the bars").wait_for()


def test_a_large_file_goes_to_disk_and_one_that_stops_half_way_leaves_nothing(
    visit: Visit, base: str, tmp_path: Path
) -> None:
    filler = [*step(), {"ph": "i", "name": "x" * 6_000_000, "ts": 1, "pid": 1, "tid": 1}]
    path = write(tmp_path / "rank0.json", filler)
    page = visit().open("trace")
    page.locator("input[type=file]").first.set_input_files(str(path))
    page.get_by_role("button", name="Read the trace", exact=True).click()
    page.get_by_text(re.compile("ProfilerStep#3 of rank 0")).wait_for()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if request.method == "PUT" else None)
    page.locator("input[type=file]").first.set_input_files(str(path))
    page.get_by_role("button", name="Read the trace", exact=True).wait_for()
    cookies = {one["name"]: one["value"] for one in page.context.cookies(base)}
    token = next(value for name, value in cookies.items() if "xsrf" in name.lower())
    connection = http.client.HTTPConnection(base.removeprefix("http://"), timeout=60)
    connection.putrequest("PUT", asked[0].removeprefix(base))
    for name, value in {
        "Content-Type": "multipart/form-data; boundary=end",
        "Content-Length": "5000000",
        "X-Xsrftoken": token,
        "Cookie": "; ".join(f"{key}={value}" for key, value in cookies.items()),
    }.items():
        connection.putheader(name, value)
    connection.endheaders()
    connection.send(b'--end\r\nContent-Disposition: form-data; name="file"; filename="a.json"\r\n\r\n{')
    connection.close()
    page.wait_for_timeout(500)
    page.get_by_role("button", name="Read the trace", exact=True).click()
    page.get_by_text(re.compile("ProfilerStep#3 of rank 0")).wait_for()
    assert page.get_by_test_id("stException").count() == 0
