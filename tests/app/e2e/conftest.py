"""A real server and a real Chromium; every test is skipped, with a reason, where one of them is missing."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

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
