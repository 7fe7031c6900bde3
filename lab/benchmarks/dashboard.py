"""How long the script of every page takes in a session, without a browser, and where one page spends it.

    python -m lab.benchmarks.dashboard [PAGE]

Each page is drawn once for its jobs and then five times more, as on a change of page or of an input that
simulates nothing. With the name of a page, the functions that take most of five draws are listed.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Callable

from streamlit.testing.v1 import AppTest

from moesim.app import server_process
from moesim.app.pages import PAGES

DRAWS = 5
PAGE = """
if __name__ == "__main__":
    import streamlit as st
    from moesim.app import navigation

    st.session_state["profile"].runcall(navigation.run, [({page!r}, "Page", ":material/tune:")])
"""


class Unprofiled:
    """Calls what it is given."""

    def runcall(self, function: Callable[..., None], *args: object) -> None:
        """Call it."""
        function(*args)


def drawn(page: str) -> AppTest:
    """A session on one page, whose jobs have ended."""
    app = AppTest.from_string(PAGE.format(page=page), default_timeout=300)
    app.session_state["profile"] = Unprofiled()
    app.run()
    for _ in range(2):
        time.sleep(3.0)
        app.run()
    assert not app.exception, app.exception
    return app


def main() -> None:
    """Print the table, or the profile of one page."""
    server_process.prepare()
    if len(sys.argv) > 1:
        app, profile = drawn(sys.argv[1]), cProfile.Profile()
        app.session_state["profile"] = profile
        for _ in range(DRAWS):
            app.run()
        pstats.Stats(profile).sort_stats("cumulative").print_stats(60)
        return
    print(f"{'seconds of the script':<24}{'median':>8}{'most':>8}")
    for page, *_ in PAGES:
        app, seconds = drawn(page), []
        for _ in range(DRAWS):
            began = time.perf_counter()
            app.run()
            seconds.append(time.perf_counter() - began)
        print(f"{page:<24}{statistics.median(seconds):>8.3f}{max(seconds):>8.3f}", flush=True)


if __name__ == "__main__":
    main()
