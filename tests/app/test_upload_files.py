"""What pages send by PUT goes to disk within limits, and is deleted when nobody needs it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("streamlit", reason="streamlit is not installed")

from starlette.exceptions import HTTPException
from streamlit.proto.Common_pb2 import FileURLs
from streamlit.runtime.memory_uploaded_file_manager import MemoryUploadedFileManager
from streamlit.runtime.uploaded_file_manager import DeletedFile, UploadedFile, UploadedFileRec

from moesim.app import upload_files
from moesim.app.uploads import folder as uploads_folder
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.files import READ_BELOW

GB = 2**30


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(READ_BELOW, str(tmp_path))
    yield tmp_path


@pytest.fixture
def manager() -> Any:
    return upload_files.bounded(MemoryUploadedFileManager)("/upload")


def put(manager: Any, session: str, file: str, gigabytes: float) -> Path:
    """A file as it arrives: its bytes on disk (none of them written here), and its name for the framework."""
    path = uploads_folder() / f"put-{abs(hash((session, file, gigabytes))):032x}"
    with path.open("wb") as sparse:
        sparse.truncate(int(gigabytes * GB))
    record = UploadedFileRec(file, f"{file}.json", "text/plain", b"moesim-file:" + path.name.encode())
    manager.add_file(session, record)
    return path


def held(manager: Any) -> dict[str, list[str]]:
    return {session: list(files) for session, files in manager.file_storage.items() if files}


def test_a_session_holds_what_came_last_and_what_its_widgets_hold(manager: Any) -> None:
    widget = put(manager, "one", "of a widget", 0.5)
    assert len(manager.get_files("one", ["of a widget", "never sent"])) == 1
    paths = [put(manager, "one", str(number), 0.375) for number in range(20)]
    assert held(manager) == {"one": ["of a widget", "16", "17", "18", "19"]}
    assert widget.exists() and [path.exists() for path in paths] == [False] * 16 + [True] * 4
    manager.get_files("one", ["16", "17", "18", "19"])
    put(manager, "one", "next", 0.5)
    assert held(manager) == {"one": ["16", "17", "18", "19", "next"]}, "what was asked for longest ago goes"
    assert not widget.exists()
    manager.remove_session_files("one")
    assert list(uploads_folder().iterdir()) == [], "the visitor left"


def test_many_small_files_are_bounded_too(manager: Any) -> None:
    for number in range(100):
        put(manager, "one", str(number), 0)
    assert len(held(manager)["one"]) == upload_files.MOST_FILES


def test_the_same_file_again_takes_its_own_place(manager: Any) -> None:
    for _ in range(20):
        put(manager, "one", "same", 0.5)
    assert held(manager) == {"one": ["same"]} and len(manager.sizes) == 1


def test_sessions_together_are_bounded_and_take_nothing_from_a_widget(manager: Any) -> None:
    put(manager, "owner", "of a widget", 1)
    manager.get_files("owner", ["of a widget"])
    for number in range(20):
        put(manager, f"flood {number}", "file", 1)
    total = sum(manager.sizes.values())
    assert total <= upload_files.MOST_BYTES and held(manager)["owner"] == ["of a widget"]
    for session in held(manager):
        manager.get_files(session, ["file"])
    with pytest.raises(HTTPException, match="too many uploads") as refused:
        put(manager, "late", "file", 2)
    assert refused.value.status_code == 507
    manager.remove_session_files("flood 19")
    manager.remove_file("flood 18", "file")
    put(manager, "late", "file", 2)


def test_the_server_takes_the_bounded_one() -> None:
    from streamlit.runtime import memory_uploaded_file_manager as module

    before = module.MemoryUploadedFileManager
    try:
        upload_files.limit()
        upload_files.limit()
        assert module.MemoryUploadedFileManager.__mro__.count(upload_files._Bounded) == 1
        assert issubclass(module.MemoryUploadedFileManager, before)
    finally:
        module.MemoryUploadedFileManager = before  # type: ignore[misc]


def test_a_forgotten_file_is_an_error_in_words() -> None:
    assert upload_files.given(None) is None
    with pytest.raises(InputError, match=r"no longer on this server; upload it again"):
        upload_files.given(DeletedFile("gone"))


# -- streaming -----------------------------------------------------------------------------------------

HEAD = b'--end\r\nContent-Disposition: form-data; name="file"; filename="rank0.json"\r\n\r\n'
END = b"\r\n--end--\r\n"


def sent(parts: list[bytes], *, leaves: bool = False, length: int | None = None) -> tuple[int, bytes]:
    """(status, body that the framework gets) of a form in parts; 0 where nothing was answered."""
    seen, status = b"", 0
    queue = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    queue.append({"type": "http.disconnect"} if leaves else {"type": "http.request", "body": b""})

    async def framework(scope: Any, receive: Any, send: Any) -> None:
        nonlocal seen
        assert all(key != b"content-length" for key, _ in scope["headers"])
        message = await receive()
        seen = message["body"]
        await send({"type": "http.response.start", "status": 204})

    async def receive() -> Any:
        return queue.pop(0)

    async def send(message: Any) -> None:
        nonlocal status
        status = message["status"]

    headers = [(b"content-type", b"multipart/form-data; boundary=end")]
    if length is not None:
        headers.append((b"content-length", str(length).encode()))
    scope = {"type": "http", "method": "PUT", "headers": headers}
    with ThreadPoolExecutor(
        1
    ) as pool:  # a thread of its own: a browser of other tests keeps a loop in this one
        pool.submit(asyncio.run, upload_files.ToDisk(framework)(scope, receive, send)).result()
    return status, seen


def uploaded(body: bytes, name: str = "rank0.json") -> Any:
    """What a page gets of a form that the framework got."""
    content = body.removeprefix(HEAD).removesuffix(END)
    return UploadedFile(UploadedFileRec("1", name, "", content), FileURLs())


@pytest.mark.parametrize("cut", [1, len(HEAD) - 2, len(HEAD) + 3, len(HEAD) + 10])
def test_a_file_is_written_while_it_arrives_wherever_its_parts_are_cut(cut: int, folder: Path) -> None:
    content = b"a\r\n\r\nb\r\n--en" * 3
    whole = HEAD + content + END
    status, body = sent([whole[:cut], whole[cut:-4], whole[-4:]])
    assert status == 204 and len(body) < len(HEAD) + 100
    (path,) = folder.iterdir()
    assert path.read_bytes() == content
    assert upload_files.given(uploaded(body)) == ("rank0.json", content)


def test_a_file_that_stops_half_way_is_deleted_and_nothing_is_answered(folder: Path) -> None:
    assert sent([HEAD + b"begin"], leaves=True) == (0, b"")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("announced", [None, 2 * upload_files.MOST_FILE_BYTES])
def test_a_file_above_the_limit_is_refused_while_it_arrives(
    announced: int | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if announced is None:
        monkeypatch.setattr(upload_files, "MOST_FILE_BYTES", 100)
    with pytest.raises(HTTPException, match="larger than the limit of 1,024 MB") as refused:
        sent([HEAD, bytes(upload_files.MOST_HEAD + 200), END], length=announced)
    assert refused.value.status_code == 413 and list(folder.iterdir()) == []


def test_a_full_disk_is_said_in_words_and_a_form_without_end_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, body = sent([HEAD + b"cut"])
    assert status == 204
    with pytest.raises(InputError, match=r"rank0.json: the upload ended too early; upload it again"):
        upload_files.given(uploaded(body))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    status, body = sent([HEAD, bytes(100), END])
    assert status == 204
    with pytest.raises(InputError, match="cannot keep the file: No space left on device; free space"):
        upload_files.keep_trace([uploaded(body)], "one")
    assert list(folder.iterdir()) == []


def test_a_large_file_is_no_small_one(manager: Any) -> None:
    path = put(manager, "one", "large", 0.5)
    file = uploaded(HEAD + b"moesim-file:" + path.name.encode() + END)
    with pytest.raises(InputError, match="larger than the limit of 4 MB"):
        upload_files.given(file)


# -- traces --------------------------------------------------------------------------------------------


def test_a_trace_stays_while_a_session_holds_it(folder: Path, manager: Any) -> None:
    path = put(manager, "one", "rank0", 0)
    file = uploaded(HEAD + b"moesim-file:" + path.name.encode() + END, "../../<b>rank 0.json")
    token = upload_files.keep_trace([file, file_of(b"{}", "rank1.json")], "one")
    kept = upload_files.trace_folder(token)
    assert kept is not None
    names = sorted(one.relative_to(kept).as_posix() for one in kept.rglob("*.json"))
    assert names == ["2 ranks/b-rank-0.json", "2 ranks/rank1.json"]
    upload_files.hold_trace(token, "two")
    manager.remove_session_files("one")
    assert kept.is_dir()
    manager.remove_session_files("two")
    assert upload_files.trace_folder(token) is None and list(folder.iterdir()) == []


def file_of(data: bytes, name: str) -> Any:
    return UploadedFile(UploadedFileRec("2", name, "", data), FileURLs())


@pytest.mark.parametrize("text", [None, 7, "..", "trace-", "../trace-" + "0" * 32, "trace-" + "0" * 32])
def test_no_other_text_is_a_trace(text: object) -> None:
    assert upload_files.trace_folder(text) is None


def test_a_file_that_is_gone_or_no_trace_by_its_name_leaves_nothing(folder: Path) -> None:
    gone = uploaded(HEAD + b"moesim-file:put-" + b"0" * 32 + END)
    for files, words in (([gone], "upload it again"), ([file_of(b"", "x.tar")], "ends in .json")):
        with pytest.raises(InputError, match=words):
            upload_files.keep_trace(files, "one")
    assert list(folder.iterdir()) == []


def test_the_oldest_trace_makes_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload_files, "MOST_BYTES", 10)
    first, last = (upload_files.keep_trace([file_of(bytes(8), "a.json")], "one") for _ in range(2))
    assert upload_files.trace_folder(first) is None and upload_files.trace_folder(last) is not None
