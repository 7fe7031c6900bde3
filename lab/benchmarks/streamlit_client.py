"""A client of the dashboard without a browser: the framework's WebSocket protocol, and nothing drawn.

For load tests on the machine of the server, where ten browsers would take the cores that are to be measured.
The server does all that it does for a browser; what a browser adds (drawing) is measured with one.
"""

from __future__ import annotations

import asyncio
import http.client
from contextlib import suppress
from typing import Any

from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.Common_pb2 import FileUploaderState
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
from websockets.asyncio.client import ClientConnection, connect

MOST_BYTES = 64_000_000
FAILED = (ForwardMsg.ScriptFinishedStatus.FINISHED_WITH_COMPILE_ERROR,)


class Client:
    """One session on one page: its widgets, its numbers, and the errors that it was shown."""

    def __init__(self, base: str, page: str, query: str = "", limit_s: float = 120.0) -> None:
        """Nothing is opened yet; `limit_s` is how long a run of the script may take."""
        self.base, self.page, self.query, self.limit_s = base, page, query, limit_s
        self.sliders: dict[str, Any] = {}
        """Label to (slider, its fragment)."""
        self.metrics: dict[str, str] = {}
        self.codes: list[str] = []
        self.errors: list[str] = []
        self.uploaders: dict[str, Any] = {}
        self.session = ""
        self.runs: list[str] = []
        """The framework's name of the page that each run of the script began with."""
        self.drawn = ""
        """Its name of the page that was drawn last."""
        self.timers: list[str] = []
        """Fragments that the browser redraws by itself."""
        self._socket: ClientConnection | None = None
        self._moved: dict[str, float] = {}
        self._files: dict[str, FileUploaderState] = {}
        self._known: dict[str, ForwardMsg] = {}

    async def open(self) -> None:
        """Connect and run the page once."""
        address = self.base.replace("http", "ws", 1) + "/_stcore/stream"
        self._socket = await connect(
            address, origin=self.base, subprotocols=["streamlit"], max_size=MOST_BYTES, proxy=None
        )
        await self._run("")

    async def slide(self, label: str, value: float) -> None:
        """Move a slider, by the start of its label; returns when the script has run."""
        slider, fragment = next(item for name, item in self.sliders.items() if name.startswith(label))
        self._moved[slider.id] = value
        await self._run(fragment)

    async def upload(self, label: str, name: str, data: bytes) -> None:
        """Hand a file to an uploader, by the start of its label; returns when the script has run."""
        widget = next(item for text, item in self.uploaders.items() if text.startswith(label))
        ask = BackMsg()
        ask.file_urls_request.request_id = name
        ask.file_urls_request.file_names.append(name)
        ask.file_urls_request.session_id = self.session
        assert self._socket is not None
        await self._socket.send(ask.SerializeToString())
        urls = None
        async with asyncio.timeout(self.limit_s):
            while urls is None:
                message = ForwardMsg.FromString(_bytes(await self._socket.recv()))
                if message.WhichOneof("type") == "file_urls_response":
                    urls = message.file_urls_response.file_urls[0]
        status = await asyncio.to_thread(_put, self.base, urls.upload_url, name, data)
        if status >= 400:
            self.errors.append(f"upload refused with status {status}")
            return
        found = FileUploaderState()
        found.uploaded_file_info.add(name=name, size=len(data), file_id=urls.file_id, file_urls=urls)
        self._files[widget.id] = found
        await self._run("")

    async def flood(self, count: int, data: bytes, label: str) -> None:
        """Send files that no widget names; then have an uploader name the first one."""
        for number in range(count):
            path = f"/_stcore/upload_file/{self.session}/flood-{number}"
            await asyncio.to_thread(_put, self.base, path, "flood.yaml", data)
        widget = next(item for text, item in self.uploaders.items() if text.startswith(label))
        found = FileUploaderState()
        found.uploaded_file_info.add(name="flood.yaml", size=len(data), file_id="flood-0")
        self._files[widget.id] = found
        await self._run("")

    async def tick(self, page: str) -> None:
        """What a timer asks for in a browser that believes to be on this page (the framework's name)."""
        await self._ask(self.timers[-1], page, by_timer=True)
        await self._answered(self.timers[-1])

    async def go(self, page: str, late: str, quiet_s: float = 2.0) -> None:
        """Open another page (the framework's name); while it is drawn, a timer of the page before fires.

        Returns once nothing more comes.
        """
        before, known = self.drawn, len(self.runs)
        await self._ask("", page)
        assert self._socket is not None
        while len(self.runs) == known:
            self._take(await self._socket.recv(), "")
        await self._ask(late, before, by_timer=True)
        with suppress(TimeoutError):
            while True:
                async with asyncio.timeout(quiet_s):
                    await self._answered("")

    def value(self, label: str) -> float:
        """Where a slider stands."""
        slider = next(item for name, item in self.sliders.items() if name.startswith(label))[0]
        return float(self._moved.get(slider.id, slider.default[0]))

    async def close(self) -> None:
        """End the session."""
        if self._socket is not None:
            await self._socket.close()

    async def _run(self, fragment: str, page: str = "") -> None:
        await self._ask(fragment, page)
        await self._answered(fragment)

    async def _ask(self, fragment: str, page: str, *, by_timer: bool = False) -> None:
        ask = BackMsg()
        ask.rerun_script.query_string = self.query
        ask.rerun_script.page_name = self.page
        ask.rerun_script.page_script_hash = page
        ask.rerun_script.fragment_id = fragment
        ask.rerun_script.is_auto_rerun = by_timer
        for name, value in self._moved.items():
            state = ask.rerun_script.widget_states.widgets.add(id=name)
            state.double_array_value.data.append(value)
        for name, files in self._files.items():
            ask.rerun_script.widget_states.widgets.add(id=name).file_uploader_state_value.CopyFrom(files)
        assert self._socket is not None
        self.codes = []
        await self._socket.send(ask.SerializeToString())

    async def _answered(self, fragment: str) -> None:
        assert self._socket is not None
        async with asyncio.timeout(self.limit_s):
            while not self._take(await self._socket.recv(), fragment):
                pass

    def _take(self, data: str | bytes, fragment: str) -> bool:
        """Note what a message brings; whether it ends the run that was asked for."""
        message = ForwardMsg.FromString(_bytes(data))
        if message.HasField("ref_hash"):
            message = self._known[message.ref_hash]
        elif message.hash:
            self._known[message.hash] = message
        kind = message.WhichOneof("type")
        if kind == "new_session":
            self.session = message.new_session.initialize.session_id
            self.runs.append(message.new_session.page_script_hash)
        if kind == "navigation":
            self.drawn = message.navigation.page_script_hash
        if kind == "auto_rerun":
            self.timers.append(message.auto_rerun.fragment_id)
        if kind == "page_not_found":
            self.errors.append("page not found")
        if kind == "delta" and message.delta.HasField("new_element"):
            self._note(message.delta.new_element, message.delta.fragment_id)
        if kind != "script_finished":
            return False
        if message.script_finished in FAILED:
            self.errors.append("the script did not run")
        # A run that a newer one replaced, or the page's own refresh, is not what was asked for.
        return message.script_finished != ForwardMsg.ScriptFinishedStatus.FINISHED_EARLY_FOR_RERUN

    def _note(self, element: Any, fragment: str) -> None:
        kind = element.WhichOneof("type")
        if kind == "slider":
            self.sliders[element.slider.label] = (element.slider, fragment)
        elif kind == "file_uploader":
            self.uploaders[element.file_uploader.label] = element.file_uploader
        elif kind == "metric":
            self.metrics[element.metric.label] = element.metric.body
        elif kind == "code":
            self.codes.append(element.code.code_text)
        elif kind == "exception" or (kind == "alert" and element.alert.format == element.alert.ERROR):
            self.errors.append(getattr(element, kind).body if kind == "alert" else element.exception.message)


def _bytes(data: str | bytes) -> bytes:
    return data if isinstance(data, bytes) else data.encode()


def _put(base: str, path: str, name: str, data: bytes) -> int:
    """Send a file as the framework's page does: with the cookie against forged requests. The status."""
    connection = http.client.HTTPConnection(base.removeprefix("http://"), timeout=60)
    connection.request("GET", "/_stcore/health")
    answer = connection.getresponse()
    answer.read()
    cookie = (answer.getheader("Set-Cookie") or "").split(";")[0]
    end = "moesim-boundary"
    head = f'--{end}\r\nContent-Disposition: form-data; name="{name}"; filename="{name}"\r\n\r\n'
    connection.request(
        "PUT",
        path,
        body=head.encode() + data + f"\r\n--{end}--\r\n".encode(),
        headers={
            "Content-Type": f"multipart/form-data; boundary={end}",
            "Cookie": cookie,
            "X-Xsrftoken": cookie.partition("=")[2],
        },
    )
    status = connection.getresponse().status
    connection.close()
    return status
