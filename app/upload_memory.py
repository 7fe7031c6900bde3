"""Bounds what the server holds in memory of the files that pages send, which it otherwise never forgets.

The framework takes a file by PUT, before any widget of a page names it, and holds it until the session ends.
The dashboard needs it for one run of the script: what it accepts lies in the folder of `uploads`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from moesim.hwmodels.errors import InputError

MOST_FILES = 16
MOST_SESSION_BYTES = 16_000_000
"""Limits on the files of one session, four times as much as the largest one."""
MOST_BYTES = 64_000_000
"""Limit on the files of all sessions."""

Name = tuple[str, str]
"""(session, file)."""


def given(file: Any) -> tuple[str, bytes] | None:
    """(name, bytes) of what an uploader of a page holds; None where it holds nothing.

    Raises InputError where the server has forgotten the file, or never had it.
    """
    if file is None:
        return None
    if not hasattr(file, "getvalue"):
        raise InputError("the uploaded file is not on this server (any more); upload it again")
    return file.name, file.getvalue()


class Ledger:
    """Which files are held, how large they are, and which of them a widget has asked for."""

    def __init__(self) -> None:
        """No files."""
        self.sizes: dict[Name, int] = {}
        """In the order in which they came, or were asked for last."""
        self.asked: set[Name] = set()

    def dropped_for(self, session: str, file: str, size: int) -> list[Name] | None:
        """The files to forget before a new one is taken; None where even then there is no room for it.

        Files that no widget has asked for go first, then the session's own, the oldest first. What widgets of
        other sessions have asked for is never forgotten.
        """
        if size > MOST_SESSION_BYTES:
            return None
        sizes = {name: held for name, held in self.sizes.items() if name != (session, file)}
        own = sorted((name for name in sizes if name[0] == session), key=self.asked.__contains__)
        dropped: list[Name] = []

        def drop(name: Name) -> None:
            dropped.append(name)
            del sizes[name]

        for name in own:
            held = [of for (other, _), of in sizes.items() if other == session]
            if len(held) < MOST_FILES and sum(held) + size <= MOST_SESSION_BYTES:
                break
            drop(name)
        for name in [*(name for name in sizes if name not in self.asked), *own]:
            if sum(sizes.values()) + size <= MOST_BYTES:
                break
            if name in sizes:
                drop(name)
        return dropped if sum(sizes.values()) + size <= MOST_BYTES else None

    def take(self, name: Name, size: int) -> None:
        """A file has come."""
        self.sizes.pop(name, None)
        self.sizes[name] = size
        self.asked.discard(name)

    def ask(self, name: Name) -> None:
        """A widget has asked for a file."""
        if name in self.sizes:
            self.sizes[name] = self.sizes.pop(name)
            self.asked.add(name)

    def drop(self, name: Name) -> None:
        """A file is gone."""
        self.sizes.pop(name, None)
        self.asked.discard(name)


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
    """A class of the framework's file manager that keeps the limits."""
    from starlette.exceptions import HTTPException

    class BoundedFiles(base, _Bounded):  # type: ignore[misc]
        def __init__(self, upload_endpoint: str) -> None:
            super().__init__(upload_endpoint)
            self.ledger = Ledger()
            self.ledger_lock = threading.RLock()

        def add_file(self, session_id: str, file: Any) -> None:
            with self.ledger_lock:
                size = len(file.data)
                dropped = self.ledger.dropped_for(session_id, file.file_id, size)
                if dropped is None:
                    raise HTTPException(507, "the server holds too many uploads; try again in some minutes")
                for name in dropped:
                    self.remove_file(*name)
                super().add_file(session_id, file)
                self.ledger.take((session_id, file.file_id), size)

        def get_files(self, session_id: str, file_ids: Sequence[str]) -> Any:
            with self.ledger_lock:
                for file_id in file_ids:
                    self.ledger.ask((session_id, file_id))
            return super().get_files(session_id, file_ids)

        def remove_file(self, session_id: str, file_id: str) -> None:
            with self.ledger_lock:
                super().remove_file(session_id, file_id)
                self.ledger.drop((session_id, file_id))

        def remove_session_files(self, session_id: str) -> None:
            with self.ledger_lock:
                super().remove_session_files(session_id)
                for name in [name for name in self.ledger.sizes if name[0] == session_id]:
                    self.ledger.drop(name)

    return BoundedFiles
