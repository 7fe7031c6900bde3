"""Compiles the event loop into the cache on disk: `python -P -m moesim.simulator.engine.compiled.warm`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, NamedTuple

from moesim.simulator.engine.compiled.cache import (
    DAY_S,
    cache_folder,
    empty,
    is_ready,
    numba_version,
    place,
    remove_unused,
    write_down,
)
from moesim.simulator.engine.compiled.native import CannotCompileError, compile_to

LOCK = "compiling"
"""Name of the file that the process which compiles has locked; it holds a line for each attempt that has not
ended by itself. The system releases the lock when its process ends, however that happens."""
FAILED = "failed"
"""Name of the file that says why the last attempt to compile failed."""
MOST_ATTEMPTS = 3
"""Attempts that ended without a word, as when memory runs out, after which the next one waits for a day."""
OLD_S = 900.0
"""Age in seconds from which a process that still compiles is said to hang."""


class _Lock(NamedTuple):
    held: bool
    """Whether another process compiles now."""
    attempts: tuple[str, ...]
    """Numbers of the processes that compiled and did not end by themselves, and of the one that compiles."""
    age_s: float
    """Seconds since the last attempt began."""


def warm() -> bool:
    """Compile the event loop into the cache unless it is there; return whether the cache is ready.

    Only one process compiles at a time; another one returns at once. Raises CannotCompileError.
    """
    folder = cache_folder()
    if folder is None or numba_version() is None:
        return False
    if is_ready(folder):
        return True
    try:
        with _locked(folder) as file:
            if file is None:
                return False
            if not is_ready(folder):  # another process has compiled meanwhile
                file.write(f"{os.getpid()}\n".encode())
                file.flush()
                _compile(folder)
                file.truncate(0)
    except OSError as error:
        reason = f"{error.filename or folder}: {error.strerror or error}"
        _note_failure(folder, reason)
        raise CannotCompileError(reason) from error
    return is_ready(folder)


def _compile(folder: Path) -> None:
    empty(folder, but=(LOCK,))  # damaged files, of which none may be read
    try:
        compile_to(folder)
        write_down(folder)
    except (CannotCompileError, ValueError) as error:
        _note_failure(folder, str(error))
        (folder / LOCK).write_bytes(b"")
        raise CannotCompileError(str(error)) from error
    remove_unused(folder)


def _note_failure(folder: Path, reason: str) -> None:
    with suppress(OSError):
        (folder / FAILED).write_text(reason, encoding="utf-8")


def wait_until_warm(patience_s: float = 300.0) -> bool:
    """Compile the event loop, or wait for the process that does; return whether the cache is ready.

    Without Numba or a folder there is nothing to wait for. Raises CannotCompileError.
    """
    end = time.monotonic() + patience_s
    while not warm():
        if cache_folder() is None or numba_version() is None or time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


@cache
def warm_once() -> None:
    """Before the first use of compiled code in a process: fill the cache, or rebuild a damaged one."""
    warm()


def problem() -> str | None:
    """Why predictions stay on SimPy until somebody helps, in words for people; None where they do not."""
    folder, why = place()
    if numba_version() is None:
        return "Numba and llvmlite are not installed, or cannot be imported (pip install 'numba>=0.61')"
    if folder is None or is_ready(folder):
        return why or None
    try:
        lock = _lock(folder)
        failed = folder / FAILED
        if failed.exists() and time.time() - failed.stat().st_mtime < DAY_S and not lock.held:
            return f"{failed.read_text(encoding='utf-8', errors='replace')[:400]}; tried again after a day"
    except OSError as error:
        return f"{error.filename or folder}: {error.strerror or error}"
    last = lock.attempts[-1] if lock.attempts else ""
    if lock.held and lock.age_s > OLD_S:
        return f"process {last} has been compiling for {lock.age_s / 60:.0f} minutes: end it"
    if not lock.held and len(lock.attempts) >= MOST_ATTEMPTS and lock.age_s < DAY_S:
        return (
            f"{len(lock.attempts)} processes that compiled were ended before they were done, the last with "
            f"number {last}, as where memory runs out; remove {folder} to try again before a day is over"
        )
    return None


def compiling() -> str | None:
    """The number of the process that compiles now; None where none does."""
    folder = cache_folder()
    with suppress(OSError):
        lock = _lock(folder) if folder is not None else None
        if lock is not None and lock.held:
            return lock.attempts[-1] if lock.attempts else "?"
    return None


def start_in_background() -> None:
    """Start a process that warms the cache with low priority, unless one does so already or none could."""
    if problem() is not None or compiling() is not None:
        return
    command = [sys.executable, "-P", "-m", "moesim.simulator.engine.compiled.warm"]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    try:
        subprocess.Popen(command, start_new_session=True, **quiet)  # type: ignore[call-overload]
    except OSError:
        return


def _lock(folder: Path) -> _Lock:
    """What the lock of a folder says; raises OSError where it can say nothing."""
    with _locked(folder) as file:
        held = file is None
    lines = tuple((folder / LOCK).read_text(encoding="utf-8", errors="replace").split())
    return _Lock(held, lines, time.time() - (folder / LOCK).stat().st_mtime)


@contextmanager
def _locked(folder: Path) -> Iterator[IO[bytes] | None]:
    """The lock file, locked and empty but for attempts; None where another process has locked it."""
    with (folder / LOCK).open("a+b") as file:
        try:
            _lock_file(file)
        except (BlockingIOError, PermissionError):
            yield None
        else:
            yield file


if sys.platform == "win32":

    def _lock_file(file: IO[bytes]) -> None:
        import msvcrt

        file.seek(1_000_000)  # beyond the text, which others may read
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)

else:

    def _lock_file(file: IO[bytes]) -> None:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


if __name__ == "__main__":
    if hasattr(os, "nice"):
        os.nice(10)
    try:
        sys.exit(0 if warm() else 1)
    except CannotCompileError as reason:
        sys.exit(f"moesim: {reason}")
