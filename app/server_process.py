"""The server process; it imports everything and starts the home case before it accepts the first visitor.

`server_command` starts it as `python -m moesim.app.server_process PORT`. The process that jobs are forked
from starts first and imports the simulator on another core. The server ends when its standard input is
closed, which happens however the process that started it ends.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import pkgutil
import shutil
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from moesim.app import jobs, pages, server_command, stale_timers, upload_memory
from moesim.hwmodels.files import READ_BELOW

log = logging.getLogger("moesim.app")

MAIN = Path(__file__).resolve().parent / "main.py"

NEEDED = (
    "PIL.Image",
    "yaml",
    "moesim.simulator.studies.explain",
    "pandas",
    "plotly.io",
    "pyarrow.pandas_compat",
    "pyarrow.parquet",
)
"""Modules that the framework or a page imports only when it draws. The first two visitors would import them
in two threads at once, and using a half-imported module fails."""


def serve(port: int) -> None:
    """Run the server until it is stopped."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    jobs.warm_up()
    prepare()
    signal.signal(
        signal.SIGTERM, _stop
    )  # the framework's own handler ends its work first and then calls ours
    stale_timers.ignore()
    dashboard = application()
    gc.freeze()  # the framework looks for cycles after every run of the script; modules have none to find
    try:
        dashboard.run(config=settings(port))
    finally:
        jobs.shut_down()


def _stop(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


def settings(port: int) -> dict[str, object]:
    """All settings that this release of the framework knows."""
    from streamlit import config

    # Asking for a value would read the configuration before ours is in force.
    known = getattr(config, "_config_options_template", {})
    newer = {name: value for name, value in server_command.NEWER_SETTINGS.items() if name in known}
    return {**server_command.SETTINGS, **newer, "server.port": port}


def application() -> Any:
    """The dashboard as the framework's ASGI application, with our headers and message for a failed page."""
    import streamlit as st
    from starlette.middleware import Middleware

    from moesim.app import navigation
    from moesim.app.security_headers import SecurityHeaders

    upload_memory.limit()
    index = Path(st.__file__).parent / "static" / "index.html"
    return st.App(
        MAIN, middleware=[Middleware(SecurityHeaders, index_page=index)], on_script_error=navigation.failed
    )


def prepare() -> None:
    """Import everything that any page needs, and start simulating what the first page shows."""
    for name in NEEDED:
        with suppress(ImportError):  # what is optional is missing for every visitor alike
            importlib.import_module(name)
    _draw_once()
    from moesim.app import state, views

    for module in pkgutil.iter_modules(views.__path__, f"{views.__name__}."):
        importlib.import_module(module.name)
    from moesim.app.views import scenario, start

    try:
        start.begin()
        scenario.begin(state.build(pages.HOME, ()))
        scenario.confidences()
    except Exception:  # the first visit meets the error again and shows it
        log.exception("the home case could not be started ahead")


def _draw_once() -> None:
    """Build one chart and one table that use all features, since libraries import them on first use."""
    import pandas
    from PIL import Image
    from plotly import graph_objects as go

    bar = go.Bar(x=[1], y=["a"], base=[0], marker={"color": "#000", "line": {}, "pattern": {}}, textfont={})
    line = go.Scatter(x=[1], y=[1], line={}, marker={"line": {}, "colorbar": {}}, error_x={}, error_y={})
    heat = go.Heatmap(z=[[1]], colorbar={"title": {}, "tickfont": {}})
    axis: dict[str, Any] = {"title": {"font": {}}, "tickfont": {}}
    chart = go.Figure([bar, line, heat])
    chart.update_layout(
        xaxis=axis, yaxis=axis, legend={"title": {}, "font": {}}, margin={}, title={"font": {}}, hoverlabel={}
    )
    chart.add_shape(type="line", x0=0, x1=1, y0=0, y1=1, line={})
    chart.add_annotation(text="a", x=0, y=0, font={})
    chart.to_json()
    pandas.DataFrame({"a": [1, None], "b": ["x", "y"]}).dtypes.to_string()
    Image.preinit()


def _end_with_parent() -> None:
    """Stop at once when the other end of standard input is closed."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    folder = os.environ.get(READ_BELOW)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    jobs.shut_down()
    os._exit(0)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
