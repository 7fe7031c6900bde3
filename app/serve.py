"""The server process: the framework's own command, its pages imported and the home case solved ahead.

Started by `server` as `python -m moesim.app.serve FLAGS`. The process that jobs are forked from starts first,
and imports the simulator on another core; pages are imported while the server comes up.
"""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from pathlib import Path

from moesim.app import jobs
from moesim.app.main import PAGES

log = logging.getLogger("moesim.app")


def serve(flags: list[str]) -> None:
    """Run the server until it is stopped."""
    jobs.warm_up()
    from streamlit.web import cli

    threading.Thread(target=prepare, daemon=True).start()
    sys.argv = ["streamlit", "run", str(Path(__file__).resolve().parent / "main.py"), *flags]
    cli.main()


def prepare() -> None:
    """Import every page, and start solving what the first one shows."""
    try:
        from moesim.app import state
        from moesim.app.views import scenario as first_page

        first_page.begin(state.build(state.HOME, ()))
        first_page.confidences()
        for name, *_ in PAGES:
            importlib.import_module(f"moesim.app.views.{name}")
    except Exception:  # the first visit meets it again, and says it
        log.exception("the dashboard could not be prepared")


if __name__ == "__main__":
    serve(sys.argv[1:])
