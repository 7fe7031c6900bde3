"""Links that carry the uploaded files of a scenario with them, compressed, so that they open anywhere.

The text is base64url of zlib of JSON: `{"preset", "set", "files"}`, where `files` holds the text of every
upload by the token that names it in the rest. A token is the hash of its file, which is checked.
"""

from __future__ import annotations

import binascii
import json
import zlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from moesim.app import uploads
from moesim.hwmodels.errors import InputError
from moesim.hwmodels.yaml_io import check

PARAMETER = "packed"
"""Query parameter that holds the text in the place of `preset` and `set`."""

MOST_CHARACTERS = 8_000
"""Limit on the text; browsers, servers and proxies take addresses of this length."""

MOST_BYTES = 1_000_000
"""Limit on what the text unpacks to, the same as for one uploaded file."""

MOST_VALUES = 10_000
"""Most texts and keys in it."""


def pack(name: str, texts: Sequence[str]) -> str | None:
    """The text of a scenario with the uploads that it uses; None where it uses none or would be too long.

    Recorded counts in NumPy's format are not text and are not embedded.
    """
    return _packed(name, tuple(texts), str(uploads.folder()))


@lru_cache(maxsize=256)
def _packed(name: str, texts: tuple[str, ...], folder: str) -> str | None:
    try:
        files = _files([name, *texts])
    except (InputError, UnicodeDecodeError):
        return None
    if not files or sum(map(len, files.values())) > MOST_BYTES // 2:
        return None
    data = json.dumps({"preset": name, "set": list(texts), "files": files}, separators=(",", ":"))
    text = urlsafe_b64encode(zlib.compress(data.encode(), 9)).decode().rstrip("=")
    return text if len(text) <= MOST_CHARACTERS else None


def _files(texts: Sequence[str]) -> dict[str, str]:
    """The text of every upload that is named in texts, and of those that are named inside these."""
    found: dict[str, str] = {}
    waiting = [token for text in texts for token in uploads.TOKEN.findall(text)]
    while waiting:
        token = waiting.pop()
        if token not in found:
            found[token] = uploads.path_of(token).read_bytes().decode("utf-8")
            waiting += uploads.TOKEN.findall(found[token])
    return found


def unpack(text: str) -> tuple[str, tuple[str, ...]]:
    """(preset, changes) of a packed link; its files are stored as uploads.

    Raises InputError for a text that is too long, damaged, unpacks to more than the limit, or holds a file
    that does not belong to its name.
    """
    if len(text) > MOST_CHARACTERS:
        raise InputError(
            f"the link's parameter {PARAMETER} has {len(text):,} characters, more than the "
            f"{MOST_CHARACTERS:,} that are read; send the saved scenario as a file instead"
        )
    data = _json_of(text)
    name, texts, files = data.get("preset"), data.get("set"), data.get("files")
    if not isinstance(name, str) or not isinstance(texts, list) or not isinstance(files, dict):
        raise _damaged("does not hold a preset, its changes and their files")
    if not all(isinstance(item, str) for item in [*texts, *files, *files.values()]):
        raise _damaged("holds something that is not text")
    for token, content in files.items():
        uploads.keep_named(token, content.encode())
    return name, tuple(texts)


def _json_of(text: str) -> dict[str, Any]:
    unzip = zlib.decompressobj()
    try:
        found = unzip.decompress(urlsafe_b64decode(text + "=" * (-len(text) % 4)), MOST_BYTES + 1)
    except (zlib.error, binascii.Error, ValueError):
        raise _damaged("is not compressed text, or was cut") from None
    if len(found) > MOST_BYTES:
        raise InputError(
            f"the link's parameter {PARAMETER} unpacks to more than the limit of {MOST_BYTES // 10**6} MB"
        )
    if not unzip.eof:
        raise _damaged("was cut")
    try:
        data = json.loads(found)
        check(data, MOST_VALUES, MOST_VALUES)
    except InputError as error:
        raise _damaged(f"holds what no scenario can: {error}") from None
    except (ValueError, RecursionError):
        raise _damaged("holds no JSON") from None
    if not isinstance(data, dict):
        raise _damaged("holds no JSON object")
    return data


def _damaged(what: str) -> InputError:
    return InputError(
        f"the link's parameter {PARAMETER} {what}: copy the whole link again, or ask for the saved scenario"
    )
