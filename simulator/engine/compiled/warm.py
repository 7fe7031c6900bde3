"""Compiles the event loop into the cache on disk: `python -m moesim.simulator.engine.compiled.warm`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

from moesim.simulator.engine.compiled.cache import (
    cache_folder,
    empty,
    is_ready,
    numba_version,
    remove_unused,
    write_down,
)
from moesim.simulator.engine.compiled.native import compile_to

LOCK = "compiling"
"""Name of the file that a process creates while it compiles."""
OLD_S = 900.0
"""Age in seconds from which a lock is that of a process that was killed."""


def warm() -> bool:
    """Compile the event loop into the cache unless it is there; return whether the cache is ready.

    Only one process compiles at a time; another one returns at once.
    """
    folder = cache_folder()
    if folder is None or numba_version() is None:
        return False
    if is_ready(folder):
        return True
    if not _locked(folder):
        return False
    try:
        empty(folder, but=LOCK)  # damaged files, of which none may be read
        compile_to(folder)
        write_down(folder)
        remove_unused(folder)
    finally:
        (folder / LOCK).unlink(missing_ok=True)
    return is_ready(folder)


def wait_until_warm(patience_s: float = 300.0) -> bool:
    """Compile the event loop, or wait for the process that does; return whether the cache is ready.

    Without Numba or a folder there is nothing to wait for.
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


def start_in_background() -> None:
    """Start a process that warms the cache with low priority, unless one does so already or none could."""
    folder = cache_folder()
    if folder is None or numba_version() is None or (folder / LOCK).exists():
        return
    command = [sys.executable, "-P", "-m", "moesim.simulator.engine.compiled.warm"]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    try:
        subprocess.Popen(command, start_new_session=True, **quiet)  # type: ignore[call-overload]
    except OSError:
        return


def _locked(folder: Path) -> bool:
    lock = folder / LOCK
    for _ in range(2):
        try:
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            with suppress(FileNotFoundError):  # its owner has just ended
                if time.time() - lock.stat().st_mtime < OLD_S:
                    return False
            lock.unlink(missing_ok=True)
        else:
            return True
    return False


if __name__ == "__main__":
    if hasattr(os, "nice"):
        os.nice(10)
    sys.exit(0 if warm() else 1)
