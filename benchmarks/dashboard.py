"""How quickly the dashboard's script answers, and whether its memory stays bounded.

Runs the pages as a session would, without a browser: `python benchmarks/dashboard.py [interactions]`.
Times hold the whole script run, jobs included; drawing in the browser comes on top.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

from streamlit.testing.v1 import AppTest

ROOT = Path(__file__).resolve().parent.parent
PAGE = """
if __name__ == "__main__":
    from moesim.app import state, widgets
    from moesim.app.views import {page}

    state.synchronise()
    widgets.guard({page}.show)
    state.publish()
"""


def resident_mb() -> float:
    """Resident memory of this process, in MB."""
    text = Path("/proc/self/status").read_text()
    line = next(line for line in text.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1000.0


def opened(page: str) -> AppTest:
    """A session on one page."""
    app = AppTest.from_string(PAGE.format(page=page), default_timeout=300).run()
    assert not app.exception
    return app


def timed(app: AppTest, key: str, values: list[float]) -> list[float]:
    """Seconds from moving a slider to the new numbers, for every value."""
    found = []
    for value in values:
        start = time.perf_counter()
        app.slider(key=key).set_value(value).run()
        found.append(time.perf_counter() - start)
        assert not app.exception
    return found


def told(name: str, seconds: list[float]) -> None:
    """One line of the table."""
    print(f"{name:<44}{statistics.median(seconds):>8.2f}{max(seconds):>8.2f}")


def main() -> None:
    """Print the table."""
    interactions = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    start = time.perf_counter()
    app = AppTest.from_file(str(ROOT / "app" / "main.py"), default_timeout=300).run()
    assert not app.exception
    print(f"{'seconds':<44}{'median':>8}{'most':>8}")
    told("first page, home case solved", [time.perf_counter() - start])
    app = opened("scenario")
    told("scenario: another number of SMs", timed(app, "input communication.sms", [4, 6, 8, 10, 12]))
    told("scenario: one seen before", timed(app, "input communication.sms", [4, 6, 8]))
    app = opened("what_if")
    told("what-if: another number of SMs", timed(app, "what if sms 20", [14, 16, 18, 22]))
    told("what-if: another price", timed(app, "what if price 2", [1.0, 3.0, 4.0, 5.0]))

    from moesim.app import jobs

    print(f"\n{'interactions':<14}{'MB':>8}{'of these in the cache':>24}")
    app = opened("scenario")
    for number in range(interactions + 1):
        if number % max(1, interactions // 8) == 0:
            print(f"{number:<14}{resident_mb():>8.0f}{jobs.cache.used_bytes / 1e6:>24.1f}")
        app.slider(key="input communication.sms").set_value(1 + number % 130).run()
        assert not app.exception


if __name__ == "__main__":
    main()
