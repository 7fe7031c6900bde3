"""One browser and one dashboard for all tests in a browser."""

from __future__ import annotations

import importlib.resources
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from e2e.visitor import WAIT_MS, Visit, Visitor

FAILED = pytest.StashKey[bool]()

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
def base(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the dashboard, as the command prints it; at the end the command must stop cleanly."""
    folder = tmp_path_factory.mktemp("app")
    told = folder / "stderr"
    with told.open("w") as messages:
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "from moesim.cli import main; main()",
                "app",
                "--port",
                "0",
                "--no-browser",
            ],
            stderr=messages,
            stdout=messages,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "MOESIM_CACHE": str(folder / "kept"),
            },
        )
    try:
        end = time.monotonic() + 300.0
        while (address := re.search(r"http://127\.0\.0\.1:(\d+)", told.read_text())) is None:
            assert process.poll() is None and time.monotonic() < end, f"no address: {told.read_text()}"
            time.sleep(0.1)
        yield address[0]
        assert process.poll() is None, f"the server did not survive the tests: {told.read_text()}"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 0
        text = told.read_text()
        assert "stopped" in text and "Traceback" not in text, text
        from moesim.app import server_command

        assert not server_command.healthy(int(address[1]))
    finally:
        process.kill()


@pytest.fixture(scope="session")
def context(browser: Any) -> Iterator[Any]:
    """What a browser remembers, for all tests: the framework's scripts are then compiled once.

    Sessions are not shared: every page has a connection of its own, and with it a session of the server.
    """
    # The browser's own automation evaluates texts in the page, which its policy of content forbids.
    opened = browser.new_context(
        viewport={"width": 1280, "height": 800}, accept_downloads=True, bypass_csp=True
    )
    opened.set_default_timeout(WAIT_MS)
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def strict_context(browser: Any) -> Iterator[Any]:
    """The same with the policy of content in force, as it is for people."""
    opened = browser.new_context(viewport={"width": 1280, "height": 800})
    opened.set_default_timeout(WAIT_MS)
    yield opened
    opened.close()


@pytest.fixture
def visit_strictly(strict_context: Any, base: str) -> Iterator[Visit]:
    """Makes visitors for whom the policy of content is in force."""
    opened: list[Visitor] = []

    def one() -> Visitor:
        opened.append(Visitor(strict_context, base))
        return opened[-1]

    yield one
    for visitor in opened:
        visitor.page.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep whether a test failed, for the fixture that closes its visitors."""
    report = yield
    if report.when == "call":
        item.stash[FAILED] = report.failed
    return report


@pytest.fixture
def visit(context: Any, base: str, request: pytest.FixtureRequest) -> Iterator[Visit]:
    """Makes visitors with sessions of their own; at the end says what a failed test saw, and closes them."""
    opened: list[Visitor] = []

    def one() -> Visitor:
        opened.append(Visitor(context, base))
        return opened[-1]

    yield one
    for visitor in opened:
        if request.node.stash.get(FAILED, False):
            print(visitor.page.url, visitor.seen(), sep="\n", file=sys.stderr)
        visitor.page.close()


@pytest.fixture(scope="session")
def axe() -> str | None:
    """The script of axe-core, which a test package carries; None where it is not installed."""
    if importlib.util.find_spec("axe_playwright_python") is None:
        return None
    return importlib.resources.files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8")
