"""The dashboard in a real browser: pages, changes, downloads, links, two people at once, hostile files."""

from __future__ import annotations

import base64
import gzip
import http.client
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("streamlit", reason="the dashboard extra is not installed")

from moesim.app.main import PAGES

ARTEFACTS = Path(__file__).parent / "artefacts"
"""Screenshots of the last run; ignored by git, never compared."""

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)
WAIT_MS = 90_000
"""As long as anything may take on a machine that others use too."""


def chromium() -> str | None:
    """The system's browser."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """One browser for all tests."""
    pytest.importorskip("streamlit", reason="the dashboard extra is not installed")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = chromium()
    if path is None:
        pytest.skip("no Chromium on this machine (apt-get install chromium)")
    with playwright.sync_playwright() as engine:
        opened = engine.chromium.launch(executable_path=path, args=list(FLAGS))
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def base(browser: Any) -> Iterator[str]:
    """Address of a server that is started as `moesim app` starts it."""
    from moesim.app import server

    port = server.chosen_port(0)
    with server.running(port) as process:
        assert server.wait_until_healthy(process, port, 300.0), "the server did not start"
        yield server.url(port)
        assert process.poll() is None, "the server did not survive the tests"


class Visitor:
    """One browser session: its page, and what it asked for outside this machine."""

    def __init__(self, browser: Any, base: str) -> None:
        self.context = browser.new_context(viewport={"width": 1280, "height": 800}, accept_downloads=True)
        self.context.set_default_timeout(WAIT_MS)
        self.page, self.base = self.context.new_page(), base
        self.outside: list[str] = []
        self.page.on("request", self._asked)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith((self.base, self.base.replace("http", "ws"), "data:", "blob:")):
            self.outside.append(request.url)

    def open(self, address: str) -> Any:
        """Open an address below the server and wait until the page's script has run."""
        self.page.goto(f"{self.base}/{address}")
        self.settled()
        return self.page

    def settled(self) -> None:
        """Wait until the script has run to its end."""
        self.page.wait_for_function(
            "document.querySelector('[data-testid=stApp]')?.dataset.testScriptState === 'notRunning'"
            " && document.querySelectorAll('[data-testid=stMain] "
            "[data-testid=stElementContainer]').length > 1"
        )

    def metric(self, label: str) -> Any:
        """The tile with a label."""
        tile = self.page.get_by_test_id("stMetric").filter(has_text=label).first
        return tile.get_by_test_id("stMetricValue")

    def screenshot(self, name: str) -> None:
        """Keep a picture beside the tests."""
        ARTEFACTS.mkdir(exist_ok=True)
        self.page.screenshot(path=ARTEFACTS / f"{name}.png")


@pytest.fixture
def visit(browser: Any, base: str) -> Iterator[Callable[[], Visitor]]:
    """Makes visitors, each with cookies of its own; closes them at the end."""
    opened: list[Visitor] = []

    def one() -> Visitor:
        opened.append(Visitor(browser, base))
        return opened[-1]

    yield one
    for visitor in opened:
        visitor.context.close()


Visit = Callable[[], Visitor]
SENTENCE = "[data-testid=stAlertContentError] [data-testid=stMarkdownContainer]"
FEWER_SMS = "?preset=deepseek-v3-2048xh800&set=communication.sms%3D8"


@pytest.mark.parametrize("name", [page[0] for page in PAGES])
def test_every_page_opens_and_asks_nobody_else(name: str, visit: Visit) -> None:
    visitor = visit()
    page = visitor.open(name)
    # Compare, Planner and Evidence wait for a button or compute first: they show that much at once.
    first = ".js-plotly-plot:visible, [data-testid=stMetric]:visible, [data-testid=stButton]:visible"
    page.get_by_test_id("stMain").locator(first).first.wait_for()
    assert page.get_by_test_id("stException").count() == 0
    assert page.locator("[data-testid=stAlertContentError]").count() == 0
    assert "Traceback" not in page.content()
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "scrolls sideways"
    visitor.screenshot(name)
    assert visitor.outside == []


def test_a_changed_value_changes_the_number_and_the_link_brings_it_to_somebody_else(visit: Visit) -> None:
    first, second = visit(), visit()
    page = first.open("result")
    before = first.metric("Step time").inner_text()
    page = first.open("scenario")
    field = page.get_by_label("Communication SMs", exact=False).first
    field.wait_for()
    first.open(f"result{FEWER_SMS}")
    changed = first.metric("Step time").inner_text()
    assert changed != before and re.match(r"\d+\.\d+ s", changed)
    # Another session, opened later by the link alone, sees the same; a third one without it does not.
    second.open(f"result{FEWER_SMS}")
    assert second.metric("Step time").inner_text() == changed
    assert "communication.sms" in second.page.url
    third = visit()
    third.open("result")
    assert third.metric("Step time").inner_text() == before


