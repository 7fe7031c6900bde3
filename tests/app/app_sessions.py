"""Sessions of one page in Streamlit's simulated browser, for tests of several files."""

from __future__ import annotations

import asyncio
import html
import re
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from streamlit.testing import v1 as testing

HOME = "deepseek-v3-2048xh800"
T = TypeVar("T")


def run_apart(visit: Coroutine[Any, Any, T]) -> T:
    """A coroutine in a thread of its own: tests in a browser leave a loop running in this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, visit).result()


def session(page: str, *overrides: str) -> testing.AppTest:
    """A visitor who opens one page with a link."""
    script = f"""
from moesim.app import state, widgets
from moesim.app.views import {page}
state.synchronise()
widgets.guard({page}.show)
state.publish()
"""
    app = testing.AppTest.from_string(script, default_timeout=120)
    if overrides:
        app.query_params["preset"] = HOME
        app.query_params["set"] = list(overrides)
    return app.run()


def metrics(app: testing.AppTest) -> dict[str, str]:
    return {metric.label: metric.value for metric in app.metric}


def figures(app: testing.AppTest) -> dict[str, list[str]]:
    """The rows of the page's table of figures: the words of every cell by the row's label, in order."""
    found: dict[str, list[str]] = {}
    for body in (element.proto.body for element in app.get("html")):
        for row in re.findall(r"<tr.*?</tr>", body, re.DOTALL):
            cells = [
                html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", cell)).strip())
                for cell in re.findall(r"<t[hd][ >].*?</t[hd]>", row, re.DOTALL)
            ]
            found[cells[0]] = cells[1:]
    return found


def until(
    app: testing.AppTest,
    ready: Callable[[testing.AppTest], bool],
    seconds: float = 180.0,
    errors: int = 0,
) -> None:
    """Draw the page again until something is there, as its own refresh does in a browser."""
    end = time.monotonic() + seconds
    while not ready(app):
        assert time.monotonic() < end, "the page never got there"
        time.sleep(0.3)
        app.run()
        assert not app.exception
        assert len(app.error) == errors, [error.value for error in app.error]
