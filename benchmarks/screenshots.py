"""Pictures of every page of the dashboard into docs/screenshots: `make screenshots`.

Needs the dashboard extra, playwright and the system's Chromium. 1280 x 800, each below 250 kB.
"""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from moesim.app import server
from moesim.app.main import PAGES

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "screenshots"
MOST_BYTES = 250_000
WAIT_MS = 90_000
QUERIES = {"run_cost": "?preset=deepseek-v3-2048xh800&set=run.failures%3Dllama3-16k-h100"
           "&set=run.restart%3Dmegascale&set=run.checkpoint%3D%7B%22interval%22%3A%221+h%22%2C"
           "%22storage%22%3A%22llama3-tectonic%22%7D"}  # fmt: skip
"""What a page shows, where its first view would be empty."""
CLICKS = {"planner": "Search", "compare": "Compare"}
"""Buttons (the start of their name) that make a page show something."""


def main() -> None:
    """Take all of them, or those named on the command line."""
    wanted = sys.argv[1:] or [name for name, *_ in PAGES]
    chromium = shutil.which("chromium") or sys.exit("no Chromium here: apt-get install chromium")
    FOLDER.mkdir(parents=True, exist_ok=True)
    port = server.chosen_port(0)
    with server.running(port) as process, sync_playwright() as engine:
        if not server.wait_until_healthy(process, port):
            sys.exit("the server did not start")
        browser = engine.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.set_default_timeout(WAIT_MS)
        for name in wanted:
            page.goto(f"{server.url(port)}/{name}{QUERIES.get(name, '')}")
            settle(page, name)
            size = keep(page.screenshot(), FOLDER / f"{name}.png")
            print(f"{name}.png {size / 1000:.0f} kB")
        browser.close()


def settle(page: Any, name: str) -> None:
    """Wait for the page's first chart, after the click that it needs."""
    main_ = page.get_by_test_id("stMain")
    main_.get_by_test_id("stElementContainer").nth(1).wait_for()
    if name in CLICKS:
        button = main_.get_by_role("button", name=CLICKS[name]).first
        if button.count():
            button.click()
    main_.locator(".js-plotly-plot:visible").first.wait_for()
    page.wait_for_function(
        "document.querySelector('[data-testid=stApp]').dataset.testScriptState === 'notRunning'"
    )
    page.wait_for_timeout(2500)  # charts grow into their place


def keep(data: bytes, path: Path) -> int:
    """Write a picture with as many colours as fit below the limit; returns its bytes."""
    for colours in (256, 128, 64, 32):
        buffer = io.BytesIO()
        Image.open(io.BytesIO(data)).convert("RGB").quantize(colours).save(buffer, "PNG", optimize=True)
        if buffer.tell() < MOST_BYTES:
            break
    path.write_bytes(buffer.getvalue())
    return buffer.tell()


if __name__ == "__main__":
    main()
