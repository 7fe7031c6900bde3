"""Response headers that tell browsers what a page of the dashboard may load, and who may frame it."""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from moesim.app import visitors

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
                own = [] if known or not _is_page(kept) else [_new_visitor(scope, visitors.issued())]
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
            scope = {**scope, "headers": [*scope.get("headers", ()), (b"cookie", _pair(scope, token))]}

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
            await self.app(scope, _limited(receive), send_unless_left)
        except RuntimeError:
            if not left:
                raise


def _cookies(scope: Message) -> str:
    """All cookies of a request."""
    texts = [value.decode("latin-1") for name, value in scope.get("headers", ()) if name.lower() == b"cookie"]
    return "; ".join(texts)


def _is_page(headers: list[tuple[bytes, bytes]]) -> bool:
    """Whether the answer is a page, not one of the files that it loads beside each other."""
    return any(n.lower() == b"content-type" and v.startswith(b"text/html") for n, v in headers)


def _new_visitor(scope: Message, token: str) -> tuple[bytes, bytes]:
    return b"set-cookie", visitors.set_cookie(token, _port(scope)).encode()


def _pair(scope: Message, token: str) -> bytes:
    return visitors.set_cookie(token, _port(scope)).partition(";")[0].encode()


def _port(scope: Message) -> int:
    server = scope.get("server")
    return int(server[1] or 0) if server else 0


def _limited(receive: Receive) -> Receive:
    """Wrap `receive` so that a message above the limit ends the connection (code 1009, too big)."""

    async def receive_limited() -> Message:
        message = await receive()
        data = message.get("bytes") or message.get("text") or b""
        if len(data) > MESSAGE_BYTES:
            return {"type": "websocket.disconnect", "code": 1009}
        return message

    return receive_limited
