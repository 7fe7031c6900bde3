"""Pictures of every page of the dashboard into docs/screenshots: `make screenshots`.

    python -m lab.writers.screenshots [--whole] [--phone] [--out FOLDER] [PAGE ...]

Needs the dashboard extra, playwright and the system's Chromium. Every page in the light and the dark theme
(NAME.png, NAME-dark.png), 1280 x 800 (`--whole`: the page's whole height, to look at; `--phone`: 390 wide
too, as NAME-phone.png), each below 200 kB. A page without an entry in SHOTS is taken as it opens. Every page
has a session of its own and a limit of time; one that does not come in time is said and left out, and the
script ends with an error.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from PIL import Image
from playwright.sync_api import Error, sync_playwright

from moesim.app import server_command
from moesim.app.pages import PAGES

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "screenshots"
MOST_BYTES = 200_000
WAIT_MS = 60_000
LONG_MS = 240_000
"""For what a button starts: a search, a simulation of every GPU, the scoreboard."""
WIDE, HIGH = 1280, 800
PRESET = "deepseek-v3-2048xh800"
PHONE = 390
ENDINGS = {"light": "", "dark": "-dark", "phone": "-phone"}
"""What the name of a picture ends with, by the way it is taken."""

CHART = "[data-testid=stMain] :is(.js-plotly-plot, iframe[title*=timeline]):visible"
FIRST = f"{CHART}, [data-testid=stMain] :is([data-testid=stMetricValue], [data-testid=stButton]):visible"
"""What any page has when it shows something."""
QUIET = "document.querySelector('[data-testid=stApp]')?.dataset.testScriptState === 'notRunning'"


@dataclass(frozen=True, slots=True)
class Shot:
    """What makes a page show something: its link, a button, and what is there when it is ready."""

    query: dict[str, list[str] | str] = field(default_factory=dict)
    click: str | None = None
    ready: str = FIRST
    act: Callable[[Any], None] | None = None


def _fewer_sms(page: Any) -> None:
    """Move the slider of SMs from 20 to 14."""
    slider = page.get_by_test_id("stSlider").filter(has_text="Communication").first.get_by_role("slider")
    for _ in range(6):
        slider.press("ArrowLeft")
    page.get_by_test_id("stCode").filter(has_text="communication.sms=14").first.wait_for()


FAILURES = [
    "run.failures=llama3-16k-h100",
    "run.restart=megascale",
    'run.checkpoint={"interval":"1 h","storage":"llama3-tectonic"}',
]
SHOTS: dict[str, Shot] = {
    "scenario": Shot(ready=CHART),
    "result": Shot(ready="text=/P10 to P90: [0-9]/"),
    "timeline": Shot(ready=CHART),
    "topology": Shot(ready=CHART),
    "compare": Shot(
        {"preset": PRESET, "set": ["communication.sms=8"], "with": json.dumps([PRESET])}, ready=CHART
    ),
    "what_if": Shot(act=_fewer_sms, ready="[data-testid=stMain] .waterfalllayer:visible"),
    "planner": Shot(click="Search", ready=CHART),
    "run_cost": Shot({"preset": PRESET, "set": FAILURES}, ready=CHART),
    "calibration": Shot(ready=CHART),
    "evidence": Shot(ready=CHART),
    "sweep": Shot({"form": ['sweep.key2="parallel.ep"']}, click="Start the sweep", ready=CHART),
}


def main() -> None:
    """Take all of them, or those named on the command line."""
    parser = argparse.ArgumentParser(description="Pictures of the dashboard's pages.")
    parser.add_argument("pages", nargs="*", metavar="PAGE")
    parser.add_argument("--whole", action="store_true", help="the page's whole height")
    parser.add_argument("--phone", action="store_true", help="390 pixels wide too")
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    names = options.pages or [name for name, *_ in PAGES]
    chromium = shutil.which("chromium") or sys.exit("no Chromium here: apt-get install chromium")
    options.out.mkdir(parents=True, exist_ok=True)
    port = server_command.chosen_port(0)
    failed = []
    with server_command.running(port) as process, sync_playwright() as engine:
        if not server_command.wait_until_healthy(process, port):
            sys.exit("the server did not start")
        browser = engine.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for name in names:
            for way in ("light", "dark", "phone") if options.phone else ("light", "dark"):
                path = options.out / f"{name}{ENDINGS[way]}.png"
                try:
                    size = keep(picture(browser, server_command.url(port), name, way, options.whole), path)
                    print(f"{path.name} {size / 1000:.0f} kB", flush=True)
                except Error as error:  # of the browser: time is up, or the page broke
                    failed.append(path.name)
                    print(f"{path.name}: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        browser.close()
    sys.exit(f"not taken: {', '.join(failed)}" if failed else 0)


def picture(browser: Any, base: str, name: str, way: str, whole: bool) -> bytes:
    """One page in a session of its own, when it shows what it should; raises playwright's Error otherwise.

    `way`: a key of ENDINGS.
    """
    shot, wide = SHOTS.get(name, Shot()), PHONE if way == "phone" else WIDE
    context = browser.new_context(
        viewport={"width": wide, "height": HIGH},
        color_scheme="dark" if way == "dark" else "light",
        bypass_csp=True,
    )
    context.set_default_timeout(WAIT_MS)
    try:
        page = context.new_page()
        page.goto(f"{base}/{name}?{urlencode(shot.query, doseq=True)}")
        page.wait_for_function(
            f"{QUIET} && document.querySelectorAll('[data-testid=stMain] "
            "[data-testid=stElementContainer]').length > 1"
        )
        if shot.click is not None:
            ours = page.get_by_test_id("stMain").get_by_test_id("stButton")  # a table has buttons too
            button = ours.get_by_role("button", name=shot.click).first
            button.or_(page.locator(shot.ready)).first.wait_for()
            if button.is_visible():  # an answer that the server kept takes its place
                button.click()
        if shot.act is not None:
            shot.act(page)
        page.locator(shot.ready).first.wait_for(timeout=LONG_MS)
        page.wait_for_function(QUIET)
        if whole:
            high = page.evaluate("document.querySelector('[data-testid=stMainBlockContainer]').scrollHeight")
            page.set_viewport_size({"width": wide, "height": max(HIGH, int(high) + 20)})
        page.wait_for_timeout(2000)  # charts grow into their place, which nothing tells
        return bytes(page.screenshot())
    finally:
        context.close()


def keep(data: bytes, path: Path) -> int:
    """Write a picture with as many colours as fit below the limit; returns its bytes."""
    plain = Image.open(io.BytesIO(data)).convert("RGB")
    for colours in (0, 256, 128, 64, 32):  # 0: all of them
        buffer = io.BytesIO()
        (plain.quantize(colours) if colours else plain).save(buffer, "PNG", optimize=True)
        if buffer.tell() < MOST_BYTES:
            break
    path.write_bytes(buffer.getvalue())
    return buffer.tell()


if __name__ == "__main__":
    main()
