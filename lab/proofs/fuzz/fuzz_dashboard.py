"""What reaches the dashboard's server beside links: files by PUT, packed links, and its file of scenarios."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import sqlite3
import tempfile
import zlib
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from fuzz_links import link, upload
from fuzz_mutator import Mutator

from moesim.app import scenario_links, scenario_store, upload_files, uploads
from moesim.hwmodels.files import READ_BELOW
from moesim.simulator.studies import result_cache

END = "fuzz-boundary"


class Sent(NamedTuple):
    """One request of a page: a file, a request to forget it, or a widget that asks for it."""

    method: str
    session: str
    file: str
    head: bytes
    data: bytes
    kind: str


def sent(m: Mutator) -> list[Sent]:
    """Some files of some sessions; few are large, as their bytes cost time here and nothing new there."""
    r = m.rng
    requests = []
    for _ in range(r.choice((1, 3, 30))):
        kind, name, data = upload(m)
        if r.random() < 0.1:
            name, data = str(m.value(name)), bytes(r.choice((0, 1, 3_999_000, 4_200_000, 5_000_000)))
        charset = r.choice((b"", b"", b"; charset=utf-7", b"; charset=utf-16-le", b"; charset=none"))
        quoted = name.encode(errors="surrogatepass").replace(b"\r", b"").replace(b"\n", b"")
        head = b'Content-Disposition: form-data; name="file"; filename="' + quoted + b'"'
        head += r.choice((b"", b"\r\nContent-Type: text/plain", b"\r\nContent-Type: " + b"x" * 200)) + charset
        if r.random() < 0.05:
            head = m.bytes_of(head.decode(errors="replace"))
        method = r.choice(("PUT", "PUT", "PUT", "ask", "DELETE"))
        session, file = (r.choice(("one", "two", "../three", "x" * 300)) for _ in range(2))
        requests.append(Sent(method, session, file, head, data, kind))
    return requests


@lru_cache(maxsize=1)
def _application() -> tuple[Any, Any]:
    """The framework's own routes for files in front of our manager."""
    from starlette.applications import Starlette
    from streamlit import config
    from streamlit.runtime.memory_uploaded_file_manager import MemoryUploadedFileManager
    from streamlit.web.server.starlette.starlette_routes import create_upload_routes

    config.set_option("server.enableXsrfProtection", False)
    config.set_option("server.maxUploadSize", 4)
    manager = upload_files.bounded(MemoryUploadedFileManager)("/_stcore/upload_file")

    class EverySession:
        def is_active_session(self, session: str) -> bool:
            return True

    routes = create_upload_routes(EverySession(), manager, None)  # type: ignore[arg-type]
    return upload_files.ToDisk(Starlette(routes=routes)), manager


async def _answered(app: Any, request: Sent) -> int:
    """The status of a request."""
    body = f"--{END}\r\n".encode() + request.head + b"\r\n\r\n" + request.data + f"\r\n--{END}--\r\n".encode()
    path = f"/_stcore/upload_file/{request.session}/{request.file}"
    kind = f"multipart/form-data; boundary={END}".encode()
    scope = {
        "type": "http", "http_version": "1.1", "method": request.method, "path": path, "root_path": "",
        "raw_path": path.encode(), "query_string": b"", "headers": [(b"content-type", kind)],
        "scheme": "http", "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1),
    }  # fmt: skip
    status = 0

    async def receive() -> Mapping[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Mapping[str, Any]) -> None:
        nonlocal status
        status = message.get("status", status)

    await app(scope, receive, send)
    return status


def read_sent(case: list[Sent], folder: Path, rng: random.Random) -> None:
    """Every request is answered, the server holds no more than its limits, and pages read what it holds."""
    from streamlit.proto.Common_pb2 import FileURLs
    from streamlit.runtime.uploaded_file_manager import DeletedFile, UploadedFile

    app, manager = _application()
    for session in list(manager.file_storage):
        manager.remove_session_files(session)
    for request in case:
        if request.method != "ask":
            status = asyncio.run(_answered(app, request))
            assert status < 500 or status == 507, f"status {status}"
        else:
            found = manager.get_files(request.session, [request.file])
            held: Any = UploadedFile(found[0], FileURLs()) if found else DeletedFile(request.file)
            _accepted(request.kind, *(upload_files.given(held) or ("", b"")))
        on_disk = sum(path.stat().st_size for path in uploads.folder().glob("put-*"))
        assert on_disk == sum(manager.sizes.values()) <= upload_files.MOST_BYTES
        assert all(len(files) <= upload_files.MOST_FILES for files in manager.file_storage.values())


