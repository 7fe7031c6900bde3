"""Ten people at once on this machine: time of an interaction, errors, memory over many interactions.

    python -m lab.benchmarks.dashboard_load [--people 10] [--each 6] [--long 200] [--browser] [--fresh 3]

Every person opens the page What-if and moves its sliders of communication SMs (which simulates) and of the
price (which does not) in turn, nobody a value that somebody had before. People are clients of the WebSocket
protocol (`streamlit_client`): they draw nothing, so that the machine's cores are the server's. `--browser`
adds one person in the system's Chromium, alone, who also goes through all pages twice; `--fresh` lets
everybody open all pages of a server on which nothing was drawn yet, so many times. Bounded: people x each
interactions, then `--long` of one person with the memory of the server before and after. On 127.0.0.1, with
nothing kept from earlier runs.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab.benchmarks.streamlit_client import Client
from moesim.app import server_command
from moesim.app.pages import PAGES

KINDS = {"step": ("Communication", "communication.sms="), "price": ("Price", "price_per_gpu_hour=")}
"""Kind of interaction: start of the slider's label, what the page then says was changed."""
PRICES = [round(0.05 * n, 2) for n in range(2, 240) if n != 40]
BROWSER_MS = 60_000
OTHER_TITLE = "old => {const h = document.querySelector('h1'); return h && h.innerText !== old}"
ALL_DRAWN = (
    "() => document.querySelector('[data-testid=stApp]').dataset.testScriptState === 'notRunning'"
    " && !document.querySelector('[data-testid=stMain] [data-stale=true]')"
)


class Person:
    """One session on the page What-if: the seconds of every interaction, and what went wrong."""

    def __init__(self, base: str, values: Iterator[int], first: int) -> None:
        """Nothing is opened yet; numbers of SMs are taken from `values`, prices from the `first` on."""
        self.client, self.values = Client(base, "what_if"), values
        self.prices = itertools.cycle(PRICES[first:] + PRICES[:first])
        self.seconds: dict[str, list[float]] = {"open": [], "step": [], "price": []}
        self.errors: list[str] = []

    async def work(self, each: int) -> None:
        """Open the page where it is not, and move the two sliders in turn."""
        try:
            if not self.seconds["open"]:
                began = time.perf_counter()
                await self.client.open()
                self.seconds["open"].append(time.perf_counter() - began)
                self._check("Step time" in self.client.metrics, "no numbers")
            for turn in range(each):
                await self._move("price" if turn % 2 else "step")
        except Exception as error:  # every failure counts and is printed, whatever it is
            self.errors.append(f"{type(error).__name__}: {error}")

    async def _move(self, kind: str) -> None:
        label, says = KINDS[kind]
        value = next(self.prices) if kind == "price" else float(next(self.values))
        began = time.perf_counter()
        await self.client.slide(label, value)
        self.seconds[kind].append(time.perf_counter() - began)
        self._check(any(f"{says}" in text for text in self.client.codes), f"{says}{value} is not shown")

    def _check(self, fine: bool, text: str) -> None:
        self.errors += self.client.errors + ([] if fine else [text])
        self.client.errors.clear()


async def crowd(base: str, people: int, each: int) -> list[str]:
    """Everybody at once; returns the errors."""
    values = itertools.cycle([n for n in range(2, 131) if n != 20])
    group = [Person(base, values, 20 * number) for number in range(people)]
    await asyncio.gather(*(one.work(each) for one in group))
    for kind, text in (("open", "first numbers"), ("step", "other SMs"), ("price", "other price")):
        show(f"{people} people, {text}", [s for one in group for s in one.seconds[kind]])
    show(f"{people} people, both sliders", [s for one in group for k in KINDS for s in one.seconds[k]])
    for one in group:
        await one.client.close()
    return [text for one in group for text in one.errors]


async def alone(base: str, pid: int, long: int) -> list[str]:
    """One person for long, and what that does to the server's memory; returns the errors."""
    one = Person(base, itertools.cycle(n for n in range(2, 131) if n != 20), 0)
    await one.work(min(20, long))
    before = memory_bytes(pid)
    await one.work(long)
    after = memory_bytes(pid)
    for kind, text in (("step", "other SMs"), ("price", "other price")):
        show(f"one person, {text}", one.seconds[kind])
    print(f"memory of the server {before / 1e6:.0f} MB, after {long} interactions {after / 1e6:.0f} MB")
    await one.client.close()
    return one.errors


async def first_visits(base: str, people: int, together: bool) -> tuple[list[float], list[str]]:
    """Everybody opens every page once, all of them the same at once or each another: seconds, and errors."""
    names, seconds, errors = [name for name, *_ in PAGES], [], []

    async def walk(number: int) -> None:
        for turn in range(len(names)):
            name = names[(turn + (0 if together else number)) % len(names)]
            client, began = Client(base, name), time.perf_counter()
            try:
                await client.open()
            except Exception as error:  # every failure counts and is printed, whatever it is
                client.errors.append(f"{type(error).__name__}: {error}")
            seconds.append(time.perf_counter() - began)
            errors.extend(f"{name}: {text}" for text in client.errors)
            await client.close()

    await asyncio.gather(*map(walk, range(people)))
    return seconds, errors


