"""What pages send by PUT stays within limits, and what a widget holds is forgotten last."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("streamlit", reason="streamlit is not installed")

from starlette.exceptions import HTTPException
from streamlit.runtime.memory_uploaded_file_manager import MemoryUploadedFileManager
from streamlit.runtime.uploaded_file_manager import DeletedFile, UploadedFileRec

from moesim.app import uploads
from moesim.hwmodels.errors import InputError

MB = 1_000_000


@pytest.fixture
def manager() -> Any:
    return uploads.bounded(MemoryUploadedFileManager)("/upload")


def put(manager: Any, session: str, file: str, megabytes: int) -> None:
    manager.add_file(session, UploadedFileRec(file, f"{file}.yaml", "text/plain", bytes(megabytes * MB)))


def held(manager: Any) -> dict[str, list[str]]:
    return {session: list(files) for session, files in manager.file_storage.items() if files}


def test_a_session_holds_what_came_last_and_what_its_widgets_hold(manager: Any) -> None:
    put(manager, "one", "of a widget", 4)
    assert len(manager.get_files("one", ["of a widget", "never sent"])) == 1
    for number in range(100):
        put(manager, "one", str(number), 3)
    assert held(manager) == {"one": ["of a widget", "96", "97", "98", "99"]}
    manager.get_files("one", ["96", "97", "98", "99"])
    put(manager, "one", "next", 4)
    assert held(manager) == {"one": ["96", "97", "98", "99", "next"]}, "what was asked for longest ago goes"


def test_many_small_files_are_bounded_too(manager: Any) -> None:
    for number in range(100):
        put(manager, "one", str(number), 0)
    assert len(held(manager)["one"]) == uploads.MOST_FILES


def test_the_same_file_again_takes_its_own_place(manager: Any) -> None:
    for _ in range(20):
        put(manager, "one", "same", 4)
    assert held(manager) == {"one": ["same"]} and len(manager.sizes) == 1


def test_sessions_together_are_bounded_and_take_nothing_from_a_widget(manager: Any) -> None:
    put(manager, "owner", "of a widget", 4)
    manager.get_files("owner", ["of a widget"])
    for number in range(100):
        put(manager, f"flood {number}", "file", 4)
    total = sum(manager.sizes.values())
    assert total <= uploads.MOST_BYTES and held(manager)["owner"] == ["of a widget"]
    for session in held(manager):
        manager.get_files(session, ["file"])
    with pytest.raises(HTTPException, match="too many uploads") as refused:
        put(manager, "late", "file", 8)
    assert refused.value.status_code == 507
    manager.remove_session_files("flood 99")
    manager.remove_file("flood 98", "file")
    put(manager, "late", "file", 8)


def test_the_server_takes_the_bounded_one() -> None:
    from streamlit.runtime import memory_uploaded_file_manager as module

    before = module.MemoryUploadedFileManager
    try:
        uploads.limit()
        uploads.limit()
        assert module.MemoryUploadedFileManager.__mro__.count(uploads._Bounded) == 1
        assert issubclass(module.MemoryUploadedFileManager, before)
    finally:
        module.MemoryUploadedFileManager = before  # type: ignore[misc]


def test_a_forgotten_file_is_an_error_in_words() -> None:
    assert uploads.given(None) is None
    with pytest.raises(InputError, match=r"not on this server \(any more\); upload it again"):
        uploads.given(DeletedFile("gone"))
