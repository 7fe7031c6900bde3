"""Tells visitors apart by a signed random token in a cookie, which outlives a reload of the page.

Without it a reload would lose the jobs that a visitor started, because the framework then starts another
session. The address cannot hold the token, since people share addresses.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import streamlit as st

from moesim.hwmodels.files import make_private_folder
from moesim.simulator.studies import result_cache

COOKIE = "moesim_visitor"
"""Name of the cookie; the port of the server follows, because browsers send cookies to every port."""

_TOKEN = re.compile(r"[0-9a-f]{32}\.[0-9a-f]{32}")
_IN_HEADER = re.compile(rf"(?:^|;)\s*{COOKIE}_\d{{1,5}}=([0-9a-f]{{32}}\.[0-9a-f]{{32}})\s*(?=;|$)")
SECRET = "visitor-secret"
"""File beside the kept predictions with what signs tokens: a restarted server knows its visitors."""

SECRET_BYTES = 32

log = logging.getLogger("moesim.app")

KEPT_S = 180 * 24 * 3600
"""How long a browser keeps the cookie."""

_SESSION = "visitor"


def issued() -> str:
    """A new token: 128 random bits and their signature."""
    name = secrets.token_hex(16)
    return f"{name}.{_signature(name)}"


def is_ours(token: str) -> bool:
    """Whether this server issued the token: a forged one counts as that of a new visitor."""
    name, _, signature = token.partition(".")
    return _TOKEN.fullmatch(token) is not None and hmac.compare_digest(signature, _signature(name))


def in_header(cookies: str) -> str | None:
    """The token that this process issued among those of a `Cookie` header; None where there is none."""
    return next((token for token in _IN_HEADER.findall(cookies) if is_ours(token)), None)


def set_cookie(token: str, port: int) -> str:
    """The `Set-Cookie` header of a token, which scripts and other sites cannot read."""
    return f"{COOKIE}_{port}={token}; Path=/; Max-Age={KEPT_S}; HttpOnly; SameSite=Lax"


def of(token: str) -> str:
    """The visitor of a token: a hash of it, which names jobs and folders without giving the token away."""
    return hashlib.sha256(token.encode()).hexdigest()[:32]


def current() -> str:
    """The visitor of this session.

    A session without a token of ours is a visitor of its own.
    """
    known: Any = st.session_state.get(_SESSION)
    if known is None:
        token = next((text for text in _cookies() if is_ours(text)), None) or issued()
        known = st.session_state[_SESSION] = of(token)
    return str(known)


def _cookies() -> list[str]:
    """The values of our cookies in the browser's request; a simulated browser has none."""
    try:
        return [str(value) for name, value in st.context.cookies.items() if name.startswith(COOKIE)]
    except (AttributeError, RuntimeError):
        return []


def _signature(name: str) -> str:
    return hmac.new(_secret(), name.encode(), hashlib.sha256).hexdigest()[:32]


@lru_cache(maxsize=1)
def _secret() -> bytes:
    """What signs tokens: a file's that only its user can read, or this process's own where there is none.

    A file that is empty, cut or open to others is replaced, which makes its visitors new ones.
    """
    folder, fresh = result_cache.folder(), secrets.token_bytes(SECRET_BYTES)
    if folder is None:
        return fresh
    path = folder / SECRET
    try:
        make_private_folder(folder)
        found = _kept_secret(path)
        if found is not None:
            return found
        if path.is_symlink() or path.exists():
            log.warning("%s was damaged, or others could read or change it: it is replaced", path)
        handle, name = tempfile.mkstemp(dir=folder)  # readable for this user only
        with os.fdopen(handle, "wb") as file:
            file.write(fresh)
        Path(name).replace(path)
        return _kept_secret(path) or fresh  # another server may have been later
    except OSError as error:
        log.warning("visitors are known until this server ends, as %s cannot be kept: %s", path, error)
        return fresh


def _kept_secret(path: Path) -> bytes | None:
    """The secret in a file; None where there is none, or one that others may know or have written."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            return None
        raise
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(file.fileno())
        own = not hasattr(os, "getuid") or (status.st_uid == os.getuid() and not status.st_mode & 0o077)
        found = file.read(SECRET_BYTES + 1)
    return found if own and stat.S_ISREG(status.st_mode) and len(found) == SECRET_BYTES else None