def fresh_servers(times: int, people: int) -> list[str]:
    """`first_visits` on a server of its own each time, in which nobody has drawn anything yet; the errors."""
    found = []
    for number in range(times):
        with tempfile.TemporaryDirectory(prefix="moesim-load-") as kept:
            os.environ["MOESIM_CACHE"] = kept
            port = server_command.chosen_port(0)
            with server_command.running(port) as process:
                if not server_command.wait_until_healthy(process, port):
                    sys.exit("the server did not start")
                together = number % 2 == 0
                seconds, errors = asyncio.run(first_visits(server_command.url(port), people, together))
        show(f"fresh server, {'the same page' if together else 'other pages'}", seconds)
        print(f"{len(seconds)} visits by {people} people, {len(errors)} errors", flush=True)
        found += errors
    return found


def memory_bytes(pid: int) -> int:
    """Memory of the server and everything it started, shared pages counted once (Linux)."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if family(int(folder.name), pid):
                lines = (folder / "smaps_rollup").read_text().splitlines()
                total += 1024 * int(next(line for line in lines if line.startswith("Pss:")).split()[1])
        except (OSError, ValueError, StopIteration):
            continue
    return total


def family(pid: int, ancestor: int) -> bool:
    """Whether a process is another one or was started by it, at any distance."""
    while pid > 1:
        if pid == ancestor:
            return True
        pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    return False


def show(kind: str, seconds: list[float]) -> None:
    """Median and tail of one kind of interaction."""
    ranked = sorted(seconds)
    if ranked:
        tail = ranked[min(len(ranked) - 1, round(0.9 * len(ranked)))]
        print(
            f"{kind:28} {len(ranked):4} interactions: median {statistics.median(ranked):.2f} s, "
            f"P90 {tail:.2f} s, worst {ranked[-1]:.2f} s",
            flush=True,
        )


def in_a_browser(base: str) -> None:
    """First numbers on a screen, and sliders of What-if from the key to the new number on it."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or sys.exit("no Chromium here: apt-get install chromium")
    with sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 800}, bypass_csp=True)
        page.set_default_timeout(BROWSER_MS)
        for path, text in (("", "start page, first numbers"), ("what_if", "What-if, first numbers")):
            began = time.perf_counter()
            page.goto(f"{base}/{path}")
            page.get_by_test_id("stMetricValue").first.wait_for()
            show(f"a browser, {text}", [time.perf_counter() - began])
            page.wait_for_function(ALL_DRAWN, polling=10)
        for kind, (label, _) in KINDS.items():
            seconds = [pressed(page, label, kind) for _ in range(6)]
            show(f"a browser, {'other SMs' if kind == 'step' else 'other price'}", seconds)
        for text, seconds in switches(page).items():
            show(f"a browser, {text}", seconds)
        browser.close()


def pressed(page: Any, label: str, kind: str) -> float:
    """Seconds from a key on a slider to another number in the tile that it changes."""
    tile = page.get_by_test_id("stMetric").filter(has_text="Step time" if kind == "step" else "Cost").first
    shown = tile.get_by_test_id("stMetricValue").inner_text()
    slider = page.get_by_test_id("stSlider").filter(has_text=label).first.get_by_role("slider")
    began = time.perf_counter()
    slider.press("ArrowLeft")
    page.wait_for_function(
        "([name, old]) => [...document.querySelectorAll('[data-testid=stMetric]')].find(tile =>"
        " tile.innerText.includes(name))?.querySelector('[data-testid=stMetricValue]').innerText !== old",
        arg=["Step time" if kind == "step" else "Cost", shown],
    )
    return time.perf_counter() - began


def switches(page: Any) -> dict[str, list[float]]:
    """Seconds from a click in the navigation to the other page's title, and to a page that is all drawn."""
    links = page.get_by_test_id("stSidebarNavLink")
    titles, whole = [], []
    for number in [*range(links.count())] * 2:
        old = page.locator("h1").first.inner_text()
        page.wait_for_timeout(2_000)  # what the page before does behind is done, and the job of its visitor
        began = time.perf_counter()
        links.nth(number).click()
        page.wait_for_function(OTHER_TITLE, arg=old, polling=10)
        titles.append(time.perf_counter() - began)
        page.wait_for_function(ALL_DRAWN, polling=10)
        whole.append(time.perf_counter() - began)
    return {"page switch, title": titles, "page switch, whole page": whole}


def main() -> None:
    """Run it against a server of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--people", type=int, default=10)
    parser.add_argument("--each", type=int, default=6)
    parser.add_argument("--long", type=int, default=200)
    parser.add_argument("--browser", action="store_true")
    parser.add_argument("--fresh", type=int, default=0)
    options = parser.parse_args()
    early = fresh_servers(options.fresh, options.people)
    with tempfile.TemporaryDirectory(prefix="moesim-load-") as kept:
        os.environ["MOESIM_CACHE"] = kept
        port, began = server_command.chosen_port(0), time.perf_counter()
        with server_command.running(port) as process:
            if not server_command.wait_until_healthy(process, port):
                sys.exit("the server did not start")
            print(f"server answers after {time.perf_counter() - began:.2f} s; load {os.getloadavg()[0]:.1f}")
            base, errors = server_command.url(port), early
            if options.browser:
                in_a_browser(base)
            if options.people:
                errors += asyncio.run(crowd(base, options.people, options.each))
            if options.long:
                errors += asyncio.run(alone(base, process.pid, options.long))
    for text in errors[:20]:
        print(f"error: {text}")
    print(f"{len(errors)} errors; load {os.getloadavg()[0]:.1f}")
    sys.exit(1 if errors else 0)


if __name__ == "__main__":
    main()
