"""The folder of compiled code: private to its user, and one for each version of all that the code depends on.

Whoever writes machine code decides what a process does that runs it. The folder is therefore
used only if nobody but its user can write there, and its files only if they have the checksums that were
written down when they were made.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import stat
import sys
import tempfile
import time
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from moesim.simulator.engine.maxmin import LEVEL_TOLERANCE

FOLDER = "MOESIM_COMPILED"
"""Environment variable that names another folder for compiled code."""
SYMBOLS = "symbols.json"
"""Name of the file with the name of each function in its object file, and the kinds of its arguments."""
READY = "ready.json"
"""Name of the file with the checksums of all files of a complete cache."""

UNUSED_S = 30 * 86_400.0
"""Seconds after which code that no process has used is removed, when other code is written."""
KEY_CHARACTERS = 24

_ENGINE = Path(__file__).parent.parent
SOURCES = (_ENGINE / "compiled", _ENGINE / "fair_share.py", _ENGINE / "durations.py")
"""What the compiled code is made from, with `LEVEL_TOLERANCE` of `maxmin.py`."""


@cache
def numba_version() -> str | None:
    """Version of Numba; None where it is not installed."""
    try:
        return version("numba")
    except PackageNotFoundError:
        return None


@cache
def cache_folder() -> Path | None:
    """The folder for this version of the sources, of Python, of Numba and of the processor.

    It is created, readable and writable by its user alone. None where that is not possible.
    """
    named, base = os.environ.get(FOLDER), os.environ.get("XDG_CACHE_HOME")
    try:
        shared = Path(base) if base else Path.home() / ".cache"
        folder = (Path(named) if named else shared / "moesim-compiled") / _key()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        private = _is_private(folder) and _is_private(folder.parent)
    except (OSError, RuntimeError):  # a user without a home
        return None
    return folder if private and os.access(folder, os.W_OK) else None


def _is_private(folder: Path) -> bool:
    """Whether the user owns a folder and nobody else can write to it."""
    if not hasattr(os, "getuid"):  # Windows: folders of a user's profile are theirs
        return True
    status = folder.lstat()
    others = stat.S_IWGRP | stat.S_IWOTH
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & others


def _key() -> str:
    digest = hashlib.sha256()
    about = (
        sys.version,
        numba_version(),
        version("numpy"),
        platform.machine(),
        _processor(),
        LEVEL_TOLERANCE,
    )
    digest.update(repr(about).encode())
    for source in SOURCES:
        for path in sorted(source.glob("*.py")) if source.is_dir() else [source]:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:KEY_CHARACTERS]


def _processor() -> str:
    """Name of the processor, for whose instructions the code is made."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            lines = file.read(4096).splitlines()
    except OSError:
        return platform.processor()
    return "".join(line for line in lines if line.startswith(("model name", "CPU part", "flags")))


def is_ready(folder: Path | None) -> bool:
    """Whether a folder holds a complete cache whose files are those that were written down."""
    if folder is None:
        return False
    try:
        listed = json.loads((folder / READY).read_text(encoding="utf-8"))
        return bool(listed) and listed == _checksums(folder)
    except (OSError, ValueError):
        return False


def mark_used(folder: Path) -> None:
    """Note that a process uses a folder's code, so that `remove_unused` leaves it."""
    with suppress(OSError):
        os.utime(folder)


def remove_unused(folder: Path) -> None:
    """Remove the folders beside this one whose code, of other versions, nobody has used for a month."""
    for other in folder.parent.iterdir():
        with suppress(OSError):
            name, age_s = other.name, time.time() - other.stat().st_mtime
            if other != folder and _is_key(name) and age_s > UNUSED_S and _is_private(other):
                shutil.rmtree(other, ignore_errors=True)


def _is_key(name: str) -> bool:
    return len(name) == KEY_CHARACTERS and set(name) <= set("0123456789abcdef")


def write_down(folder: Path) -> None:
    """Write the checksums of a complete cache, in one step."""
    handle, name = tempfile.mkstemp(dir=folder)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(_checksums(folder), file)
    Path(name).replace(folder / READY)


def empty(folder: Path, but: str) -> None:
    """Remove whatever a folder holds, but for one file."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != but:
            path.unlink(missing_ok=True)


def _checksums(folder: Path) -> dict[str, str]:
    code = [*folder.glob("*.o"), *folder.glob(SYMBOLS)]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(code)}
