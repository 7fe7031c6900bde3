"""Sessions of one page in Streamlit's simulated browser, for tests of several files."""

from __future__ import annotations

import asyncio
import html
import re
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from streamlit.testing import v1 as testing

from moesim.app import jobs

HOME = "deepseek-v3-2048xh800"
JOB = (
    "model=olmoe-1b-7b",
    "cluster=h100-1024",
    "cluster.nodes=2",
    "profile=null",
    "parallel={tp: 1, pp: 1, ep: 8, cp: 1, microbatch: 1, zero_stage: 1}",
    "schedule=1f1b",
    "batch={sequences: 64, sequence_length: 4096}",
    "precision=bf16",
    "recompute=none",
    "communication={sms: 20}",
    "run={tokens: 1e12}",
    "routing=null",
    "variation=null",
)
"""OLMoE on 16 H100: its interval and a quick search of it take a second."""
T = TypeVar("T")


def run_apart(visit: Coroutine[Any, Any, T]) -> T:
    """A coroutine in a thread of its own: tests in a browser leave a loop running in this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, visit).result()


def session(page: str, *overrides: str, fields: Sequence[str] = (), **parameters: Any) -> testing.AppTest:
    """A visitor who opens one page with a link, of changes of the home case or of an address."""
    script = f"""
if __name__ == "__main__":  # job processes read this file too
    from moesim.app import state, widgets
    from moesim.app.views import {page}
    state.synchronise()
    widgets.guard({page}.show)
    state.publish()
"""
    app = testing.AppTest.from_string(script, default_timeout=120)
    if overrides or fields:
        parameters |= {"preset": HOME, "set": list(overrides), "form": list(fields)}
    for name, value in parameters.items():
        if value:
            app.query_params[name] = value
    app.run()
    assert not app.exception, app.exception
    return app


def press(app: testing.AppTest, key: str) -> None:
    """Click a button; nothing is raised."""
    app.button(key=key).click().run()
    assert not app.exception, app.exception


def address(app: testing.AppTest) -> dict[str, list[str]]:
    """The address that a session has written, as another one would open it."""
    return {k: [v] if isinstance(v, str) else list(v) for k, v in app.query_params.items()}


def words(app: testing.AppTest) -> str:
    """Everything in words on the page."""
    parts = [*app.markdown, *app.caption, *app.info, *app.error, *app.title, *app.header, *app.success]
    return "\n".join(part.value for part in parts)


def html_of(app: testing.AppTest) -> str:
    return " ".join(element.proto.body for element in app.get("html"))


def table(app: testing.AppTest, column: str) -> Any:
    """The table that has a column."""
    return next(frame.value for frame in app.dataframe if column in frame.value)


def metrics(app: testing.AppTest) -> dict[str, str]:
    return {metric.label: metric.value for metric in app.metric}


def figures(app: testing.AppTest) -> dict[str, list[str]]:
    """The rows of the page's table of figures: the words of every cell by the row's label, in order."""
    found: dict[str, list[str]] = {}
    for row in re.findall(r"<tr.*?</tr>", html_of(app), re.DOTALL):
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
    end, pause_s = time.monotonic() + seconds, 0.3
    while not ready(app):
        assert time.monotonic() < end, "the page never got there"
        until_a_job_ends(pause_s)
        pause_s = min(2.0, 2.0 * pause_s)
        app.run()
        assert not app.exception
        assert len(app.error) == errors, [error.value for error in app.error]


def until_a_job_ends(most_s: float) -> None:
    """Wait for the first job that runs now: a page that is drawn before shows nothing new but progress."""
    running, end = list(jobs._running.values()), time.monotonic() + most_s
    while time.monotonic() < end and not any(job.done for job in running):
        time.sleep(0.01)
