"""Receives what pages send by PUT: streamed to disk within limits, and deleted when nobody needs it.

The framework holds an upload in memory until its session ends. `ToDisk` writes it to the folder of uploads
while it arrives and hands the framework the file's name in its place, so that a trace of a gigabyte needs
no memory. `BoundedFiles` counts and deletes the files; those of a trace are moved into a folder of their own.
"""

from __future__ import annotations

import re
import secrets
import shutil
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from moesim.app.server_command import MAX_UPLOAD_MB
from moesim.app.uploads import folder
from moesim.hwmodels.errors import InputError

MOST_FILE_MB = 1024
"""Limit on one file; only a trace may be so large."""
MOST_FILE_BYTES = MOST_FILE_MB * 2**20
MOST_FILES = 64
MOST_SESSION_BYTES = 2 * MOST_FILE_BYTES
"""Limits on the files of one session that no page has used yet."""
MOST_BYTES = 6 * MOST_FILE_BYTES
"""Limit on these files of all sessions, and on the traces that are kept."""
KEPT_FREE_BYTES = 500_000_000
"""Bytes of the disk that uploads leave free."""
ENDINGS = (".json", ".json.gz", ".json.zst", ".sqlite", ".et", ".et.gz", ".csv")
"""Endings of a trace's files (`moesim.simulator.trace`)."""

Name = tuple[str, str]
"""(session, file)."""

_REFERENCE = re.compile(rb"moesim-file:(put-[0-9a-f]{32})")
_PROBLEM = b"moesim-problem:"


# -- a file that was sent ------------------------------------------------------------------------------


def given(file: Any) -> tuple[str, bytes] | None:
    """(name, bytes) of what an uploader of a page holds; None where it holds nothing.

    Raises InputError where the server has forgotten the file, could not keep it, or it is no small file.
    """
    if file is None:
        return None
    path = _path(file)
    if path is None:  # a simulated browser sends the bytes themselves
        return file.name, file.getvalue()
    with suppress(OSError):
        if path.stat().st_size > MAX_UPLOAD_MB * 2**20:
            raise InputError(f"{file.name[:80]}: larger than the limit of {MAX_UPLOAD_MB} MB for such a file")
        return file.name, path.read_bytes()
    raise forgotten()


def _path(file: Any) -> Path | None:
    """Where the file of an uploader lies; None where it holds the bytes themselves."""
    if not hasattr(file, "getvalue"):
        raise forgotten()
    data: bytes = file.getvalue()
    if data.startswith(_PROBLEM):
        raise InputError(f"{file.name[:80]}: {data[len(_PROBLEM) :].decode()}")
    return _file_of(data)


def forgotten() -> InputError:
    """The error for a file that this server does not have any more."""
    return InputError("the uploaded file is no longer on this server; upload it again")


def _file_of(data: bytes) -> Path | None:
    found = _REFERENCE.fullmatch(data)
    return None if found is None else folder() / found[1].decode()


# -- traces --------------------------------------------------------------------------------------------

_TRACE = re.compile(r"trace-[0-9a-f]{32}")
_holders: dict[str, set[str]] = {}
"""Sessions that show a trace."""
_lock = threading.RLock()


def keep_trace(files: Sequence[Any], session: str) -> str:
    """Move the files of one trace, one a rank, into a folder of their own; return its token.

    It stays while a session holds it. Raises InputError for a file that is gone, was not kept, or whose
    ending no reader of traces knows.
    """
    token = f"trace-{secrets.token_hex(16)}"
    inside = folder() / token / (f"{len(files)} ranks" if len(files) > 1 else "trace")
    try:
        inside.mkdir(parents=True, mode=0o700)
        for number, file in enumerate(files):
            path, name = _path(file), _harmless(file.name)
            if not name.lower().endswith(ENDINGS):
                raise InputError(f"{name}: a trace's file ends in {', '.join(ENDINGS)}")
            target = inside / name
            if target.exists():
                target = inside / f"{number}-{name}"
            if path is None:
                target.write_bytes(file.getvalue())
            else:
                path.replace(target)
        _forget_oldest_traces(token)
    except FileNotFoundError:
        drop_trace(token)
        raise forgotten() from None
    except OSError as error:
        drop_trace(token)
        raise InputError(f"the server cannot keep the trace: {error.strerror or error}") from None
    except InputError:
        drop_trace(token)
        raise
    hold_trace(token, session)
    return token


def _harmless(name: str) -> str:
    """The last part of a name that a visitor gave, in letters, digits, dots and dashes."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(name.replace("\\", "/")).name).lstrip(".-")[-120:] or "trace"


def trace_folder(token: object) -> Path | None:
    """The folder of a trace that is on this server; None for anything else, such as a link's text."""
    if not isinstance(token, str) or _TRACE.fullmatch(token) is None:
        return None
    path = folder() / token
    return path if path.is_dir() else None


