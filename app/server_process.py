"""The server process; it imports everything and starts the home case before it accepts the first visitor.

`server_command` starts it as `python -m moesim.app.server_process PORT`. The process that jobs are forked
from starts first and imports the simulator on another core. The server ends when its standard input is
closed, which happens however the process that started it ends.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import logging
import os
import pkgutil
import re
import shutil
import signal
import sys
import threading
from base64 import b64encode
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from moesim.app import jobs, page_switch, pages, server_command, upload_files, visitors
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
    # The framework's own handler ends its work first and then calls ours.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    page_switch.ignore()
    dashboard = application()
    gc.freeze()  # the framework looks for cycles after every run of the script; modules have none to find
    try:
        dashboard.run(config=settings(port))
    finally:
        jobs.shut_down()


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

    upload_files.limit()
    index = Path(st.__file__).parent / "static" / "index.html"
    ours = [Middleware(SecurityHeaders, index_page=index), Middleware(upload_files.ToDisk)]
    return st.App(MAIN, middleware=ours, on_script_error=navigation.failed)


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


# -- security headers --------------------------------------------------------------------------------
# Response headers that tell browsers what a page of the dashboard may load, and who may frame it.

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_INLINE_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)


def content_security_policy(index_page: str) -> str:
    """The policy for a page of the framework whose HTML is `index_page`; inline scripts are named by hash.

    Everything comes from this server and no text becomes a script. Styles may be inline, because the
    framework and its charts write them; pictures and workers may be made by the page itself.
    """
    scripts = [
        f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for text in _INLINE_SCRIPT.findall(index_page)
    ]
    return "; ".join(
        (
            "default-src 'self'",
            " ".join(("script-src 'self'", *scripts)),
            "style-src 'self' 'unsafe-inline'",
            "img-src 'self' data: blob:",
            "media-src 'self' data: blob:",
            "font-src 'self' data:",
            "connect-src 'self'",
            "worker-src 'self' blob:",
            "frame-src 'self'",
            "frame-ancestors 'self'",  # components are frames of the page itself
            "form-action 'self'",
            "base-uri 'self'",
            "object-src 'none'",
        )
    )


def security_headers(index_page: str) -> dict[str, str]:
    """All headers that every response gets."""
    return {
        "Content-Security-Policy": content_security_policy(index_page),
        "X-Frame-Options": "SAMEORIGIN",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
        "Cross-Origin-Opener-Policy": "same-origin",
    }


MESSAGE_BYTES = 1_000_000
"""Limit on one message of a page other than an upload: its address and the state of its inputs."""


class SecurityHeaders:
    """ASGI middleware that adds or replaces the security headers and closes connections that flood input."""

    def __init__(self, app: App, index_page: Path) -> None:
        """Wrap `app`; `index_page` is the HTML file that the framework serves at every page's address."""
        self.app = app
        found = security_headers(index_page.read_text("utf-8"))
        self.headers = [(name.lower().encode(), value.encode()) for name, value in found.items()]

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "websocket":
            await self._talk(scope, receive, send)
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        names = {name for name, _ in self.headers}
        known = visitors.in_header(_cookies(scope)) is not None

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [(name, value) for name, value in message["headers"] if name.lower() not in names]
                # A page, not one of the files that it loads beside each other.
                is_page = any(n.lower() == b"content-type" and v.startswith(b"text/html") for n, v in kept)
                own = [] if known or not is_page else [_new_visitor(scope, visitors.issued())]
                message["headers"] = [*kept, *self.headers, *own]
            await send(message)

        await self.app(scope, receive, send_with_headers)

    async def _talk(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve a connection of a page; one that the page left in the middle of an answer ends in silence.

        The framework reads on after an answer that could not be sent; then Starlette raises RuntimeError.
        """
        left = False
        token = None
        if visitors.in_header(_cookies(scope)) is None:  # the page was loaded before this server started
            token = visitors.issued()
            scope = {
                **scope,
                "headers": [
                    *scope.get("headers", ()),
                    (b"cookie", _new_visitor(scope, token)[1].partition(b";")[0]),
                ],
            }

        async def receive_limited() -> Message:
            message = await receive()
            data = message.get("bytes") or message.get("text") or b""
            if len(data) > MESSAGE_BYTES:
                return {"type": "websocket.disconnect", "code": 1009}  # too big
            return message

        async def send_unless_left(message: Message) -> None:
            nonlocal left
            if token is not None and message["type"] == "websocket.accept":
                message["headers"] = [*message.get("headers", ()), _new_visitor(scope, token)]
            try:
                await send(message)
            except OSError:
                left = True
                raise

        try:
            await self.app(scope, receive_limited, send_unless_left)
        except RuntimeError:
            if not left:
                raise


def _cookies(scope: Message) -> str:
    """All cookies of a request."""
    texts = [value.decode("latin-1") for name, value in scope.get("headers", ()) if name.lower() == b"cookie"]
    return "; ".join(texts)


def _new_visitor(scope: Message, token: str) -> tuple[bytes, bytes]:
    server = scope.get("server")
    return b"set-cookie", visitors.set_cookie(token, int(server[1] or 0) if server else 0).encode()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