def test_a_failure_rate_chosen_in_the_sidebar_costs_days_and_stays_in_the_address(visit: Visit) -> None:
    visitor = visit()
    page = visitor.open("run_cost")
    before = visitor.metric("Days").inner_text()
    box = page.get_by_test_id("stSelectbox").filter(has_text="Failure rate as at")
    visitor.settled()
    option = page.get_by_role("option", name="llama3-16k-h100")
    timed_out = pytest.importorskip("playwright.sync_api").TimeoutError
    for _ in range(6):  # a list that opens while the page still changes closes again
        box.locator("input").click()
        page.keyboard.type("llama3-16k")
        try:
            option.wait_for(timeout=8_000)
            option.click(timeout=8_000)
            break
        except timed_out:
            page.keyboard.press("Escape")
    page.wait_for_function("location.search.includes('llama3-16k-h100')")
    visitor.settled()
    page.get_by_text("Best interval").wait_for()
    assert float(visitor.metric("Days").inner_text()) > float(before)
    visitor.screenshot("run_cost_with_failures")


def test_what_is_downloaded_is_what_was_shown(visit: Visit, tmp_path: Path) -> None:
    visitor = visit()
    page = visitor.open("run_cost")
    days = visitor.metric("Days").inner_text()
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Result with the run (JSON)").click()
    waiting.value.save_as(tmp_path / "r.json")
    assert re.fullmatch(r"[A-Za-z0-9.-]+\.json", waiting.value.suggested_filename)
    result = json.loads((tmp_path / "r.json").read_text("utf-8"))
    assert f"{result['run']['report']['days']['p50']:,.1f}" == days


def test_two_sessions_at_once_do_not_mix(visit: Visit) -> None:
    pair = [visit(), visit()]
    addresses = ["result?preset=deepseek-v3-2048xh800&set=communication.sms%3D32", "result"]
    for visitor, address in zip(pair, addresses, strict=True):
        visitor.page.goto(f"{visitor.base}/{address}")
    shown = []
    for visitor in pair:
        visitor.settled()
        shown.append(visitor.metric("Step time").inner_text())
    assert shown[0] != shown[1]
    assert "communication.sms" not in pair[1].page.url


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("huge.yaml", b"x" * 3_900_000),
        ("bomb.yaml.gz", gzip.compress(b"\0" * 100_000_000)),
        ("alias.yaml", b"a: &a [1, 2]\nb: [*a, *a]\n"),
        ("binary.json", bytes(range(256))),
    ],
)
def test_a_hostile_upload_is_refused_in_one_sentence(name: str, data: bytes, visit: Visit) -> None:
    visitor = visit()
    page = visitor.open("calibration")
    # The browser's own filter by file type is advice only: the file is handed over all the same.
    page.locator("input[type=file]").first.set_input_files(
        {"name": name, "mimeType": "application/octet-stream", "buffer": data}
    )
    message = page.locator(SENTENCE).first
    message.wait_for()
    text = message.inner_text()
    assert name in text and "Traceback" not in text and text.count("\n") == 0
    visitor.open("calibration")  # and the server goes on


@pytest.mark.parametrize("value", ["/etc/passwd", "../../../etc/passwd.yaml", "%7Etmp/x.csv"])
@pytest.mark.parametrize("key", ["model", "profile", "schedule", "cluster"])
def test_a_path_in_a_link_is_refused_in_one_sentence(key: str, value: str, visit: Visit) -> None:
    visitor = visit()
    visitor.page.goto(f"{visitor.base}/result?preset=deepseek-v3-2048xh800&set={key}%3D{value}")
    message = visitor.page.locator(SENTENCE).first
    message.wait_for()
    text = message.inner_text()
    assert "root:" not in text and "Traceback" not in text and "file" in text


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


def test_the_command_starts_prints_its_address_and_stops_cleanly(browser: Any) -> None:
    import signal

    process = subprocess.Popen(
        [sys.executable, "-c", "from moesim.cli import main; main()", "app", "--port", "0", "--no-browser"],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert process.stderr is not None and process.stdout is not None
        said = ""
        while (address := re.search(r"http://127\.0\.0\.1:\d+", said)) is None:
            line = process.stderr.readline()
            assert line, f"it ended without an address: {said}"
            said += line
        page = browser.new_page()
        page.set_default_timeout(WAIT_MS)
        page.goto(address[0])
        page.get_by_test_id("stMetric").first.wait_for()
        page.close()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0 and "stopped" in err and "Traceback" not in err + out
        from moesim.app import server

        assert not server.healthy(int(address[0].rsplit(":", 1)[1]))
    finally:
        process.kill()
