"""Ten people at once on this machine: time of an interaction, errors, memory over many interactions.

    python benchmarks/dashboard_load.py [--people 10] [--each 6] [--long 200]

Every person opens the page What-if and moves its sliders of communication SMs and of the price. Bounded:
people x each interactions, then `--long` of one person with the memory of the server before and after.
Needs the dashboard extra, playwright and the system's Chromium, all on 127.0.0.1.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from playwright.async_api import async_playwright

from moesim.app import server

WAIT_MS = 120_000
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
SHOWN = """
([name, value]) => [...document.querySelectorAll('[data-testid=stCode]')].some(
    code => code.innerText.includes(name) && code.innerText.includes(value))
  && document.querySelector('[data-testid=stApp]').dataset.testScriptState === 'notRunning'
"""
"""The page says which keys were changed to what; then its numbers are those of these keys."""
SLIDERS = {"step": ("Communication", "communication.sms="), "price": ("Price", "price_per_gpu_hour=")}
"""Kind of interaction: start of the slider's label, what the page then says."""
KEYS = ("ArrowRight", "ArrowLeft")
WRONG = "[data-testid=stException], [data-testid=stAlertContentError]"


class Person:
    """One browser session on the page What-if; every interaction's seconds, and what went wrong."""

    def __init__(self, page: Any, base: str) -> None:
        """Nothing is opened yet."""
        self.page, self.base = page, base
        self.seconds: dict[str, list[float]] = {"open": [], "step": [], "price": []}
        self.errors: list[str] = []

    async def open(self) -> None:
        """From nothing to the first numbers."""
        began = time.perf_counter()
        await self.page.goto(f"{self.base}/what_if")
        await self.page.get_by_test_id("stMetricValue").first.wait_for()
        self.seconds["open"].append(time.perf_counter() - began)

    async def move(self, kind: str, key: str) -> None:
        """Move a slider by one key press and wait for the numbers of its new value."""
        label, name = SLIDERS[kind]
        slider = self.page.get_by_test_id("stSlider").filter(has_text=label).first.get_by_role("slider")
        began = time.perf_counter()
        await slider.press(key)
        value = await slider.evaluate("e => e.getAttribute('aria-valuenow') ?? e.value")
        await self.page.wait_for_function(SHOWN, arg=[name, f"{float(value):g}"])
        self.seconds[kind].append(time.perf_counter() - began)

    async def work(self, each: int, key: str = "ArrowLeft") -> None:
        """Move the sliders of SMs (which simulates) and of the price (which does not) in turn."""
        try:
            if not self.seconds["open"]:
                await self.open()
            for turn in range(each):
                await self.move("price" if turn % 2 else "step", key)
                if await self.page.locator(WRONG).count():
                    self.errors.append(f"interaction {turn}: an error is shown")
        except Exception as error:  # every failure counts and is printed, whatever it is
            self.errors.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")


def memory_bytes(pid: int) -> int:
    """Resident memory of the server and everything it started (Linux)."""
    total = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
            if family(int(status.parent.name), pid):
                total += int(fields.get("VmRSS", "0 kB").split()[0]) * 1024
        except (OSError, ValueError):
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
            f"P90 {tail:.2f} s, worst {ranked[-1]:.2f} s"
        )


async def load(base: str, pid: int, people: int, each: int, long: int) -> int:
    """Number of errors."""
    chromium = shutil.which("chromium") or sys.exit("no Chromium here: apt-get install chromium")
    async with async_playwright() as engine:
        browser = await engine.chromium.launch(executable_path=chromium, args=FLAGS)

        async def person() -> Person:
            context = await browser.new_context(viewport={"width": 1280, "height": 800})
            context.set_default_timeout(WAIT_MS)
            return Person(await context.new_page(), base)

        crowd = [await person() for _ in range(people)]
        # Each begins from another side, so that not everybody asks for the same numbers.
        await asyncio.gather(*(one.work(each, KEYS[n % 2]) for n, one in enumerate(crowd)))
        for kind, text in (("open", "first numbers"), ("step", "other SMs"), ("price", "other price")):
            show(f"{people} people, {text}", [s for one in crowd for s in one.seconds[kind]])
        show(f"{people} people, all sliders", [s for one in crowd for k in SLIDERS for s in one.seconds[k]])
        for one in crowd:
            await one.page.context.close()
        errors = [text for one in crowd for text in one.errors]
        if long:
            alone = await person()
            await alone.work(min(20, long))
            before = memory_bytes(pid)
            for turn in range(0, long, 20):  # twenty to one side, twenty back
                await alone.work(min(20, long - turn), KEYS[turn // 20 % 2])
            after = memory_bytes(pid)
            for kind, text in (("step", "other SMs"), ("price", "other price")):
                show(f"one person, {text}", alone.seconds[kind])
            print(
                f"memory of the server {before / 1e6:.0f} MB, after {long} interactions {after / 1e6:.0f} MB"
            )
            errors += alone.errors
        await browser.close()
    for text in errors[:20]:
        print(f"error: {text}")
    print(f"{len(errors)} errors")
    return len(errors)


def main() -> None:
    """Run it against a server of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--people", type=int, default=10)
    parser.add_argument("--each", type=int, default=6)
    parser.add_argument("--long", type=int, default=200)
    options = parser.parse_args()
    port = server.chosen_port(0)
    with server.running(port) as process:
        if not server.wait_until_healthy(process, port):
            sys.exit("the server did not start")
        failed = asyncio.run(load(server.url(port), process.pid, options.people, options.each, options.long))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
