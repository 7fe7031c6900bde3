"""Reads the user's files, where reading by path is allowed, and writes files atomically."""

from __future__ import annotations

import errno
import gzip
import hashlib
import os
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import IO

from moesim.hwmodels.errors import InputError

READ_BELOW = "MOESIM_READ_BELOW"
"""Environment variable that names the one folder, besides the shipped data, that a server may read."""

_SHIPPED = Path(__file__).resolve().parent.parent
"""Holds the data folders of hwmodels and simulator, both in a checkout and in an installed package."""

_consulted: ContextVar[set[str] | None] = ContextVar("consulted", default=None)


@contextmanager
def consulted_paths() -> Iterator[set[str]]:
    """Collect the absolute paths of the files that were read or looked for, shipped data left out."""
    paths: set[str] = set()
    token = _consulted.set(paths)
    try:
        yield paths
    finally:
        _consulted.reset(token)


def fingerprint(path: str) -> str:
    """What a path holds now: the hash of a file's content, or one word for anything else."""
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return "absent"
    except (OSError, ValueError):
        return "folder" if is_folder(Path(path)) else "unreadable"


def _note(path: Path) -> None:
    paths = _consulted.get()
    if paths is not None and not path.is_relative_to(_SHIPPED):
        paths.add(str(path.absolute()))


def check_readable(path: Path, name: str | None = None) -> None:
    """Raise InputError where this process is a server and `path` is outside the folders that it may read.

    A server (`moesim app`) sets READ_BELOW, which its worker processes inherit; elsewhere every path may be
    read. The message calls the file `name` and does not reveal whether it exists.
    """
    _note(path)
    below = os.environ.get(READ_BELOW)
    if below is None:
        return
    real = resolved(path)
    folders = [Path(below).resolve(), _SHIPPED / "hwmodels" / "data", _SHIPPED / "simulator" / "data"]
    if not any(real.is_relative_to(folder) for folder in folders):
        raise InputError(
            f"{name or path.name}: files of the server are not read by path; upload the file, or give a "
            "shipped name"
        )


def is_there(path: Path) -> bool:
    """Whether the path exists; False for a path that is too long or contains a zero byte."""
    _note(path)
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def is_folder(path: Path) -> bool:
    """Whether the path is a folder; False for a path that is too long or contains a zero byte."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def resolved(path: Path) -> Path:
    """The absolute path with links followed; raises InputError for what cannot be a path."""
    try:
        return path.resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"{str(path)[:80]}: cannot be the path of a file: {error}") from None


def read_text(path: Path, most_bytes: int, what: str, *, strict: bool = True) -> str:
    """The text of a UTF-8 file of the user; `what` names the kind of file in messages.

    Where not `strict`, bytes that are not UTF-8 become replacement characters. Raises InputError for a
    file that is missing, larger than `most_bytes`, empty or binary.
    """
    check_readable(path)
    try:
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
    except (OSError, ValueError) as error:  # a zero byte in a name raises ValueError
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(f"{path}: cannot be read: {reason or error}") from None
    if len(data) > most_bytes:
        raise InputError(f"{path}: larger than the limit of {most_bytes / 10**6:g} MB for a {what}")
    try:
        text = data.decode("utf-8-sig", errors="strict" if strict else "replace")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not a text file (byte {error.start} is not UTF-8)") from None
    if "\0" in text:
        raise InputError(f"{path}: not a text file (it contains a zero byte)")
    if not text.strip():
        raise InputError(f"{path}: the file is empty; a {what} is expected")
    return text


def check_writable(path: Path, what: str) -> None:
    """Raise InputError where `path` is a folder, or its folder does not exist or cannot be written to."""
    try:
        is_folder, has_folder = path.is_dir(), path.parent.is_dir()
    except (OSError, ValueError) as error:
        raise InputError(f"{what} {str(path)[:80]}: cannot be the path of a file: {error}") from None
    if is_folder:
        raise InputError(f"{what} {path}: this is a folder; give a file name inside it")
    if not has_folder:
        raise InputError(f"{what} {path}: the folder {path.parent} does not exist; create it first")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise InputError(f"{what} {path}: the folder {path.parent} cannot be written to; give another one")


def make_private_folder(folder: Path) -> None:
    """Create a folder and its missing parents, each for its user alone whatever the umask; raises OSError.

    `mkdir(mode=0o700, parents=True)` gives only the last one this mode: others could replace it.
    """
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    for place in reversed(missing):
        place.mkdir(mode=0o700, exist_ok=True)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


def writable_by_others(path: Path) -> bool:
    """Whether anyone but this user may change a file or folder, or it is a link or another user's."""
    if not hasattr(os, "getuid"):  # Windows: what lies in a user's profile is theirs
        return False
    status = path.lstat()
    others = stat.S_IWGRP | stat.S_IWOTH
    return stat.S_ISLNK(status.st_mode) or status.st_uid != os.getuid() or bool(status.st_mode & others)


