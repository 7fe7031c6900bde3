"""The folder of compiled code: private to its user, and one for each version of all that the code depends on.

Whoever writes machine code decides what a process does that runs it. The folder is therefore used only if
nobody but its user can write there, and its files only if they are those that were written down when they
were made: for this key, with these checksums, none missing, and each a whole object file.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from moesim.hwmodels.files import make_private_folder, writable_by_others
from moesim.simulator.engine.maxmin import LEVEL_TOLERANCE

FOLDER = "MOESIM_COMPILED"
"""Environment variable that names another folder for compiled code."""
SYMBOLS = "symbols.json"
"""Name of the file with the name of each function in its object file, and the kinds of its arguments."""
READY = "ready.json"
"""Name of the file with the key of a complete cache and the checksums of all its files."""
SAID = "said"
"""Name of the file, beside the folders of all versions, whose time is that of the last notice on stderr."""
FUNCTIONS = ("start", "advance", "fill_rows", "fill_payloads", "fill_noise")
"""The compiled functions that Python calls; each has an object file of its name."""

DAY_S = 86_400.0
"""Seconds between two notices, and between two attempts to compile where compiling failed."""

UNUSED_S = 30 * 86_400.0
"""Seconds after which code that no process has used is removed, when other code is written."""
KEY_CHARACTERS = 24

_ENGINE = Path(__file__).parent.parent
SOURCES = (_ENGINE / "compiled", _ENGINE / "fair_share.py", _ENGINE / "durations.py")
"""What the compiled code is made from, with `LEVEL_TOLERANCE` of `maxmin.py`."""


@cache
def numba_version() -> str | None:
    """Version of Numba; None where it or LLVM's binding is not installed, or only its metadata is there."""
    found = _version("numba")
    with suppress(ValueError):  # a module that was put in its place has no description
        return found if all(find_spec(name) for name in ("numba", "llvmlite")) else None
    return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cache_folder() -> Path | None:
    """The folder for this version of the sources, of Python, of Numba and of the processor.

    It is created, readable and writable by its user alone. None where that is not possible (`place`).
    """
    return place()[0]


@cache
def place() -> tuple[Path | None, str]:
    """(folder, ""), or (None, why compiled code can be kept nowhere and what helps)."""
    try:
        base = _base()
    except RuntimeError:
        return None, f"this user has no home; set {FOLDER} to a folder for compiled code"
    folder, named = base / _key(), FOLDER in os.environ
    try:
        make_private_folder(folder)
        if not named and not base.is_symlink():  # one of an earlier version under umask 002; ours by name
            base.chmod(0o700)
        for path in (base, folder):
            if writable_by_others(path):
                return None, (
                    f"others may write to {path}, or it is a link or another user's, and machine code in it "
                    f"would run as yours: remove it, or set {FOLDER} to a folder of mode 0700"
                )
    except OSError as error:
        return None, f"{error.filename or folder}: {error.strerror or error}; set {FOLDER} to another folder"
    if not os.access(folder, os.W_OK):
        return None, f"{folder} cannot be written to; set {FOLDER} to another folder"
    return folder, ""


def _base() -> Path:
    """The folder of the folders of all versions; raises RuntimeError for a user without a home."""
    named, shared = os.environ.get(FOLDER), os.environ.get("XDG_CACHE_HOME")
    if named:
        return Path(named)
    return (Path(shared) if shared else Path.home() / ".cache") / "moesim-compiled"


def first_today() -> bool:
    """Whether no process has given a notice for a day; it counts as given now.

    Where no time can be written down, every process may give it. Raises nothing.
    """
    try:
        stamp = _base() / SAID
        with suppress(FileNotFoundError):
            if 0.0 <= time.time() - stamp.lstat().st_mtime < DAY_S:
                return False
        make_private_folder(stamp.parent)
        handle = os.open(stamp, os.O_WRONLY | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
        os.close(handle)
        os.utime(stamp)
    except (OSError, RuntimeError):
        return True
    return True


def _key() -> str:
    digest = hashlib.sha256()
    about = (
        sys.version,
        numba_version(),
        _version("llvmlite"),
        _version("numpy"),
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
        return bool(listed == _contents(folder))
    except (OSError, ValueError, RecursionError):
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
            if other != folder and _is_key(name) and age_s > UNUSED_S and not writable_by_others(other):
                shutil.rmtree(other, ignore_errors=True)


def _is_key(name: str) -> bool:
    return len(name) == KEY_CHARACTERS and set(name) <= set("0123456789abcdef")


def write_down(folder: Path) -> None:
    """Write down what a complete cache holds, in one step; raises ValueError where it is not complete."""
    handle, name = tempfile.mkstemp(dir=folder)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(_contents(folder), file)
    Path(name).replace(folder / READY)


def forget(folder: Path) -> None:
    """Make a cache count as incomplete, so that it is made again."""
    with suppress(OSError):
        (folder / READY).unlink(missing_ok=True)


def empty(folder: Path, but: Sequence[str]) -> None:
    """Remove whatever a folder holds, but for files of these names."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name not in but:
            path.unlink(missing_ok=True)


def _contents(folder: Path) -> dict[str, object]:
    """Key and checksums of a complete cache; raises ValueError where a file is missing, foreign or cut."""
    code = {path.name: path.read_bytes() for path in sorted([*folder.glob("*.o"), *folder.glob(SYMBOLS)])}
    if code.keys() != {SYMBOLS, *(f"{name}.o" for name in FUNCTIONS)}:
        raise ValueError(f"{folder}: some functions are missing, or there are others")
    for name, data in code.items():
        if name != SYMBOLS and not _is_whole_object(data):
            raise ValueError(f"{folder / name}: not a whole object file")
    return {
        "key": folder.name,
        "files": {name: hashlib.sha256(data).hexdigest() for name, data in code.items()},
    }


def _is_whole_object(data: bytes) -> bool:
    """Whether a file is an object of Linux that was not cut; LLVM crashes at others. Any on other systems."""
    if sys.platform != "linux" or sys.maxsize < 2**32:
        return bool(data)
    sections, size, count = (
        int.from_bytes(data[first:last], sys.byteorder) for first, last in ((40, 48), (58, 60), (60, 62))
    )
    return data[:5] == b"\x7fELF\x02" and sections >= 64 and sections + size * count <= len(data)