def hold_trace(token: str, session: str) -> None:
    """Keep a trace for as long as this session lasts."""
    with _lock:
        _holders.setdefault(token, set()).add(session)


def drop_trace(token: str) -> None:
    """Delete a trace."""
    with _lock:
        _holders.pop(token, None)
    if _TRACE.fullmatch(token):
        shutil.rmtree(folder() / token, ignore_errors=True)


def release(session: str) -> None:
    """Delete the traces that only this session held, because its visitor left."""
    with _lock:
        left = [token for token, sessions in _holders.items() if sessions <= {session}]
        for sessions in _holders.values():
            sessions.discard(session)
    for token in left:
        drop_trace(token)


def _forget_oldest_traces(newest: str) -> None:
    sizes = {
        path: sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        for path in sorted(folder().glob("trace-*"), key=lambda path: path.stat().st_mtime)
    }
    for path in sizes:
        if sum(sizes.values()) > MOST_BYTES and path.name != newest:
            drop_trace(path.name)
            sizes[path] = 0


# -- streaming to disk ---------------------------------------------------------------------------------

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
MOST_HEAD = 16_384
"""Bytes before the content of a file: the boundary and what the browser says of it."""


class ToDisk:
    """ASGI middleware that writes a file that a page sends to disk and passes its name on instead.

    The framework checks the session and the token against forged requests before it asks for the content.
    """

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        """Wrap `app`."""
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http" or scope["method"] != "PUT":
            await self.app(scope, receive, send)
            return
        body, taken = _Incoming(scope, receive), False

        async def note(message: Message) -> None:
            nonlocal taken
            taken |= message.get("status") == 204
            await send(message)

        headers = [(key, text) for key, text in scope["headers"] if key.lower() != b"content-length"]
        try:
            await self.app({**scope, "headers": headers}, body.receive, note)
        except _LeftError:
            pass  # nobody waits for an answer
        finally:
            if not taken:
                body.path.unlink(missing_ok=True)


class _LeftError(Exception):
    """The browser went away in the middle of a file."""