def cache_folder(variable: str, name: str) -> Path:
    """The user's cache folder of this name, or the one that the environment variable names.

    Nothing is created or checked. Raises RuntimeError for a user without a home.
    """
    named, base = os.environ.get(variable), os.environ.get("XDG_CACHE_HOME")
    return Path(named) if named else (Path(base) if base else Path.home() / ".cache") / name


def private_folder(variable: str, name: str) -> tuple[Path | None, str]:
    """(the user's cache folder of this name, ""), or (None, why there is none and what helps).

    It is created for this user alone, or is the one that the environment variable names; what others may
    write to is refused.
    """
    try:
        folder, named = cache_folder(variable, name), bool(os.environ.get(variable))
    except RuntimeError:
        return None, f"this user has no home; set {variable} to a folder"
    try:
        make_private_folder(folder)
        if not named and not folder.is_symlink():  # one that was made under umask 002; ours by name
            folder.chmod(0o700)
        if writable_by_others(folder):
            return None, (
                f"others may write to {folder}, or it is a link or another user's, and what lies in it could "
                f"be theirs: remove it, or set {variable} to a folder of mode 0700"
            )
    except OSError as error:
        where = error.filename or folder
        return None, f"{where}: {error.strerror or error}; set {variable} to another folder"
    if not os.access(folder, os.W_OK):
        return None, f"{folder} cannot be written to; set {variable} to another folder"
    return folder, ""


@contextmanager
def locked(path: Path) -> Iterator[IO[bytes] | None]:
    """The file, created and locked for this process alone; None where another process has locked it.

    The system releases the lock when its process ends, however that happens. Raises OSError.
    """
    with path.open("a+b") as file:
        try:
            if sys.platform == "win32":
                import msvcrt

                file.seek(1_000_000)  # beyond the text, which others may read
                msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
            else:
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            yield None
        else:
            yield file


def oldest_beyond(most_bytes: int, paths: Iterable[Path]) -> list[Path]:
    """The oldest of some files without which the others take at most `most_bytes`.

    Another process may remove any of them meanwhile.
    """
    found = []
    for path in paths:
        with suppress(FileNotFoundError):
            status = path.stat()
            found.append((status.st_mtime_ns, status.st_size, path))
    total, old = sum(size for _, size, _ in found), []
    for _, size, path in sorted(found):
        if total <= most_bytes:
            break
        total -= size
        old.append(path)
    return old


def write_atomically(path: Path, chunks: Iterable[str | bytes]) -> None:
    """Write text or bytes to `path` through a temporary file beside it, as gzip where the name ends in .gz.

    A reader sees the old file or the complete new one. The gzip header holds no time and no name, so
    equal content gives equal bytes. Raises InputError where the folder cannot be written to.
    """
    check_writable(path, "output file")
    try:
        # It lies beside the target, since a rename is atomic only inside one file system.
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise InputError(f"output file {path}: cannot be written: {error.strerror or error}") from None
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as raw:
            text = (chunk if isinstance(chunk, bytes) else chunk.encode() for chunk in chunks)
            if path.suffix == ".gz":
                with gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=raw, mtime=0) as packed:
                    packed.writelines(text)
            else:
                raw.writelines(text)
            raw.flush()
            os.fsync(raw.fileno())  # the content must be on disk before the name is
        mask = os.umask(0o077)  # it can only be read by setting it, so it is restored at once
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        temporary.replace(path)
    except OSError as error:
        raise InputError(f"output file {path}: cannot be written: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)
