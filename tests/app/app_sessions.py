"""Sessions of one page in Streamlit's simulated browser, for tests of several files."""

from __future__ import annotations

import time
from collections.abc import Callable

from streamlit.testing import v1 as testing

HOME = "deepseek-v3-2048xh800"


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