class _Incoming:
    """The body of one request, which is a form of one file."""

    def __init__(self, scope: Message, receive: Receive) -> None:
        self.headers = {key.lower(): text for key, text in scope["headers"]}
        self.path = folder() / f"put-{secrets.token_hex(16)}"
        self._receive, self._more, self._given = receive, True, False

    async def receive(self) -> Message:
        """The same form with the file's name, or with what went wrong, as its content."""
        if self._given:
            return await self._receive()
        self._given = True
        found = re.search(rb'boundary="?([^";]+)', self.headers.get(b"content-type", b""))
        end = b"\r\n--" + (found[1] if found else b"") + b"--"
        head, content = await self._head()
        problem = await self._written(content)
        if problem is None and not _cut_at(self.path, end):
            problem = "the upload ended too early; upload it again"
        told = _PROBLEM + problem.encode() if problem else b"moesim-file:" + self.path.name.encode()
        if problem:
            self.path.unlink(missing_ok=True)
        body = head + b"\r\n\r\n" + told + end + b"\r\n"
        return {"type": "http.request", "body": body, "more_body": False}

    async def _chunk(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise _LeftError
        self._more = bool(message.get("more_body"))
        return bytes(message.get("body", b""))

    async def _head(self) -> tuple[bytes, bytes]:
        from starlette.exceptions import HTTPException

        text = b""
        while b"\r\n\r\n" not in text:
            if not self._more or len(text) > MOST_HEAD:
                raise HTTPException(400, "no file in the upload")
            text += await self._chunk()
        head, _, content = text.partition(b"\r\n\r\n")
        return head, content

    async def _written(self, content: bytes) -> str | None:
        """Write all that comes; return why that was not possible. What comes then is read and dropped."""
        from starlette.concurrency import run_in_threadpool
        from starlette.exceptions import HTTPException

        size = len(content)
        told = self.headers.get(b"content-length", b"")
        announced = int(told) if told.isdigit() else 0
        try:
            if shutil.disk_usage(self.path.parent).free - announced < KEPT_FREE_BYTES:
                raise OSError(28, "No space left on device")
            with self.path.open("xb") as file:
                await run_in_threadpool(file.write, content)
                while self._more:
                    content = await self._chunk()
                    size += len(content)
                    if max(size, announced) > MOST_FILE_BYTES + MOST_HEAD:
                        raise HTTPException(413, f"larger than the limit of {MOST_FILE_MB:,} MB")
                    await run_in_threadpool(file.write, content)
            return None
        except OSError as error:
            self.path.unlink(missing_ok=True)
            while self._more:
                await self._chunk()
            return (
                f"the server cannot keep the file: {error.strerror or error}; free space in its folder for "
                "temporary files, or upload a smaller trace"
            )


def _cut_at(path: Path, end: bytes) -> bool:
    """Cut a file off at the end of its form; False where the form does not end."""
    with path.open("r+b") as file:
        size = file.seek(0, 2)
        start = max(0, size - len(end) - 64)
        file.seek(start)
        at = file.read().rfind(end)
        if at >= 0:
            file.truncate(start + at)
        return at >= 0


# -- what the framework holds --------------------------------------------------------------------------


def _dropped_for(
    name: Name, size: int, held: Mapping[Name, int], asked: Collection[Name]
) -> list[Name] | None:
    """The files to forget before a new one is taken; None where even then there is no room for it.

    Files that no widget has asked for go first, then the session's own, the oldest first. What widgets of
    other sessions have asked for is never forgotten.
    """
    if size > MOST_SESSION_BYTES:
        return None
    sizes = {other: of for other, of in held.items() if other != name}
    own = sorted((other for other in sizes if other[0] == name[0]), key=asked.__contains__)
    dropped: list[Name] = []
    for other in own:
        left = [of for (session, _), of in sizes.items() if session == name[0]]
        if len(left) < MOST_FILES and sum(left) + size <= MOST_SESSION_BYTES:
            break
        dropped.append(other)
        del sizes[other]
    for other in [*(other for other in sizes if other not in asked), *own]:
        if sum(sizes.values()) + size <= MOST_BYTES:
            break
        if sizes.pop(other, None) is not None:
            dropped.append(other)
    return dropped if sum(sizes.values()) + size <= MOST_BYTES else None


def limit() -> None:
    """Make the framework hold files within the limits, from the next server on; a second call does nothing.

    It has no public place for this, so its class is replaced where the server looks it up.
    """
    from streamlit.runtime import memory_uploaded_file_manager as module

    if not issubclass(module.MemoryUploadedFileManager, _Bounded):
        module.MemoryUploadedFileManager = bounded(module.MemoryUploadedFileManager)  # type: ignore[misc]


class _Bounded:
    """Marks the class that `bounded` makes."""


def bounded(base: Any) -> Any:
    """A class of the framework's file manager that keeps the limits and deletes what it forgets."""
    from starlette.exceptions import HTTPException

    class BoundedFiles(base, _Bounded):  # type: ignore[misc]
        def __init__(self, upload_endpoint: str) -> None:
            super().__init__(upload_endpoint)
            self.sizes: dict[Name, int] = {}
            """Bytes of every file, in the order in which they came, or were asked for last."""
            self.asked: set[Name] = set()
            """The files that a widget has asked for."""
            self.paths: dict[Name, Path] = {}
            self.lock = threading.RLock()

        def add_file(self, session_id: str, file: Any) -> None:
            name, path = (session_id, file.file_id), _file_of(file.data)
            with self.lock:
                for used in [one for one, other in self.paths.items() if not other.exists()]:
                    self.forget(used)  # its page took it: what is left is a name
                size = len(file.data) if path is None else path.stat().st_size
                dropped = _dropped_for(name, size, self.sizes, self.asked)
                if dropped is None:
                    raise HTTPException(507, "the server holds too many uploads; try again in some minutes")
                for other in dropped:
                    self.remove_file(*other)
                super().add_file(session_id, file)
                self.forget(name)
                self.sizes[name] = size
                if path is not None:
                    self.paths[name] = path

        def get_files(self, session_id: str, file_ids: Sequence[str]) -> Any:
            with self.lock:
                for name in [(session_id, file_id) for file_id in file_ids]:
                    if name in self.sizes:
                        self.sizes[name] = self.sizes.pop(name)
                        self.asked.add(name)
            return super().get_files(session_id, file_ids)

        def remove_file(self, session_id: str, file_id: str) -> None:
            with self.lock:
                super().remove_file(session_id, file_id)
                self.forget((session_id, file_id))

        def remove_session_files(self, session_id: str) -> None:
            with self.lock:
                super().remove_session_files(session_id)
                for name in [name for name in self.sizes if name[0] == session_id]:
                    self.forget(name)
            release(session_id)

        def forget(self, name: Name) -> None:
            self.sizes.pop(name, None)
            self.asked.discard(name)
            path = self.paths.pop(name, None)
            if path is not None:
                path.unlink(missing_ok=True)

    return BoundedFiles
