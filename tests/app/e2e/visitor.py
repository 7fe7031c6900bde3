"""One person in a browser, as the tests use them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EVERY = bool(os.environ.get("MOESIM_EVERY_PAGE"))
"""Whether every page is tried in every way (`make proof`), and not only what each change has to pass."""

thorough = pytest.mark.skipif(
    not EVERY, reason="a browser test of `make proof`: MOESIM_EVERY_PAGE is not set"
)
"""Marks a test in a browser that is too long for every change."""

ARTEFACTS = Path(__file__).parent / "artefacts"
"""Screenshots of the last run; ignored by git, never compared."""

WAIT_MS = 90_000
"""As long as anything may take on a machine that others use too."""


def until(page: Any, expression: str) -> None:
    """Wait until an expression is true in the page, by asking: a page may not evaluate texts by itself."""
    end = time.monotonic() + WAIT_MS / 1e3
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"never true: {expression}"
        page.wait_for_timeout(50)


class Visitor:
    """One browser session: its page, and what it asked for outside this machine."""

    def __init__(self, context: Any, base: str) -> None:
        self.page, self.base = context.new_page(), base
        self.outside: list[str] = []
        self.blocked: list[str] = []
        self.page.on("request", self._asked)
        self.page.on("console", self._said)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith((self.base, self.base.replace("http", "ws"), "data:", "blob:")):
            self.outside.append(request.url)

    def _said(self, message: Any) -> None:
        if "Content Security Policy" in message.text:
            self.blocked.append(message.text)

    def open(self, address: str) -> Any:
        """Open an address below the server and wait until the page's script has run."""
        self.page.goto(f"{self.base}/{address}")
        self.settled()
        return self.page

    def settled(self) -> None:
        """Wait until the script has run to its end."""
        until(
            self.page,
            "document.querySelector('[data-testid=stApp]')?.dataset.testScriptState === 'notRunning'"
            " && document.querySelectorAll('[data-testid=stMain] "
            "[data-testid=stElementContainer]').length > 1",
        )

    def metric(self, label: str) -> Any:
        """The tile with a label."""
        tile = self.page.get_by_test_id("stMetric").filter(has_text=label).first
        return tile.get_by_test_id("stMetricValue")

    def seen(self) -> str:
        """The state of the page's script and the text on the page, for the report of a failed test."""
        return str(
            self.page.evaluate(
                "(document.querySelector('[data-testid=stApp]')?.dataset.testScriptState || 'no page')"
                " + ': ' + document.body.innerText.slice(0, 4000)"
            )
        )

    def screenshot(self, name: str) -> None:
        """Keep a picture beside the tests."""
        ARTEFACTS.mkdir(exist_ok=True)
        self.page.screenshot(path=ARTEFACTS / f"{name}.png")


Visit = Callable[[], Visitor]


SERIOUS = ("serious", "critical")


def findings(page: Any, axe: str) -> list[str]:
    """What axe-core has against a page, where it is serious or critical; in the dark theme, its contrast."""
    page.evaluate(axe)
    found = []
    for theme, rules in (("light", ""), ("dark", "runOnly: ['color-contrast'], ")):
        page.emulate_media(color_scheme=theme)
        app = "document.querySelector('[data-testid=stApp]')"
        until(page, f"getComputedStyle({app}).colorScheme === '{theme}'")
        page.wait_for_timeout(300)  # colours fade over
        told = page.evaluate(f"axe.run(document, {{{rules}resultTypes: ['violations']}})")
        found += [
            f"{theme}: {rule['id']}: {node['html'][:120]}: {node['failureSummary'][:160]}"
            for rule in told["violations"]
            if rule["impact"] in SERIOUS
            for node in rule["nodes"]
        ]
    page.emulate_media(color_scheme="light")
    return found


SHIFTS = """
window.shifts = [];
window.changed = 0;
new MutationObserver(() => window.changed = performance.now()).observe(
    document, {childList: true, subtree: true, characterData: true});
new PerformanceObserver(list => list.getEntries().forEach(entry => {
    if (!entry.hadRecentInput) window.shifts.push([entry.startTime, entry.value]);
})).observe({type: 'layout-shift', buffered: true});
const asking = setInterval(() => {
    const number = '[data-testid=stMain] :is([data-testid=stMetricValue], .js-plotly-plot)';
    if (!document.querySelector(number)) return;
    window.firstNumber = performance.now();
    clearInterval(asking);
}, 20);
"""
"""Notes every shift of the layout, the last change of the page, and when its first number or chart stands."""


def quiet(page: Any, still_ms: int = 700, most_ms: int = 3000) -> None:
    """Wait until nothing has changed on a page with SHIFTS for a while, or for the longest time."""
    end = time.monotonic() + most_ms / 1e3
    while time.monotonic() < end and page.evaluate(f"performance.now() - window.changed < {still_ms}"):
        page.wait_for_timeout(50)


SHIFTED = "window.shifts.filter(one => one[0] > window.firstNumber).reduce((sum, one) => sum + one[1], 0)"
"""Cumulative layout shift since the first number."""


COVERED = """() => [...document.querySelectorAll('.js-plotly-plot')].filter(chart => {
    const legend = chart.querySelector('.legend'), bar = chart.querySelector('.modebar');
    if (!chart.checkVisibility() || !legend || !bar) return false;
    const a = legend.getBoundingClientRect(), b = bar.getBoundingClientRect();
    return a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
}).length"""
"""Charts whose toolbar lies over their legend."""


class Clicks:
    """Counts what a person clicks; typing into a field that has the focus is no click."""

    def __init__(self) -> None:
        self.count = 0

    def on(self, place: Any) -> None:
        """Click one thing, once it is there."""
        place.first.click()
        self.count += 1

    def upload(self, page: Any, place: Any, path: str) -> None:
        """Choose a file: one click opens the browser's dialogue, in which a file is chosen."""
        with page.expect_file_chooser() as chooser:
            self.on(place)
        chooser.value.set_files(path)
