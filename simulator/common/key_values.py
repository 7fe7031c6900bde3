"""Reads the texts `key=value` that override keys of a scenario."""

from __future__ import annotations

from typing import Any

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.yaml_io import parse_mapping


def split_key_value(text: str) -> tuple[str, str | None]:
    """Split a text at the first `=` into its key, stripped of spaces, and the rest (None without a `=`)."""
    key, equals, value = text.partition("=")
    return key.strip(), value if equals else None


def overridden_key(text: str) -> str:
    """Return the dotted key of a `key=value` text."""
    return split_key_value(text)[0]


def key_and_text(text: str, option: str, form: str) -> tuple[str, str]:
    """Return the key and the text of the value.

    Raises InputError, with `option` and the `form` to write, if either is missing.
    """
    key, value = split_key_value(text)
    if value is None or not key:
        raise InputError(f"{option} {text!r}: write {form}")
    return key, value


def value_of(text: str, place: str) -> Any:
    """Read the text after the `=` as YAML. Raises InputError, naming `place`, for an invalid value."""
    return parse_mapping(f"value: {split_key_value(text)[1] or ''}", place)["value"]