def _accepted(kind: str, name: str, data: bytes) -> None:
    options = {"like": "hgx-h200"} if kind == "topology" else {}
    uploads.path_of(uploads.accept(kind, name, data, **options).token).unlink()


def packed(m: Mutator) -> str:
    """A packed link, sound or not."""
    r = m.rng
    name, texts = link(m)
    _, _, data = upload(m)
    token = (
        uploads._path_of_content(data, ".yaml").name if r.random() < 0.7 else str(m.value("upload-0.yaml"))
    )
    whole: Any = {
        "preset": name,
        "set": [*texts, f"model={token}"],
        "files": {token: data.decode(errors="replace")},
    }
    text = json.dumps(m.data(whole) if r.random() < 0.5 else whole)
    if r.random() < 0.3:
        text = m.text(text)
    if r.random() < 0.3:
        text = text.replace("a", "\\ud800", 1)
    link_text = urlsafe_b64encode(zlib.compress(text.encode(errors="replace"), 9)).decode().rstrip("=")
    return m.text(link_text) if r.random() < 0.1 else link_text


def read_packed(case: str, folder: Path, rng: random.Random) -> None:
    """What is read can be written again: as a link, and as a row of the store."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        before = os.environ.get(READ_BELOW)
        os.environ[READ_BELOW] = own
        try:
            name, texts = scenario_links.unpack(case)
            scenario_links.pack(name, texts)
            json.dumps([name, *texts], ensure_ascii=False).encode()
        finally:
            del os.environ[READ_BELOW]
            if before is not None:
                os.environ[READ_BELOW] = before


@lru_cache(maxsize=1)
def _kept() -> bytes:
    """A file of scenarios with some rows."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / scenario_store.FILE
        with sqlite3.connect(path) as base:
            base.execute(scenario_store.TABLE)
            rows = [("one", str(n), f"scenario {n}", "[]" * 200, float(n)) for n in range(60)]
            base.executemany("INSERT INTO scenarios VALUES (?, ?, ?, ?, ?)", rows)
        base.close()
        return path.read_bytes()


def kept(m: Mutator) -> tuple[bytes, str]:
    """(file, a statement run on it): bytes changed, cut or foreign, rows and tables changed."""
    r, data = m.rng, bytearray(_kept())
    if r.random() < 0.6:
        for _ in range(r.choice((1, 2, 20, 500))):
            data[r.randrange(len(data)) if r.random() < 0.7 else r.randrange(200)] = r.randrange(256)
        return bytes(data[: len(data) if r.random() < 0.8 else r.randrange(len(data))]), ""
    column = r.choice(("owner", "number", "name", "written", "changed_s"))
    value = r.choice(("NULL", "7", "1e999", "x'ff00'", "''", "'text'", "zeroblob(100000)"))
    statement = r.choice(
        (
            f"UPDATE scenarios SET {column} = {value} WHERE number > '3'",
            f"ALTER TABLE scenarios DROP COLUMN {column}",
            "ALTER TABLE scenarios RENAME TO others",
            "DROP TABLE scenarios",
            "CREATE VIEW other AS SELECT * FROM nothing",
            "CREATE TRIGGER harm BEFORE INSERT ON scenarios BEGIN SELECT missing(); END",
            "PRAGMA user_version = 7",
            "PRAGMA journal_mode = WAL",
        )
    )
    return bytes(data), statement


def read_kept(case: tuple[bytes, str], folder: Path, rng: random.Random) -> None:
    """Pages list scenarios and add one, which is never lost; neither is a damaged file."""
    place = folder / "scenarios"
    place.mkdir(exist_ok=True)
    data, statement = case
    (place / scenario_store.FILE).write_bytes(data)
    if statement:
        base = sqlite3.connect(place / scenario_store.FILE, isolation_level=None)
        with suppress(sqlite3.Error):  # such as a column of the key, which cannot be dropped
            base.execute(statement)
        base.close()
    os.environ[result_cache.FOLDER] = str(place)
    try:
        _start_anew()
        scenario_store.recent("one")
        scenario_store.put("one", "new", "a new one", "[]")
        scenario_store.remove("one", "5")
        for _ in range(2):
            assert "new" in [entry.number for entry in scenario_store.recent("one")], "a scenario was lost"
            _start_anew()
        assert sum(1 for _ in place.glob(f"{scenario_store.FILE}*")) >= 1
    finally:
        scenario_store._disconnect()
        os.environ[result_cache.FOLDER] = "off"
        shutil.rmtree(place, ignore_errors=True)


def _start_anew() -> None:
    scenario_store._disconnect()
    scenario_store._waiting.clear()
    scenario_store._failed_s.clear()
    scenario_store._problem = scenario_store._set_aside = None
